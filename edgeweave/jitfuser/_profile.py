"""Times of the fused groups."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import torch

__all__ = ["profile_groups"]

_RUNS = 5
_NAME = "LlgaPartition_"


def profile_groups(run: Callable[[], object]) -> list[float]:
    """Runs a fused function under torch's profiler.

    Args:
        run: Calls it once.

    Returns:
        Seconds per call of each group that ran, in the order in which they were compiled, which
        is that of the graph.
    """
    with torch.autograd.profiler.profile() as profile:
        for _ in range(_RUNS):
            run()
    total: dict[int, float] = defaultdict(float)
    for event in profile.function_events:
        if event.name.startswith(_NAME):
            total[int(event.name.removeprefix(_NAME))] += event.cpu_time_total
    return [1e-6 * total[number] / _RUNS for number in sorted(total)]

"""Measure what `edgeweave.runtime.tune_allocator()` is worth on this machine.

Each setting gets a process of its own, in turn, three times; the medians are printed. `--train`
adds training steps of a stock PyG GCN (needs the `pyg` extra), with the peak memory of the process.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

_ROUNDS = 3
_NUM_NODES, _NUM_EDGES, _WIDTH = 42_000, 579_000, 128


def _median_ms(call: Callable[[], object], repeats: int, warm_up: int) -> float:
    times = []
    for _ in range(warm_up + repeats):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[warm_up:])


def _training_step() -> Callable[[], object]:
    import torch
    from torch_geometric.nn import GCNConv

    generator = torch.Generator().manual_seed(0)
    src = torch.randint(_NUM_NODES, (_NUM_EDGES,), generator=generator)
    skewed = torch.rand(_NUM_EDGES, generator=generator) ** 3 * _NUM_NODES
    edge_index = torch.stack([src, skewed.long()])
    x = torch.randn(_NUM_NODES, _WIDTH, generator=generator)
    layers = [GCNConv(_WIDTH, _WIDTH), GCNConv(_WIDTH, _WIDTH), GCNConv(_WIDTH, 40)]
    optimizer = torch.optim.Adam([p for layer in layers for p in layer.parameters()])

    def step() -> None:
        optimizer.zero_grad()
        h = x
        for layer in layers:
            h = layer(h, edge_index).relu()
        h.square().mean().backward()
        optimizer.step()

    return step


def _measure(setting: str, *, train: bool) -> dict[str, float]:
    """Measure in this process, which has done nothing else yet."""
    if setting == "tuned":
        from edgeweave.runtime import tune_allocator

        tune_allocator()
    import torch

    def fill() -> torch.Tensor:
        return torch.empty(1 << 24).fill_(1.0)

    results: dict[str, float] = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # what is measured is the kernel's work

    def measure_in_thread() -> None:
        results["fill of a new 64 MiB tensor, second thread (ms)"] = _median_ms(fill, 20, 10)

    results["fill of a new 64 MiB tensor (ms)"] = _median_ms(fill, 20, 10)
    thread = threading.Thread(target=measure_in_thread)
    thread.start()
    thread.join()
    torch.set_num_threads(threads)
    if train:
        results["training step of a stock PyG GCN (ms)"] = _median_ms(_training_step(), 8, 4)
        peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        results["peak memory of that process (MiB)"] = peak_kib / 1024
    return results


def _in_new_process(setting: str, *, train: bool) -> dict[str, float]:
    command = [sys.executable, __file__, "--setting", setting, *(["--train"] if train else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> int:
    """Print one line for each quantity: untuned, tuned, ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--train", action="store_true", help="ten steps of a stock PyG GCN too")
    parser.add_argument("--setting", choices=("default", "tuned"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.setting:
        print(json.dumps(_measure(args.setting, train=args.train)))
        return 0
    runs: dict[str, list[dict[str, float]]] = {"default": [], "tuned": []}
    for _ in range(_ROUNDS):
        for setting, results in runs.items():
            results.append(_in_new_process(setting, train=args.train))
    print(f"{'':<50} {'default':>9} {'tuned':>9} {'ratio':>7}")
    for name in runs["default"][0]:
        default, tuned = (statistics.median(run[name] for run in runs[s]) for s in runs)
        print(f"{name:<50} {default:>9.1f} {tuned:>9.1f} {default / tuned:>6.1f}x")
    return 0


if __name__ == "__main__":
    sys.exit(main())

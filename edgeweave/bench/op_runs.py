"""`bench ops`: runs the op cases graph by graph."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterator

from edgeweave.bench.cases import CaseSpec
from edgeweave.bench.cases_family import family_specs
from edgeweave.bench.cases_mm import mm_specs
from edgeweave.bench.cases_scatter import scatter_specs
from edgeweave.bench.generators import op_graphs
from edgeweave.bench.harness import measure
from edgeweave.bench.op_graph import OpGraph
from edgeweave.bench.records import CaseResult, Settings


def op_specs(quick: bool, pattern: str = "") -> Iterator[CaseSpec]:
    """Lists the op cases, graph by graph, so that only one graph is in memory at a time.

    Args:
        quick: Small graphs and few widths.
        pattern: Regular expression that a case's name must match somewhere.

    Yields:
        The specs.

    Example:
        >>> from edgeweave.bench.op_runs import op_specs
        >>> [spec.case_id for spec in op_specs(quick=True, pattern="plan/mol")]
        ['plan/molecules']
    """
    for name, make in op_graphs(quick).items():
        graph = OpGraph(make)
        for spec in (
            *mm_specs(graph, name, quick),
            *scatter_specs(graph, name, quick),
            *family_specs(graph, name, quick),
        ):
            if re.search(pattern, spec.case_id):
                yield spec


def run_spec(spec: CaseSpec, settings: Settings) -> CaseResult:
    """Builds and measures one case; an exception becomes a result with status `"error"`.

    Args:
        spec: The case.
        settings: How long to measure.

    Returns:
        The result.
    """
    return guard(spec.group, spec.case_id, lambda: measure(spec.build(), settings))


def guard(group: str, case_id: str, run: Callable[[], CaseResult]) -> CaseResult:
    """Keeps the rest of a long run alive when one case raises; the report then shows the error.

    Args:
        group: The case's group.
        case_id: Its name.
        run: Measures it.

    Returns:
        What `run` returns, or a result with status `"error"` and the exception as message.

    Example:
        >>> from edgeweave.bench.op_runs import guard
        >>> guard("group", "group/case", lambda: 1 / 0).status
        'error'
    """
    try:
        return run()
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        message = f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})"
        return CaseResult(group, case_id, {}, "error", message)

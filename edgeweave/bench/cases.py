"""What the op suites share: the description of a case that is not built yet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from edgeweave.bench.records import Case, Reference, Traffic
from edgeweave.bench.reference import sample_columns

REDUCTIONS = ("sum", "mean", "amax", "amin")


@dataclass(frozen=True)
class CaseSpec:
    """A case by name, built only when it is to run.

    Attributes:
        group: Row of the numbers table.
        case_id: `group/graph/...`, what `--filter` looks at.
        build: Makes the inputs and the sides.
    """

    group: str
    case_id: str
    build: Callable[[], Case]


def column_reference(
    columns: int, compute: Callable[[Tensor], tuple[Tensor, ...]], eps: float | None = None
) -> Callable[[], Reference]:
    """Builds the `reference` of a case from a function of a few columns.

    Args:
        columns: Width of the features.
        compute: Gets column numbers, returns the right values of these columns.
        eps: Machine epsilon of the dtype; fp32's if None.

    Returns:
        The function that a case wants.
    """

    def reference() -> Reference:
        chosen = sample_columns(columns)
        values = compute(chosen)
        return Reference(values, chosen) if eps is None else Reference(values, chosen, eps)

    return reference


def mm_traffic(
    num_src: int, num_dst: int, num_edges: int, columns: int, element_bytes: int = 4
) -> Traffic:
    """Bytes of one gather-and-reduce pass with int32 columns and int64 row pointers.

    Args:
        num_src: Rows read.
        num_dst: Rows written.
        num_edges: Edges.
        columns: Width of the features.
        element_bytes: Size of one feature.

    Returns:
        Bytes with a row of x read anew for each edge, and with each row read once.

    Example:
        >>> from edgeweave.bench.cases import mm_traffic
        >>> mm_traffic(10, 10, 100, 16)
        Traffic(no_reuse=7528, compulsory=1768)
    """
    row = columns * element_bytes
    graph = 4 * num_edges + 8 * (num_dst + 1)
    return Traffic(
        no_reuse=num_edges * row + num_dst * row + graph,
        compulsory=num_src * row + num_dst * row + graph,
    )

"""Calls the public ops with arguments of every kind; only the documented errors may come out.

    python tests/fuzz/op_surface.py [--examples N | --seconds S] [--seed N] [--log FILE]

Runs in a process of its own, since what it looks for may end the process: the arguments of the call
in progress are in the log's last line. Exits with 0 if nothing was found.
"""

from __future__ import annotations

import argparse
import faulthandler
import resource
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import hypothesis
import torch
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parent))
import family_calls as family
import strategies as arg

import edgeweave
from edgeweave import scatter, sparse

# A call that takes longer than this is a hang: the largest inputs here take milliseconds.
HANG_S = 60
# Beyond what the interpreter and torch map: "too large" must be an error, not the machine's end.
MOST_NEW_BYTES = 6 << 30

Call = tuple[Callable[..., Any], dict[str, Any]]


@st.composite
def scatter_reduce_calls(draw: st.DrawFn) -> Call:
    shape = tuple(draw(st.lists(st.sampled_from(arg.SIZES), min_size=1, max_size=4)))
    dim = draw(st.integers(-len(shape), len(shape) - 1))
    slots = draw(st.sampled_from(arg.SIZES[1:]))
    index = draw(arg.along(draw(arg.indices(shape[dim], slots)), shape, dim % len(shape)))
    kwargs = {
        "src": draw(arg.features(shape)),
        "index": index,
        "dim": draw(arg.dims(dim)),
        "dim_size": draw(arg.counts(slots)),
        "reduce": draw(arg.words((*arg.REDUCES, "prod", "mul"))),
        "ties": draw(arg.words(("even", "first"))),
        "return_arg": draw(arg.seldom(4)),
        "include_self": draw(arg.seldom(5)),
    }
    if draw(arg.seldom(3)):
        out_shape = [slots if d == dim % len(shape) else n for d, n in enumerate(shape)]
        out = draw(arg.features(tuple(out_shape)))
        if isinstance(out, torch.Tensor) and isinstance(kwargs["src"], torch.Tensor):
            src = kwargs["src"]
            usable = src.dtype not in arg.OTHER_DTYPES and not out.is_meta and not out.is_sparse
            out = out.detach().to(src.dtype) if usable and not draw(arg.seldom(8)) else out
        kwargs["out"] = out
        kwargs["dim_size"] = None
    return scatter.scatter_reduce, kwargs


@st.composite
def gather_calls(draw: st.DrawFn) -> Call:
    shape = tuple(draw(st.lists(st.sampled_from(arg.SIZES), min_size=1, max_size=4)))
    dim = draw(st.integers(-len(shape), len(shape) - 1))
    length = draw(st.sampled_from(arg.SIZES))
    index = draw(arg.along(draw(arg.indices(length, shape[dim])), shape, dim % len(shape)))
    return scatter.gather, {
        "x": draw(arg.features(shape)),
        "index": index,
        "dim": draw(arg.dims(dim)),
    }


@st.composite
def edge_lists(draw: st.DrawFn, num_src: int, num_dst: int) -> Any:
    length = draw(st.sampled_from((*arg.SIZES, 200)))
    ends = [draw(arg.indices(length, n)) for n in (num_src, num_dst)]
    plain = all(isinstance(end, torch.Tensor) and end.device.type == "cpu" for end in ends)
    if not plain or ends[0].shape != ends[1].shape:
        return ends[0]
    edges = torch.stack([end.to(ends[0].dtype) for end in ends])
    if draw(arg.seldom(20)):
        return edges[:1] if draw(st.booleans()) else edges.unsqueeze(0)
    return edges.t().contiguous().t() if draw(arg.seldom(3)) else draw(arg.relaid(edges))


@st.composite
def mm_calls(draw: st.DrawFn) -> Call:
    nodes = draw(st.sampled_from(arg.SIZES[1:]))
    rest = tuple(draw(st.lists(st.sampled_from(arg.SIZES), max_size=3)))
    A = draw(arg.matrices(nodes, nodes) if draw(arg.seldom(3)) else edge_lists(nodes, nodes))
    kwargs: dict[str, Any] = {"A": A, "x": draw(arg.features((nodes, *rest)))}
    kwargs["reduce"] = draw(arg.words(arg.REDUCES))
    kwargs["ties"] = draw(arg.words(("even", "first")))
    kwargs["flow"] = draw(arg.words(("source_to_target", "source_to_target", "target_to_source")))
    if draw(st.booleans()) and isinstance(A, torch.Tensor) and A.dim() == 2:
        edges = A.shape[1] if A.layout is torch.strided else A._nnz()
        heads = rest[:1] if draw(arg.seldom(2)) else ()
        kwargs["weight"] = draw(arg.features((edges, *heads), floating=True))
    return sparse.mm, kwargs


def use_graph(A: Any, size: Any, rows: Any) -> Any:
    """Everything that a Graph can be asked."""
    if isinstance(A, torch.Tensor) and A.layout is torch.strided:
        graph = edgeweave.Graph(A, size=size)
    else:
        graph = edgeweave.Graph.from_matrix(A, rows)
    facts = (graph.rowptr, graph.col, graph.perm, graph.colptr, graph.row, graph.perm_t)
    degrees = (graph.in_degree, graph.out_degree)
    assert all(int(d.sum()) == graph.num_edges for d in degrees)
    return (*facts, *degrees, graph.is_sorted, graph.nbytes, repr(graph))


@st.composite
def graph_calls(draw: st.DrawFn) -> Call:
    nodes = draw(st.sampled_from(arg.SIZES))
    A = draw(edge_lists(nodes, nodes) if draw(st.booleans()) else arg.matrices(nodes, nodes))
    sizes = st.tuples(arg.counts(nodes), arg.counts(nodes))
    size = draw(st.one_of(st.none(), sizes, st.sampled_from((3, (3,), (1, 2, 3), "33"))))
    return use_graph, {"A": A, "size": size, "rows": draw(arg.words(("dst", "src")))}


# Every name of scatter's and sparse's `__all__` that takes tensors; test_fuzz.py compares.
OPS: dict[str, st.SearchStrategy[Call]] = {
    "scatter_reduce": scatter_reduce_calls(),
    "gather": gather_calls(),
    "mm": mm_calls(),
    "Graph": graph_calls(),
    "softmax": family.group_calls(scatter.softmax),
    "logsumexp": family.group_calls(scatter.logsumexp),
    "var": family.group_calls(scatter.var),
    "std": family.group_calls(scatter.std),
    "multi_reduce": family.group_calls(scatter.multi_reduce),
    "argmax": family.group_calls(scatter.argmax, floating=False),
    "argmin": family.group_calls(scatter.argmin, floating=False),
    "segment_reduce": family.segment_reduce_calls(),
    "index_sort": family.index_sort_calls(),
    "sddmm": family.sddmm_calls(edge_lists),
    "segment_matmul": family.segment_matmul_calls(),
}


def describe(value: Any) -> str:
    """An argument as one could type it again: not its values, but where they lie."""
    if isinstance(value, torch.Tensor):
        grad = ", requires_grad" if value.requires_grad else ""
        strides = value.stride() if value.layout is torch.strided else value.layout
        return f"<{value.dtype} {tuple(value.shape)} {strides} on {value.device}{grad}>"
    return " ".join(repr(value).split())[:200]


def is_documented(op: str, error: BaseException, kwargs: dict[str, Any]) -> bool:
    """Whether docs/safety.md lets this error out of a public op."""
    if type(error) in (IndexError, ValueError, TypeError):
        return True
    # Too large for this machine: torch's own error for its tensors, ours for the plan's arrays.
    too_large = ("not enough memory", "bad_alloc", "too large", "overflow")
    return isinstance(error, (RuntimeError, MemoryError)) and any(
        t in str(error) for t in too_large
    )


def tensors_of(result: Any) -> list[torch.Tensor]:
    return [t for t in (result if isinstance(result, tuple) else (result,)) if torch.is_tensor(t)]


def run(op: str, call: Call, log: TextIO, seen: Counter[str]) -> None:
    """One call and its backward pass."""
    function, kwargs = call
    log.write(f"{op}({', '.join(f'{k}={describe(v)}' for k, v in kwargs.items())})\n")
    log.flush()
    faulthandler.dump_traceback_later(HANG_S, exit=True)
    try:
        result = function(**kwargs)
        # Together: several results may share one graph.
        losses = [out.sum() for out in tensors_of(result) if out.requires_grad]
        if losses:
            torch.autograd.backward(losses)
        seen[f"{op}: a result"] += 1
    except Exception as error:
        if not is_documented(op, error, kwargs):
            raise
        rule = " ".join(str(error).split()[:6])
        seen[f"{op}: {type(error).__name__}" + (f" {rule}" if log.name != "/dev/null" else "")] += 1
    finally:
        faulthandler.cancel_dump_traceback_later()


def fuzz(op: str, examples: int, seed: int | None, log: TextIO, seen: Counter[str]) -> None:
    """`examples` calls of one op; raises the first finding, as small as it can be made."""

    @hypothesis.settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=seed is None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(OPS[op])
    def one(call: Call) -> None:
        run(op, call, log, seen)

    (one if seed is None else hypothesis.seed(seed)(one))()


def limit_memory() -> None:
    """An address space that ends not far above what is mapped now."""
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MOST_NEW_BYTES, hard))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=int, default=400, help="calls of each op, a round")
    parser.add_argument("--seconds", type=float, help="repeat with new seeds for so long")
    parser.add_argument("--seed", type=int, help="default: the same calls at each run")
    parser.add_argument("--log", type=Path, default=Path("/dev/null"))
    parser.add_argument("--op", choices=[*OPS], action="append", help="default: all")
    args = parser.parse_args()
    faulthandler.enable()
    # A warning is not an error here; tests of warnings are elsewhere.
    warnings.simplefilter("ignore")
    limit_memory()
    seen: Counter[str] = Counter()
    end = time.monotonic() + (args.seconds or 0)
    seed = args.seed if args.seconds is None or args.seed is not None else 1
    with args.log.open("w") as log:
        while True:
            for op in args.op or OPS:
                fuzz(op, args.examples, seed, log, seen)
            if time.monotonic() >= end:
                break
            seed = (seed or 0) + 1
    for outcome, count in sorted(seen.items()):
        print(f"{count:8d}  {outcome}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

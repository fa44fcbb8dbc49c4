"""The numbers to reach, and what was reached: one row per (group, peer)."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from edgeweave.bench.models import MODELS, TEN_MODELS
from edgeweave.bench.records import CaseResult


@dataclass(frozen=True)
class Target:
    """A speed-up to reach against one peer.

    Attributes:
        peer: Name of the peer's side.
        geomean: Least geometric mean over the group's cases.
        worst: Least ratio of every single case, or None.
        tuned_geomean: In place of `geomean` when both sides run with the tuned allocator.
    """

    peer: str
    geomean: float
    worst: float | None = None
    tuned_geomean: float | None = None


@dataclass(frozen=True)
class GroupSummary:
    """What a group reached against one peer.

    Attributes:
        group: The group.
        peer: The peer.
        cases: Number of timed cases.
        geomean: Geometric mean of the speed-ups.
        worst: Smallest speed-up.
        worst_case: Its case.
        target_geomean: Least geometric mean, or None where nothing was promised.
        target_worst: Least single speed-up, or None.
        verdict: `"pass"`, `"miss"` or `"-"`.
    """

    group: str
    peer: str
    cases: int
    geomean: float
    worst: float
    worst_case: str
    target_geomean: float | None
    target_worst: float | None
    verdict: str


GROUP_TITLES = {
    "mm-forward": "sparse.mm, forward",
    "mm-forward-backward": "sparse.mm, forward + backward",
    "mm-mkl": "sparse.mm sum, forward, against matrix libraries",
    "mm-weighted": "sparse.mm weighted sum, forward",
    "scatter-cached": "scatter_reduce, plan cached",
    "scatter-uncached": "scatter_reduce, plan built in the call",
    "narrow": "scatter_reduce, F = 1..8 and dim = 1",
    "gather": "gather, expanded index, forward + backward, plan cached",
    "softmax": "softmax over incoming edges, forward, plan cached",
    "softmax-forward-backward": "softmax over incoming edges, forward + backward, plan cached",
    "segment": "segment_reduce, plan cached",
    "multi-reduce": "sum, mean, amax and amin of the same edges, forward + backward",
    "segment-matmul": "segment_matmul, forward + backward",
    "propagate-forward": "gather + reduce fused, forward, plan cached",
    "propagate-uncached": "gather + reduce fused, forward, plan built in the call",
    "propagate-forward-backward": "gather + reduce fused, forward + backward, plan cached",
    "bf16": "sparse.mm in bf16, forward",
    "plan": "building the plan",
    "train-gnn": "training epoch: GCN, GraphSAGE, GIN",
    "train-gcn-cached": "training epoch: GCN with cached=True on both sides",
    "train-attention": "training epoch: GAT, GATv2, TransformerConv",
    "train-relational": "training epoch: PNA, RGCN",
    "train-edge": "training epoch: EdgeCNN",
    "train-graphconv": "training epoch: GraphConv",
    "train-ten": "training epoch: all ten models",
    "train-sampled": "training step on sampled neighbourhoods",
    "train-molecules": "training step on molecule batches",
    "train-compiled": "training epoch under optimize: GCN to EdgeCNN",
    "infer-gnn": "full-batch inference: all ten models",
    "inference-conv": "inference: convolutional models",
    "inference-transformer": "inference: transformers",
    "inference-mlp": "inference: MLPs",
}

TARGETS: dict[str, tuple[Target, ...]] = {
    "mm-forward": (Target("torch.sparse.mm", 3.0, worst=2.0),),
    "mm-forward-backward": (Target("torch.sparse.mm", 7.0),),
    "mm-mkl": (Target("MKL (A @ x)", 2.0),),
    "scatter-cached": (Target("PyG scatter", 3.0),),
    "scatter-uncached": (Target("PyG scatter", 2.0),),
    "narrow": (Target("PyG scatter", 3.0),),
    "gather": (Target("torch.gather", 2.0), Target("index_select", 2.0)),
    "propagate-forward": (Target("PyG eager", 15.0),),
    "propagate-forward-backward": (Target("PyG eager", 15.0),),
    "softmax": (Target("PyG softmax", 5.0),),
    "softmax-forward-backward": (Target("PyG softmax", 5.0),),
    "bf16": (Target("edgeweave fp32", 1.4),),
    # Each model has to reach its number, not only their mean.
    "train-gnn": (
        Target("stock PyG", 6.0, worst=6.0, tuned_geomean=3.5),
        Target("PyG + SparseTensor", 2.0, worst=2.0),
    ),
    "train-attention": (Target("stock PyG", 5.0, worst=5.0),),
    "train-relational": (Target("stock PyG", 2.5, worst=2.5),),
    "train-edge": (Target("stock PyG", 2.0),),
    "train-ten": (Target("stock PyG", 5.0),),
    "train-sampled": (Target("stock PyG", 1.5, worst=1.5),),
    "train-molecules": (Target("stock PyG", 1.5, worst=1.5),),
    "train-compiled": (
        Target("edgeweave.accelerate", 1.15),
        Target("torch.compile", 5.0),
    ),
    "infer-gnn": (Target("stock PyG", 5.0),),
    "inference-conv": (Target("eager", 1.2),),
}

# On a GPU: how we run it, kind of layer, graph, dtype. The small graph of --quick has no numbers.
for _way in ("optimize", "accelerate"):
    for _graph, _dtype, _least in (
        ("arxiv", "fp32", 1.5),
        ("arxiv", "bf16", 1.2),
        ("23M", "fp32", 2.0),
        ("23M", "bf16", 8.0),
    ):
        for _kind, _layers, _number in (
            ("sum", "GCN, GraphSAGE, GIN", _least),
            ("attention", "GAT, GATv2, TransformerConv", 2.0),
        ):
            _group = f"{_way}-{_kind}-{_graph}-{_dtype}"
            GROUP_TITLES[_group] = f"{_way} on CUDA, {_graph} {_dtype}: {_layers}"
            TARGETS[_group] = (Target("torch.compile", _number),)

# Cases of several groups that also have a row together, if all of them were timed.
TOGETHER: dict[str, frozenset[str]] = {
    "train-ten": frozenset(f"{MODELS[name].group}/half-arxiv/{name}" for name in TEN_MODELS),
}


def find_target(group: str, peer: str, tuned: bool) -> Target | None:
    """Looks up the target of a group against a peer.

    Args:
        group: The group.
        peer: The peer.
        tuned: Whether both sides ran with the tuned allocator.

    Returns:
        The target, with the tuned numbers in place if there are any; None if nothing is promised.

    Example:
        >>> from edgeweave.bench.targets import find_target
        >>> find_target("train-gnn", "stock PyG", tuned=True).geomean
        3.5
    """
    for target in TARGETS.get(group, ()):
        if target.peer == peer:
            if tuned and target.tuned_geomean is not None:
                worst = target.tuned_geomean if target.worst is not None else None
                return Target(peer, target.tuned_geomean, worst)
            return target
    return None


def summarise_groups(results: Iterable[CaseResult], tuned: bool = False) -> list[GroupSummary]:
    """Condenses the timed cases to one row per (group, peer).

    Args:
        results: All results; only those with status `"ok"` count.
        tuned: Whether both sides ran with the tuned allocator.

    Returns:
        Rows in order of first appearance; after them those of `TOGETHER`.
    """
    ratios: dict[tuple[str, str], list[tuple[float, str]]] = {}
    for result in results:
        for speedup in result.speedups:
            key = (result.group, speedup.peer)
            ratios.setdefault(key, []).append((speedup.ratio, result.case_id))
    for together, case_ids in TOGETHER.items():
        for peer in dict.fromkeys(peer for _, peer in ratios):
            found = [
                pair
                for (_, against), pairs in ratios.items()
                if against == peer
                for pair in pairs
                if pair[1] in case_ids
            ]
            # A mean over some of them only would be another number under the same name.
            if len(found) == len(case_ids):
                ratios[together, peer] = found
    rows = []
    for (group, peer), found in ratios.items():
        geomean = statistics.geometric_mean([ratio for ratio, _ in found])
        worst, worst_case = min(found)
        target = find_target(group, peer, tuned)
        verdict = "-"
        if target is not None:
            reached = geomean >= target.geomean and worst >= (target.worst or 0.0)
            verdict = "pass" if reached else "miss"
        rows.append(
            GroupSummary(
                group,
                peer,
                len(found),
                geomean,
                worst,
                worst_case,
                target.geomean if target else None,
                target.worst if target else None,
                verdict,
            )
        )
    return rows

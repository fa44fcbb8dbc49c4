"""A captured model with its weights, its partitions, and a plan for each set of sizes."""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._fx import Captured, Meta, evaluate_size, refs_of
from .._fx._patterns import (
    fuse_embeddings,
    fuse_gelu,
    fuse_interactions,
    pick_elements,
    unflatten_products,
)
from .._fx._permutes import sink_permutes
from .._fx._simplify import (
    Derived,
    drop_open_masks,
    drop_unused,
    fold_batch_norm,
    fold_padding,
    lift_constants,
    number_padding,
    remove_identities,
    share_equal,
)
from . import _rules_spatial as _rules_spatial  # registers its rules
from ._lowering import Lowered, lower
from ._packed import PackedCall, PackedWeights, find_packed, packed_name, with_packed
from ._partition import Cut, torn_apart
from ._plan import Plan, bind_nodes, make_cut
from ._rules import RULES
from ._segment import CompileError
from ._tile_ops import OWN
from ._tiles import converted, find_attention, find_norms, find_tiled

__all__ = ["Engine", "Weights"]

MOST_PLANS = 16


class Weights:
    """The constants of a graph: the model's own, and those computed from them."""

    def __init__(self, captured: Captured, derived: Mapping[str, Derived], used: set[str]) -> None:
        needed = set(used)
        for name in reversed(list(derived)):
            if name in needed:
                needed.update(derived[name].inputs)
        self._captured, self._used = captured, used
        self._derived = {name: d for name, d in derived.items() if name in needed}
        self._own = [name for name in captured.constants if name in needed]
        self.tensors: dict[str, Tensor] = {}
        self.load()

    def changed(self) -> bool:
        """Whether torch can see that a weight was edited or exchanged."""
        # At each call, for some hundred weights: nothing is called here that need not be.
        for holder, attribute, tensor, address, version in self._watched:
            if holder is not None and holder.get(attribute) is not tensor:
                return True
            if tensor.data_ptr() != address:
                return True
            if version is not None and tensor._version != version:
                return True
        return False

    def load(self) -> None:
        """Take the model's weights as they are now, and compute what depends on them."""
        captured = self._captured
        tensors: dict[str, Tensor] = {}
        self._watched: list[tuple[dict[str, Any] | None, str, Tensor, int, int | None]] = []
        for name in self._own:
            holder, tensor = captured.sources[name].find(captured.constants[name])
            # Inference tensors have no version.
            version = None if tensor.is_inference() else tensor._version
            attribute = captured.sources[name].attribute
            self._watched.append((holder, attribute, tensor, tensor.data_ptr(), version))
            tensors[name] = tensor.detach()
        with torch.no_grad():
            for name, derived in self._derived.items():
                tensors[name] = derived.compute(*(tensors[n] for n in derived.inputs))
        own = {_address(tensors[name]) for name in self._own}
        made = {_address(tensors[n]) for n in self._derived if isinstance(tensors[n], Tensor)}
        # What was computed here; a view of a weight is one in eager, too.
        self.lifted = frozenset(made - own - {None, 0})
        # Steps on the way to what a plan reads are computed again if need be.
        self.tensors = {n: t for n, t in tensors.items() if n in self._used or n in self._own}


def _address(tensor: Tensor) -> int | None:
    """Where the memory begins that a tensor lies in."""
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else None


@dataclass(frozen=True)
class Decided:
    """What an engine runs where, and what it has made for that."""

    forced: dict[str, str]
    packed: dict[str, str]
    refused: dict[str, str]
    cut: Cut | None
    cut_ops: list[Any]
    plans: OrderedDict[tuple[Any, ...], Plan]


class Engine:
    """Runs one captured graph.

    Attributes:
        captured: The graph.
        nodes: Its calls after simplification.
        weights: Its constants.
        packed: Products that run outside of partitions.
        refused: Reason for each node that runs in ATen.
        compile_s: Seconds spent on partitions.
        may_be_empty: Whether an input that fits may have no elements.
    """

    def __init__(
        self,
        captured: Captured,
        *,
        fpmath: str = "strict",
        policy: str = "fusion",
        guard: bool = True,
    ) -> None:
        self.captured = captured
        self._fpmath, self._policy, self.guard = fpmath, policy, guard
        self._prepare()
        self.forced: dict[str, str] = {}  # nodes that measurement left to ATen
        # Products that measurement took out of partitions, and how each runs (`PackedCall`).
        self.packed: dict[str, str] = {}
        self._packed_weights = PackedWeights()
        self.fused = True
        self.refused: dict[str, str] = {}
        self.compile_s = 0.0
        self.may_be_empty = any(
            isinstance(size, str) or size == 0
            for meta in captured.input_metas
            if meta is not None
            for size in meta.shape
        )
        self._cut: Cut | None = None
        self._cut_ops: list[Any] = []
        self._plans: OrderedDict[tuple[Any, ...], Plan] = OrderedDict()
        self._latest: tuple[tuple[Any, ...], Plan] | None = None  # of them, found without a lock
        self._bound_cache: dict[str, float] = {}
        self._lock = threading.RLock()

    def _prepare(self) -> None:
        captured = self.captured
        metas = captured.metas()
        nodes = drop_unused(captured.nodes, captured.outputs)
        nodes = remove_identities(nodes, captured.outputs, metas)
        nodes = share_equal(number_padding(nodes, metas), captured.outputs)
        known = set(captured.constants)
        nodes, lifted = lift_constants(nodes, captured.outputs, known, metas)
        nodes = drop_open_masks(nodes, lifted)
        nodes, folded = fold_batch_norm(nodes, captured.outputs, known | set(lifted))
        nodes = fold_padding(nodes, captured.outputs)
        nodes, turned = unflatten_products(nodes, captured.outputs, metas, known | set(lifted))
        nodes = fuse_gelu(nodes, captured.outputs, metas)
        nodes = sink_permutes(nodes, captured.outputs, metas)
        nodes = fuse_embeddings(nodes, captured.outputs, metas, known)
        nodes, crossed = fuse_interactions(nodes, captured.outputs, metas, known | set(lifted))
        nodes, picks = pick_elements(nodes, metas, known | set(lifted))
        self.nodes = drop_unused(nodes, captured.outputs)
        derived = {**lifted, **folded, **turned, **crossed, **picks}
        used = {name for node in self.nodes for name in refs_of(node)}
        used |= set(refs_of(captured.outputs))
        self.weights = Weights(captured, derived, used & (known | set(derived)))
        kept = {node.name for node in self.nodes} | {n for n in captured.inputs if n}
        self.metas = {name: meta for name, meta in metas.items() if name in kept}
        self._open_dims = {
            name: tuple(isinstance(size, str) for size in meta.shape)
            for name, meta in self.metas.items()
            if not meta.static
        }
        for name, tensor in self.weights.tensors.items():
            if isinstance(tensor, Tensor):
                self.metas[name] = Meta(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)

    def symbols_of(self, leaves: Sequence[Any]) -> dict[str, int] | str:
        """Values of the symbols for these inputs, or why they do not fit the graph."""
        captured = self.captured
        symbols: dict[str, int] = {}
        for name, symbol in captured.symbols.items():
            leaf = leaves[symbol.position]
            if not isinstance(leaf, Tensor) or leaf.dim() <= symbol.dim:
                return f"input {symbol.position} must have more than {symbol.dim} dimensions"
            size = leaf.shape[symbol.dim]
            if size < symbol.least or (symbol.most is not None and size > symbol.most):
                most = "any" if symbol.most is None else symbol.most
                return (
                    f"dimension {symbol.dim} of input {symbol.position} must be in "
                    f"[{symbol.least}, {most}], got {size}"
                )
            symbols[name] = size
        for position, (leaf, meta) in enumerate(zip(leaves, captured.input_metas, strict=True)):
            if meta is None:
                if isinstance(leaf, Tensor) or leaf != captured.literals.get(position):
                    expected = captured.literals.get(position)
                    return f"input {position} must be {expected!r} as in the example, got {leaf!r}"
                continue
            if not isinstance(leaf, Tensor):
                return f"input {position} must be a tensor, got {leaf!r}"
            if leaf.dtype != meta.dtype:
                return f"input {position} must be {meta.dtype}, got {leaf.dtype}"
            if leaf.shape == meta.shape:
                continue
            expected = [evaluate_size(size, symbols) for size in meta.shape]
            if list(leaf.shape) != expected:
                return f"input {position} must have shape {expected}, got {list(leaf.shape)}"
        return symbols

    def lowered(
        self, symbols: Mapping[str, int], refused: Mapping[str, str]
    ) -> tuple[list[Any], Lowered]:
        """Nodes and operations for these sizes."""
        nodes = bind_nodes(self.nodes, symbols)
        metas = {name: meta.bind(symbols) for name, meta in self.metas.items()}
        metas.update({node.name: node.meta for node in nodes if node.meta is not None})
        tensors = self.weights.tensors
        outputs = self.captured.outputs
        made = lower(nodes, metas, tensors, outputs, RULES, refused, self._open_dims)
        return nodes, made

    def plan(self, symbols: Mapping[str, int]) -> Plan:
        """The plan for these sizes, made at first use; the least recently used goes first."""
        key = (*symbols.values(), torch.get_num_threads())
        latest = self._latest
        if latest is not None and latest[0] == key:
            return latest[1]
        with self._lock:
            if key not in self._plans:
                start = time.perf_counter()
                self._plans[key] = self._make_plan(symbols)
                self.compile_s += time.perf_counter() - start
            self._plans.move_to_end(key)
            while len(self._plans) > MOST_PLANS:
                self._plans.popitem(last=False)
            self._latest = (key, self._plans[key])
            return self._plans[key]

    def _make_plan(self, symbols: Mapping[str, int]) -> Plan:
        if not self.fused:
            return self.eager_plan(symbols)
        refused = {**self._converted(symbols), **self.forced}
        while True:
            cut = self._cut_for(symbols, refused)
            self.refused = {**cut.lowered.refused, **refused}
            nodes, lowered = self.lowered(symbols, refused)
            constants = {**self.weights.tensors, **lowered.literals}
            calls: dict[PackedCall, str] = {}
            if self.packed:
                inside = {name for part in cut.partitions for name in part.nodes}
                calls = self._chosen_calls(symbols, inside)
                nodes = with_packed(nodes, calls)
                nodes = drop_unused(nodes, self.captured.outputs)
                constants.update(
                    (packed_name(call, how), self.packed_weight(call, how))
                    for call, how in calls.items()
                    if call.weight
                )
                torn = torn_apart(nodes, cut)
                if torn:
                    refused.update(dict.fromkeys(torn, "what it reads is read outside as well"))
                    self._cut = None
                    continue
            try:
                return Plan(
                    nodes,
                    lowered,
                    constants,
                    self.input_names(),
                    self.captured.outputs,
                    cut,
                    self._bound_cache if self.guard else None,
                    tuple(calls),
                )
            except OverflowError as error:
                for op in lowered.ops:
                    if op.node:
                        refused.setdefault(op.node, str(error))

    def _cut_for(self, symbols: Mapping[str, int], refused: dict[str, str]) -> Cut:
        """The partitions; those of other sizes serve if the operations are the same."""
        _, lowered = self.lowered(symbols, refused)
        if self._cut is not None and lowered.ops == self._cut_ops:
            return self._cut
        cut = make_cut(
            lambda more: self.lowered(symbols, more)[1], refused, self._fpmath, self._policy
        )
        if self._cut is None:
            self._cut, self._cut_ops = cut, cut.lowered.ops
        return cut

    def packed_calls(
        self, symbols: Mapping[str, int], apart: Collection[str] = (), *, tiles: bool = False
    ) -> dict[str, PackedCall]:
        """Products that could run outside of partitions, with these sizes.

        Args:
            symbols: Values of the symbols.
            apart: Nodes that something else covers.
            tiles: Whether in edgeweave's kernels, rather than in the libraries that torch brings.
        """
        metas = {name: meta.bind(symbols) for name, meta in self.metas.items()}
        nodes = bind_nodes(self.nodes, symbols)
        outputs, tensors = self.captured.outputs, self.weights.tensors
        if tiles:
            math = self._fpmath == "bf16"
            found = find_tiled(nodes, metas, outputs, tensors, math=math, apart=apart)
            others = {**find_attention(nodes, metas), **find_norms(nodes, metas, tensors)}
            return {**found, **{n: c for n, c in others.items() if n not in apart}}
        return find_packed(nodes, metas, outputs, tensors, not self.guard, apart)

    def _chosen_calls(
        self, symbols: Mapping[str, int], apart: Collection[str] = ()
    ) -> dict[PackedCall, str]:
        """The products that were chosen to run outside of partitions, and how."""
        calls: dict[PackedCall, str] = {}
        covered = set(apart)
        # What was chosen to run here runs in torch's oneDNN where a saved model finds no tiles.
        for tiles in (True, False):
            done = {call.product for call in calls}
            names = [n for n, how in self.packed.items() if n not in done]
            names = [n for n in names if self.packed[n] in OWN] if tiles else names
            if not names:
                continue
            found = self.packed_calls(symbols, covered, tiles=tiles)
            for name in names:
                if name in found:
                    calls[found[name]] = found[name].resolve(self.packed[name])
            covered.update(node for call in calls for node in call.nodes)
        return calls

    def _converted(self, symbols: Mapping[str, int]) -> dict[str, str]:
        """Nodes that the chosen calls make needless, with the reason."""
        if not any(how in OWN for how in self.packed.values()):
            return {}
        return converted(bind_nodes(self.nodes, symbols), self._chosen_calls(symbols))

    def packed_weight(self, call: PackedCall, how: str) -> Any:
        """The weight of such a product in one of its variants."""
        assert call.node.meta is not None
        rows = math.prod(call.node.meta.sizes[:-1])
        return self._packed_weights.get(call, how, self.weights.tensors, rows)

    def forget_packed(self) -> None:
        """Free the packed weights that no plan holds."""
        self._packed_weights.clear()

    def eager_plan(self, symbols: Mapping[str, int]) -> Plan:
        """The same graph in ATen alone."""
        with self._lock:
            nodes, lowered = self.lowered(symbols, {node.name: "eager" for node in self.nodes})
            constants = self.weights.tensors
        outputs = self.captured.outputs
        return Plan(nodes, lowered, constants, self.input_names(), outputs, None, None)

    def input_names(self) -> list[str]:
        """Of the inputs that are tensors."""
        return [name for name in self.captured.inputs if name is not None]

    def drop_plans(self) -> None:
        """Forget partitions and plans, as after a change of weights or of what is fused."""
        with self._lock:
            self._plans.clear()
            self._latest = None
            self._cut = None
            self._bound_cache.clear()
            self._packed_weights.clear()

    def decided(self) -> Decided:
        """What runs where, with the plans that were made for it."""
        with self._lock:
            return Decided(
                dict(self.forced),
                dict(self.packed),
                dict(self.refused),
                self._cut,
                self._cut_ops,
                self._plans.copy(),
            )

    def restore(self, decided: Decided) -> None:
        """Run everything where it ran, with those plans."""
        with self._lock:
            self.drop_plans()
            self.forced, self.packed = dict(decided.forced), dict(decided.packed)
            self.refused = dict(decided.refused)
            self._cut, self._cut_ops = decided.cut, decided.cut_ops
            self._plans.update(decided.plans)

    def refresh(self) -> None:
        """Read the weights again and pack them anew."""
        with self._lock:
            # Plans first: who sees the new weights must wait here for a plan of theirs.
            self.drop_plans()
            self.weights.load()

    def run(self, leaves: Sequence[Any], symbols: Mapping[str, int]) -> list[Any]:
        """Outputs for flat inputs that fit."""
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        while True:
            try:
                return self._run_plan(self.plan(symbols), tensors)
            except CompileError as error:
                with self._lock:
                    if self.forced.keys() >= set(error.nodes):
                        raise  # leaving them to ATen has not helped
                    self.forced.update(dict.fromkeys(error.nodes, str(error)))
                    self.drop_plans()

    def eager_call(
        self, leaves: Sequence[Any], symbols: Mapping[str, int]
    ) -> Callable[[], list[Any]]:
        """What runs the same in ATen alone, again and again."""
        plan = self.eager_plan(symbols)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        return lambda: self._run_plan(plan, tensors)

    def run_eager(self, leaves: Sequence[Any], symbols: Mapping[str, int]) -> list[Any]:
        """The same in ATen alone."""
        return self.eager_call(leaves, symbols)()

    def _run_plan(self, plan: Plan, tensors: Sequence[Tensor]) -> list[Any]:
        results = list(plan.run(*tensors))
        # What a caller may write to is no memory of the weights'. Operators that torch composes of
        # others do not say that they return views; which do is the same in each call.
        if plan.views is None:
            lifted = self.weights.lifted
            plan.views = tuple(
                index
                for index, result in enumerate(results)
                if isinstance(result, Tensor) and _address(result) in lifted
            )
        for index in plan.views:
            results[index] = results[index].clone()
        return results

    def arena_bytes(self) -> int:
        """Bytes kept for intermediates, all plans together."""
        with self._lock:
            return sum(plan.arena_bytes() for plan in self._plans.values())

"""Partitions without Python between them, as a native program for each layout of inputs."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .._fx import Meta, Node, row_strides
from .._native import ops, release
from ._bounds import LIMIT, ceiling, output_bound
from ._code import ValueKind, counted, dtype_number, real
from ._lowering import Lowered
from ._partition import Cut, Unit

__all__ = ["VIEWS", "Segment"]

# Calls that only give another shape to the same memory, from its first element on.
VIEWS = frozenset(
    f"aten.{name}"
    for name in (
        *("view.default", "_unsafe_view.default", "unsqueeze.default", "squeeze.dim"),
        *("squeeze.dims", "transpose.int", "permute.default", "t.default", "flatten.using_ints"),
    )
)
# What may write its result in any order of dimensions. Not a matrix product, which writes rows; and
# not a layer norm, which oneDNN 3.2 gets wrong without an error when its result is permuted.
_ANY_ORDER = frozenset(
    (
        *("convolution", "conv_transpose", "max_pool", "avg_pool", "add", "subtract", "multiply"),
        *("divide", "relu", "clamp", "gelu", "sigmoid", "tanh", "hard_swish", "hard_sigmoid"),
        *("elu", "leaky_relu", "mish", "abs"),
    )
)
_MOST_LAYOUTS = 4
_RUN = ops.onednn_run.default  # no overload is looked for at each call


@dataclass
class _Program:
    handle: int
    dense: tuple[bool, ...]  # inputs that can be read as they are

    def __post_init__(self) -> None:
        weakref.finalize(self, release, ops.onednn_program_release, self.handle)


class CompileError(Exception):
    """oneDNN took a partition into a graph but cannot compile it for these sizes.

    Attributes:
        nodes: The captured nodes of the partitions at fault.
    """

    def __init__(self, nodes: tuple[str, ...], reason: str) -> None:
        super().__init__(reason)
        self.nodes = nodes


class GuardTripped(Exception):
    """A value is NaN, infinite, or so large that a partition might overflow."""


class Segment:
    """Consecutive partitions and views.

    Attributes:
        reads: Values it takes, in order.
        writes: Values it returns, in order.
        units: What it runs.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        cut: Cut,
        lowered: Lowered,
        constants: Mapping[str, Tensor],
        needed: set[str],
    ) -> None:
        self.units = list(units)
        self._cut, self._lowered, self._constants = cut, lowered, constants
        self._metas = lowered.metas
        written = {name for unit in units for name in unit.writes}
        read = [name for unit in units for name in unit.reads if name not in written]
        self.reads = tuple(dict.fromkeys(read))
        self.writes = tuple(
            n for unit in units if unit.partition is not None for n in unit.writes if n in needed
        )
        self._viewed = {unit.reads[0] for unit in units if unit.node is not None}
        self._layouts = self._choose_layouts()
        # oneDNN 3.2 reads a layer norm's input as rows, whatever strides it is given.
        self._as_rows = {
            name
            for unit in units
            if unit.partition is not None
            and any(lowered.ops[op].kind == "layer_norm" for op in unit.partition.ops)
            for name in unit.partition.inputs
        }
        # Written and read in here alone, under one shape: their layout is nobody else's business.
        self._own = written - set(self.writes) - self._viewed
        self._own -= {unit.writes[0] for unit in units if unit.node is not None}
        self.guards: list[list[tuple[str, float]]] = [[] for _ in units]
        self._programs: OrderedDict[tuple[tuple[int, ...], ...], _Program] = OrderedDict()
        self._lock = threading.Lock()

    def _choose_layouts(self) -> dict[str, tuple[int, ...]]:
        """Strides for values that are only read permuted: those that make the permuted one dense.

        A convolution writes channels last as gladly as it writes channels first; the layer norm
        or matrix product that reads it through the view is many times slower on the latter.
        """
        views: dict[str, list[Unit]] = {}
        for unit in self.units:
            if unit.node is not None:
                views.setdefault(unit.reads[0], []).append(unit)
        written = {
            name
            for unit in self.units
            if unit.partition is not None
            and all(self._lowered.ops[op].kind in _ANY_ORDER for op in unit.partition.ops)
            for name in unit.writes
        }
        chosen: dict[str, tuple[int, ...]] = {}
        for name, units in views.items():
            orders = {_permutation(unit.node) for unit in units}
            order = orders.pop() if len(orders) == 1 else None
            plain = name in written and name not in self.writes
            if order is None or not plain or any(u.writes[0] in self._viewed for u in units):
                continue
            sizes = self._metas[name].sizes
            dense: dict[int, int] = {}
            step = 1
            for dim in reversed(order):
                dense[dim] = step
                step *= sizes[dim]
            chosen[name] = tuple(dense[dim] for dim in range(len(sizes)))
            for unit in units:
                chosen[unit.writes[0]] = tuple(dense[dim] for dim in order)
        return chosen

    def place_guards(self, bounds: dict[str, float], cache: dict[str, float]) -> None:
        """Bound every value, looking at as few as possible while the program runs."""
        for index, unit in enumerate(self.units):
            if unit.partition is None:
                base = unit.reads[0]
                if base in bounds:
                    bounds[unit.writes[0]] = bounds[base]
                continue
            guarded = False
            for name in unit.reads:
                if name not in bounds:
                    self.guards[index].append((name, LIMIT))
                    bounds[name] = LIMIT
                    guarded = True
            if self._fits(unit, bounds, cache):
                continue
            for name in unit.reads:
                if bounds[name] > LIMIT and not (guarded and bounds[name] == LIMIT):
                    self.guards[index].append((name, LIMIT))
                    bounds[name] = LIMIT
            if not self._fits(unit, bounds, cache):
                raise OverflowError(
                    "weights so large, or so far from finite, that float32 might overflow"
                )

    def _fits(self, unit: Unit, bounds: dict[str, float], cache: dict[str, float]) -> bool:
        assert unit.partition is not None
        inner = {name: bounds[name] for name in unit.reads}
        lowered = self._lowered
        for index in unit.partition.ops:
            op = lowered.ops[index]
            bound = output_bound(op, inner, self._constants, lowered.tensors, cache)
            if not bound <= ceiling:
                return False
            inner[op.outputs[0]] = bound
        for name in unit.writes:
            bounds[name] = inner[name]
        return True

    def _code(self, inputs: Sequence[Tensor]) -> tuple[list[int], list[Tensor]]:
        values: list[list[int]] = []
        number: dict[str, int] = {}
        constants: list[Tensor] = []

        def add(name: str, kind: ValueKind, index: int, meta: Meta, strides: Sequence[int]) -> None:
            number[name] = len(values)
            shape = meta.sizes
            values.append(
                [int(kind), index, 0, dtype_number(meta.dtype), *counted(shape), *strides]
            )

        for position, (name, tensor) in enumerate(zip(self.reads, inputs, strict=True)):
            add(name, ValueKind.INPUT, position, self._metas[name], tensor.stride())
        steps: list[list[int]] = []
        outputs = {name: position for position, name in enumerate(self.writes)}
        for guards, unit in zip(self.guards, self.units, strict=True):
            if unit.partition is None:
                base, name = unit.reads[0], unit.writes[0]
                add(name, ValueKind.VIEW, number[base], self._metas[name], self._strides(name))
                continue
            for name in unit.partition.inputs:
                if name in self._constants and name not in number:
                    tensor = self._constants[name]
                    if name in self._as_rows:
                        tensor = tensor.contiguous()
                    meta = Meta(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)
                    add(name, ValueKind.CONSTANT, len(constants), meta, tensor.stride())
                    constants.append(tensor)
            for name in unit.writes:
                strided = name in self._viewed or name in self._as_rows
                kind = ValueKind.STRIDED if strided else ValueKind.BLOCKED
                if name in outputs:
                    kind = ValueKind.OUTPUT
                meta = self._metas[name]
                add(name, kind, outputs.get(name, 0), meta, self._strides(name))
            for name, bound in guards:
                steps.append([1, real(bound), 1, number[name]])
            partition = unit.partition
            for name in partition.inputs:
                if name not in self._as_rows or name in self.reads or name in self._constants:
                    continue
                if not replace(self._metas[name], stride=self._strides(name)).in_rows:
                    reason = "oneDNN gets layer norms wrong unless values lie row by row"
                    raise CompileError(partition.nodes, reason)
            steps.append(
                [
                    *(0, self._cut.handle, partition.index),
                    *counted(number[name] for name in partition.inputs),
                    *counted(number[name] for name in partition.outputs),
                ]
            )
        code = [len(values), *(word for value in values for word in value)]
        return [*code, len(steps), *(word for step in steps for word in step)], constants

    def _strides(self, name: str) -> tuple[int, ...]:
        if name in self._as_rows and name in self._own:
            return row_strides(self._metas[name].sizes)
        return self._layouts.get(name) or self._metas[name].strides

    def _program(self, inputs: Sequence[Tensor]) -> _Program:
        key = tuple([tensor.stride() for tensor in inputs])
        # Without the lock: a program that is found moves nothing, and is right for ever.
        found = self._programs.get(key)
        if found is not None:
            return found
        dense = tuple(
            tensor.is_contiguous()
            if name in self._as_rows
            else torch.ops.aten.is_non_overlapping_and_dense(tensor)
            for name, tensor in zip(self.reads, inputs, strict=True)
        )
        usable = [t if ok else t.contiguous() for t, ok in zip(inputs, dense, strict=True)]
        try:
            made = _Program(ops.onednn_program_create(*self._code(usable)), dense)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise CompileError(self._at_fault(), reason) from error
        with self._lock:
            self._programs[key] = made
            while len(self._programs) > _MOST_LAYOUTS:
                self._programs.popitem(last=False)
        return made

    def _at_fault(self) -> tuple[str, ...]:
        """Nodes of the partitions that do not compile alone; of all if each of them does."""
        partitions = [unit for unit in self.units if unit.partition is not None]
        found: list[str] = []
        for unit in partitions if len(partitions) > 1 else ():
            assert unit.partition is not None
            alone = Segment([unit], self._cut, self._lowered, self._constants, set(unit.writes))
            metas = [self._metas[name] for name in alone.reads]
            inputs = [torch.empty_strided(m.sizes, m.strides, dtype=m.dtype) for m in metas]
            try:
                alone._program(inputs)
            except CompileError as error:
                found += error.nodes
        every = [n for unit in partitions if unit.partition for n in unit.partition.nodes]
        return tuple(found or every)

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Execute.

        Raises:
            GuardTripped: If NaN might be lost; nothing has been returned then.
        """
        program = self._program(inputs)
        if not all(program.dense):
            inputs = [
                t if ok else t.contiguous() for t, ok in zip(inputs, program.dense, strict=True)
            ]
        outputs: list[Tensor] = _RUN(program.handle, list(inputs))
        if not outputs:
            raise GuardTripped
        return outputs

    def profile(self, inputs: Sequence[Tensor]) -> list[tuple[Unit, int]]:
        """Nanoseconds of each partition in one execution, with the guards before it."""
        program = self._program(inputs)
        usable = [t if ok else t.contiguous() for t, ok in zip(inputs, program.dense, strict=True)]
        times = iter(ops.onednn_profile(program.handle, usable).tolist())
        found = []
        for guards, unit in zip(self.guards, self.units, strict=True):
            if unit.partition is not None:
                guarded = sum(next(times) for _ in guards)
                found.append((unit, guarded + next(times)))
        return found

    def arena_bytes(self) -> int:
        """Bytes that its programs keep for what they write."""
        with self._lock:
            programs = list(self._programs.values())
        return sum(int(ops.onednn_program_info(p.handle)[0]) for p in programs)


def fold_views(groups: list[list[Unit]], outputs: set[str]) -> list[list[Unit]]:
    """Put views between two partitions into the program that runs both.

    A view joins the native group before it if it reads what that group writes; native groups with
    nothing else between them become one. A view that ATen reads as well is made twice.
    """
    merged: list[list[Unit]] = []
    for group in groups:
        before = merged[-1] if merged and merged[-1][0].partition is not None else None
        if before is None:
            merged.append(list(group))
        elif group[0].partition is not None:
            before.extend(group)
        else:
            written = {name for unit in before for name in unit.writes}
            rest = []
            for unit in group:
                if _is_view(unit.node) and unit.reads and unit.reads[0] in written:
                    before.append(unit)
                    written.add(unit.writes[0])
                else:
                    rest.append(unit)
            if rest:
                merged.append(rest)
    return _settle_views(merged, outputs)


def _settle_views(groups: list[list[Unit]], outputs: set[str]) -> list[list[Unit]]:
    """Drop native views that only others read, and make those that others read in ATen too."""
    readers: dict[str, set[int]] = {}
    for index, group in enumerate(groups):
        for unit in group:
            for name in unit.reads:
                readers.setdefault(name, set()).add(index)
    settled: list[list[Unit]] = []
    for index, group in enumerate(groups):
        if group[0].partition is None:
            settled.append(group)
            continue
        inside: set[str] = set()
        kept: list[Unit] = []
        made: list[Unit] = []
        outside: set[str] = set(outputs)
        for unit in reversed(group):
            name = unit.writes[0]
            if unit.partition is None:
                if name in outside or readers.get(name, set()) - {index}:
                    made.append(unit)
                    outside.add(unit.reads[0])
                if name not in inside:
                    continue
            inside.update(unit.reads)
            kept.append(unit)
        settled.append(kept[::-1])
        if made:
            settled.append(made[::-1])
    return settled


def _permutation(node: Node | None) -> tuple[int, ...] | None:
    """Which dimension comes where in a view that permutes them; None for any other view."""
    if node is None or node.meta is None:
        return None
    rank = len(node.meta.shape)
    if node.target == "aten.permute.default":
        return tuple(int(dim) % rank for dim in node.args[1])
    if node.target == "aten.transpose.int":
        order = list(range(rank))
        first, second = (int(dim) % rank for dim in node.args[1:3])
        order[first], order[second] = order[second], order[first]
        return tuple(order)
    return None


def _is_view(node: Node | None) -> bool:
    return node is not None and node.target in VIEWS and node.meta is not None

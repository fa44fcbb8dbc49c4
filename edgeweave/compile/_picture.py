"""What `Report.draw` shows: each graph before and after, folded to what can be read.

A graph of a few calls is shown call by call. A larger one is folded: consecutive calls of one
module, with one fate, become one box, at the depth of modules that leaves few enough boxes. Boxes
are intervals of an order in which every call comes after what it reads, so they have no cycles.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..graphfuse._draw import _colour as colour_number
from ._passes import PASSES
from ._record import GraphRecord
from ._snapshots import Call

__all__ = ["MOST_LETTERS", "Box", "Panel", "panels_of"]

MOST_LETTERS = 32
"""Of a line in a box."""
_MOST_BOXES = 48
_MOST_INPUTS = 6
_INPUT, _UNTOUCHED, _ATEN, _INDUCTOR, _PACKED, _REPEATED, _ANY_PARTITION = (
    "#ffffff", "#f1f1f1", "#d9d9d9", "#cfe2f5", "#e9dcc3", "#fff7d6", "#b7e0c0",
)  # fmt: skip
_PASS_COLOURS = {each.name: colour_number(number) for number, each in enumerate(PASSES)}


@dataclass(frozen=True)
class Box:
    """One box: a call, or several that were folded.

    Attributes:
        name: Different for each box of a panel.
        title: First line.
        detail: Second line.
        colour: Of its inside.
        reads: Names of the boxes that it reads.
        is_input: Whether it is what a call is given.
    """

    name: str
    title: str
    detail: str
    colour: str
    reads: tuple[str, ...]
    is_input: bool = False


@dataclass(frozen=True)
class Panel:
    """One graph at one time.

    Attributes:
        title: Above it.
        boxes: In an order in which every box comes after what it reads.
        legend: Colour and meaning.
    """

    title: str
    boxes: tuple[Box, ...]
    legend: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Mark:
    """What became of a call: how it is coloured, and what folds with it."""

    key: str
    colour: str
    meaning: str


def panels_of(number: int, record: GraphRecord) -> tuple[Panel, Panel]:
    """The two panels of one graph.

    Args:
        number: Of the graph, from 1 on.
        record: With its snapshots.

    Returns:
        The graph as captured and as its engine got it; both empty if nothing was kept.
    """
    found = record.snapshots
    before = () if found is None else found.before
    after = () if found is None else found.after
    taken = {} if found is None else found.taken
    made = {} if found is None else found.made
    untouched = _Mark("", _UNTOUCHED, "left as it was")
    dead = _Mark("dead", _UNTOUCHED, "left as it was")
    marks = {name: _of_pass(pass_) if pass_ else dead for name, pass_ in taken.items()}
    left = _panel(
        f"graph {number} as captured: {record.calls_before} calls", before, marks, untouched
    )
    title = f"after the passes: {record.calls_after} calls, {record.engine}"
    nodes = _fused_nodes(record)
    if nodes is not None:
        calls, marks = nodes
        title = f"as {record.engine} runs it: {sum(c.op != 'input' for c in calls)} calls"
        aten = _Mark("aten", _ATEN, "ATen")
        return left, _panel(title, calls, marks, aten)
    rest = _Mark("", _INDUCTOR, "Inductor")
    if record.engine != "inductor":
        rest = _Mark("", _ATEN, "ATen")
    return left, _panel(title, after, {name: _of_pass(p) for name, p in made.items()}, rest)


def _of_pass(name: str) -> _Mark:
    return _Mark(name, _PASS_COLOURS.get(name, _UNTOUCHED), name)


def _fused_nodes(record: GraphRecord) -> tuple[tuple[Call, ...], dict[str, _Mark]] | None:
    """The calls of a graph that oneDNN has cut, each with its partition; None if it has not."""
    from .._fx import refs_of

    fused: Any = getattr(record.compiled, "_fused", None)
    if record.engine != "onednn" or fused is None:
        return None
    report, engine = fused.report(), fused._engines[0]
    if report.mode != "fused":
        return None
    marks: dict[str, _Mark] = {}
    for number, part in enumerate(report.partitions):
        mark = _Mark(f"part{number}", colour_number(number), "oneDNN, a colour for each partition")
        marks.update(dict.fromkeys(part.nodes, mark))
    for number, product in enumerate(report.packed):
        mark = _Mark(f"packed{number}", _PACKED, "product with packed weights")
        marks.update(dict.fromkeys(product.nodes, mark))
    calls = [_input(name, engine.metas.get(name)) for name in engine.input_names()]
    known = {call.name for call in calls}
    for node in engine.nodes:
        reads = tuple(name for name in dict.fromkeys(refs_of(node)) if name in known)
        op = node.target.split(".")[1] if "." in node.target else node.target
        calls.append(Call(node.name, op, _shape(node.meta), "", reads))
        known.add(node.name)
    return tuple(calls), marks


def _input(name: str, meta: Any) -> Call:
    return Call(name, "input", _shape(meta), "", ())


def _shape(meta: Any) -> str:
    """Sizes, with symbols for those that are open."""
    return "" if meta is None else str(list(meta.shape)).replace("'", "")


def _panel(title: str, calls: Sequence[Call], marks: Mapping[str, _Mark], rest: _Mark) -> Panel:
    inputs = list(_inputs(calls))
    folded = _folded(calls, marks, rest)
    looks = [
        (marks.get(group[0].name, rest).meaning, tuple(call.op for call in group))
        for group in folded
    ]
    spans = _without_repeats(looks)
    groups = inputs + [[call for group in folded[a:b] for call in group] for a, b, _ in spans]
    home = {call.name: number for number, group in enumerate(groups) for call in group}
    boxes, legend = [], {}
    for number, group in enumerate(groups):
        first = group[0]
        reads = {home[name] for call in group for name in call.reads if name in home} - {number}
        names = tuple(f"b{each}" for each in sorted(reads))
        if first.op == "input":
            boxes.append(Box(f"b{number}", _name_of_inputs(group), first.text, _INPUT, (), True))
            continue
        start, end, times = spans[number - len(inputs)]
        if times:
            period = (end - start) // times
            text = f"{times} times more: {len(group)} calls"
            boxes.append(Box(f"b{number}", f"the last {period} boxes", text, _REPEATED, names))
            continue
        mark = marks.get(first.name, rest)
        legend[mark.colour if not mark.key.startswith("part") else _ANY_PARTITION] = mark.meaning
        boxes.append(Box(f"b{number}", *_words(group), mark.colour, names))
    return Panel(title, tuple(boxes), legend)


def _without_repeats(looks: Sequence[object]) -> list[tuple[int, int, int]]:
    """Spans of what looks are listed, where there are too many of them to be shown.

    Args:
        looks: What must be equal in things that are alike.

    Returns:
        (start, end, 0) for what is shown, and (start, end, times) for what comes `times` more
        times after it was shown once, as the layers of a transformer do.
    """
    spans = [(k, k + 1, 0) for k in range(len(looks))]
    while len(spans) > _MOST_BOXES:
        # Spans that were folded are like nothing else.
        words = [looks[a] if not times else object() for a, _, times in spans]
        gain, start, period, times = _longest_repeat(words)
        if gain < 2:
            break
        first, last = start + period, start + period * (times + 1)
        spans[first:last] = [(spans[first][0], spans[last - 1][1], times)]
    return spans


def _longest_repeat(words: Sequence[object]) -> tuple[int, int, int, int]:
    """(words saved, start, period, times more) of the repetition that saves most."""
    best = (0, 0, 1, 0)
    for period in range(1, len(words) // 2 + 1):
        run = 0
        for k in range(len(words) - period - 1, -1, -1):
            run = run + 1 if words[k] == words[k + period] else 0
            times = run // period
            # The shortest period that saves as much: of 6 equal layers, 5 and not 2 times 3.
            if period * times - 1 > best[0]:
                best = (period * times - 1, k, period, times)
    return best


def _inputs(calls: Sequence[Call]) -> Iterator[list[Call]]:
    inputs = [call for call in calls if call.op == "input"]
    if len(inputs) > _MOST_INPUTS:
        yield inputs
    else:
        yield from ([call] for call in inputs)


def _folded(calls: Sequence[Call], marks: Mapping[str, _Mark], rest: _Mark) -> list[list[Call]]:
    """Calls in groups of consecutive ones, few enough to be read if folding can do it."""
    calls = [call for call in calls if call.op != "input"]
    groups = [[call] for call in calls]
    if len(groups) <= _MOST_BOXES:
        return groups
    deepest = max(len(_parts(call)) for call in calls)
    for depth in range(max(deepest, 1), 0, -1):
        groups = []
        last: tuple[str, tuple[str, ...]] = ("", ())
        for call in calls:
            path, key = _parts(call)[:depth], marks.get(call.name, rest).key
            # What stands between two modules (a residual sum) goes with the first. Calls that
            # have neither a module nor a fate in common stay apart.
            same = path == last[1] and (path or key)
            if groups and key == last[0] and (same or len(path) < len(last[1])):
                groups[-1].append(call)
                continue
            groups.append([call])
            last = (key, path)
        if len(groups) <= _MOST_BOXES:
            break
    return groups


def _parts(call: Call) -> tuple[str, ...]:
    return tuple(call.layer.split(".")) if call.layer else ()


def _words(group: Sequence[Call]) -> tuple[str, str]:
    """Title and detail of a box."""
    last = group[-1]
    if len(group) == 1:
        return last.op.replace("edgeweave.", "edgeweave::"), last.text or last.layer
    # What was added to the group from between two modules is no part of its name.
    layers = [parts for call in group if len(parts := _parts(call)) >= len(_parts(group[0]))]
    common = []
    for parts in zip(*layers, strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    counts = Counter(call.op for call in group)
    what = ", ".join(op if n == 1 else f"{n} {op}" for op, n in counts.most_common())
    if not common:
        return what, last.text
    title = f"{'.'.join(common)}: {len(group)} calls"
    # The end of a long path tells more than its beginning.
    return title if len(title) <= MOST_LETTERS else "…" + title[1 - MOST_LETTERS :], what


def _name_of_inputs(group: Sequence[Call]) -> str:
    if len(group) > 1:
        return f"{len(group)} inputs"
    # Dynamo's `l_x_` and graphfuse's `tensors_0`.
    name = group[0].name.removeprefix("l_").strip("_")
    return f"input {name.removeprefix('args_').removeprefix('tensors_')}"

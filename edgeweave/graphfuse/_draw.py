"""A picture of the graph: one box for each call, one colour for each partition."""

from __future__ import annotations

import colorsys
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path

from ._engine import Engine

__all__ = ["draw_graph"]

_WIDTH, _HEIGHT, _GAP_X, _GAP_Y, _MARGIN = 190, 34, 24, 26, 20
_ATEN_COLOUR = "#d9d9d9"
Box = tuple[str, str, str, int, int]  # name, text, colour, column, row


def _colour(index: int) -> str:
    # Steps of the golden angle: neighbours differ.
    red, green, blue = colorsys.hls_to_rgb((0.08 + 0.61803 * index) % 1.0, 0.78, 0.62)
    return f"#{round(255 * red):02x}{round(255 * green):02x}{round(255 * blue):02x}"


def _layout(engine: Engine, symbols: Mapping[str, int]) -> tuple[list[Box], list[tuple[str, str]]]:
    """Boxes in rows by depth, and the edges between them."""
    from .._fx import refs_of

    colours: dict[str, str] = {}
    number = 0
    for segment in engine.plan(symbols).segments:
        for unit in segment.units:
            if unit.partition is not None:
                colours.update(dict.fromkeys(unit.partition.nodes, _colour(number)))
                number += 1
    depth: dict[str, int] = {name: 0 for name in engine.input_names()}
    edges = []
    boxes: list[Box] = []
    used: dict[int, int] = {}

    def place(name: str, text: str, colour: str, row: int) -> None:
        boxes.append((name, text, colour, used.get(row, 0), row))
        used[row] = used.get(row, 0) + 1

    for name in depth:
        place(name, f"input {name}", "#ffffff", 0)
    for node in engine.nodes:
        sources = [name for name in dict.fromkeys(refs_of(node)) if name in depth]
        edges += [(source, node.name) for source in sources]
        depth[node.name] = 1 + max((depth[source] for source in sources), default=0)
        shape = "" if node.meta is None else str(list(node.meta.shape)).replace("'", "")
        text = f"{node.target.split('.')[1] if '.' in node.target else node.target} {shape}"
        place(node.name, text, colours.get(node.name, _ATEN_COLOUR), depth[node.name])
    return boxes, edges


def _corner(box: Box) -> tuple[int, int]:
    _, _, _, column, row = box
    return _MARGIN + column * (_WIDTH + _GAP_X), _MARGIN + row * (_HEIGHT + _GAP_Y)


def _svg(boxes: list[Box], edges: list[tuple[str, str]]) -> Iterator[str]:
    at = {box[0]: _corner(box) for box in boxes}
    width = max(x for x, _ in at.values()) + _WIDTH + _MARGIN
    height = max(y for _, y in at.values()) + _HEIGHT + _MARGIN
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">'
    )
    yield f'<rect width="{width}" height="{height}" fill="white"/>'
    for source, target in edges:
        (x1, y1), (x2, y2) = at[source], at[target]
        yield (
            f'<line x1="{x1 + _WIDTH // 2}" y1="{y1 + _HEIGHT}" x2="{x2 + _WIDTH // 2}" y2="{y2}" '
            'stroke="#888888"/>'
        )
    for name, text, colour, _, _ in boxes:
        x, y = at[name]
        yield (
            f'<g><title>{escape(name)}</title><rect x="{x}" y="{y}" width="{_WIDTH}" '
            f'height="{_HEIGHT}" rx="5" fill="{colour}" stroke="#555555"/>'
            f'<text x="{x + _WIDTH // 2}" y="{y + 21}" text-anchor="middle">{escape(text[:32])}'
            "</text></g>"
        )
    yield "</svg>"


def _png(boxes: list[Box], edges: list[tuple[str, str]], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import FancyBboxPatch

    at = {box[0]: _corner(box) for box in boxes}
    width = max(x for x, _ in at.values()) + _WIDTH + _MARGIN
    height = max(y for _, y in at.values()) + _HEIGHT + _MARGIN
    # At most 20,000 pixels high: the limit of many viewers.
    figure = Figure(figsize=(width / 100, height / 100), dpi=min(100.0, 2e6 / height))
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    axes.set_axis_off()
    for source, target in edges:
        (x1, y1), (x2, y2) = at[source], at[target]
        axes.plot([x1 + _WIDTH / 2, x2 + _WIDTH / 2], [y1 + _HEIGHT, y2], color="#888888", lw=0.8)
    for name, text, colour, _, _ in boxes:
        x, y = at[name]
        axes.add_patch(
            FancyBboxPatch((x, y), _WIDTH, _HEIGHT, boxstyle="round,pad=0", fc=colour, ec="#555555")
        )
        axes.text(x + _WIDTH / 2, y + _HEIGHT / 2, text[:32], ha="center", va="center", fontsize=7)
    figure.savefig(path)


def draw_graph(engine: Engine, symbols: Mapping[str, int], path: Path) -> None:
    """Write the picture as SVG or PNG, by the file's ending."""
    if path.suffix not in (".svg", ".png"):
        raise ValueError(f"draw: path must end in .svg or .png, got {str(path)!r}")
    boxes, edges = _layout(engine, symbols)
    if path.suffix == ".svg":
        path.write_text("\n".join(_svg(boxes, edges)) + "\n", encoding="utf-8")
    else:
        _png(boxes, edges, path)

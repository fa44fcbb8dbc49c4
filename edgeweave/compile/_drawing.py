"""Pictures of graphs, before and after side by side, as SVG or PNG.

Both formats are written from the same rectangles, lines and texts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from ._picture import MOST_LETTERS, Box, Panel

__all__ = ["draw_panels"]

# Sans-serif letters of 11 pixels are about 6 wide: as many as fit are MOST_LETTERS.
_WIDTH, _HEIGHT, _GAP_X, _GAP_Y, _MARGIN = 216, 40, 26, 26, 24
_TITLE, _LEGEND, _BETWEEN = 34, 20, 70
_LINE, _EDGE, _INPUT_EDGE = "#555555", "#777777", "#c9c9c9"
Point = tuple[float, float]


@dataclass
class _Canvas:
    """What is drawn, in pixels from the upper left corner.

    Attributes:
        width: As far as anything reaches.
        height: As far as anything reaches.
        rectangles: Corner, size, colour, text of the pointer.
        curves: Four points each, and colour.
        texts: Place, text, size, whether centred.
    """

    width: float = 0.0
    height: float = 0.0
    rectangles: list[tuple[Point, Point, str, str]] = field(default_factory=list)
    curves: list[tuple[tuple[Point, ...], str]] = field(default_factory=list)
    texts: list[tuple[Point, str, int, bool]] = field(default_factory=list)

    def rectangle(self, at: Point, size: Point, colour: str, title: str = "") -> None:
        self.rectangles.append((at, size, colour, title))
        self.reach(at[0] + size[0], at[1] + size[1])

    def text(self, at: Point, text: str, size: int = 11, *, centred: bool = False) -> None:
        self.texts.append((at, text, size, centred))
        if not centred:
            self.reach(at[0] + len(text) * size * 0.58, at[1])

    def reach(self, x: float, y: float) -> None:
        self.width, self.height = max(self.width, x), max(self.height, y)


def draw_panels(pairs: Sequence[tuple[Panel, Panel]], heading: str, path: Path) -> None:
    """Write pairs of panels, one pair below the other.

    Args:
        pairs: Before and after of each graph.
        heading: Above all.
        path: A file ending in `.svg`, or `.png` (which needs matplotlib).

    Raises:
        ValueError: If the file ends in anything else.
    """
    if path.suffix not in (".svg", ".png"):
        raise ValueError(f"draw: path must end in .svg or .png, got {str(path)!r}")
    canvas = _Canvas()
    canvas.text((_MARGIN, _MARGIN + 12), heading, 15)
    places = [(_Places(before), _Places(after)) for before, after in pairs]
    right = _MARGIN + max((left.width for left, _ in places), default=0.0) + _BETWEEN
    top = float(_MARGIN + _TITLE)
    for left, after in places:
        heights = [left.draw(canvas, _MARGIN, top), after.draw(canvas, right, top)]
        top += max(heights) + _GAP_Y
    if path.suffix == ".svg":
        path.write_text("\n".join(_svg(canvas)) + "\n", encoding="utf-8")
    else:
        _png(canvas, path)


class _Places:
    """Where each box of a panel goes: rows by depth, in a row by what a box reads."""

    def __init__(self, panel: Panel) -> None:
        self.panel = panel
        self.row: dict[str, int] = {}
        self.centre: dict[str, float] = {}
        rows: list[list[Box]] = []
        first_use = self._first_uses()
        for box in panel.boxes:
            depth = 1 + max((self.row[name] for name in box.reads), default=-1)
            if box.is_input:
                depth = 0
            self.row[box.name] = depth
            rows.extend([] for _ in range(depth + 1 - len(rows)))
            rows[depth].append(box)
        step = _WIDTH + _GAP_X
        self.width = max((len(row) for row in rows), default=1) * step - _GAP_X
        self.height = len(rows) * (_HEIGHT + _GAP_Y)
        for row in rows:
            row.sort(key=lambda box: self._wish(box, first_use))
            start = (self.width - (len(row) * step - _GAP_X)) / 2
            for column, box in enumerate(row):
                self.centre[box.name] = start + column * step + _WIDTH / 2

    def _first_uses(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for number, box in enumerate(self.panel.boxes):
            for name in box.reads:
                found.setdefault(name, number)
        return found

    def _wish(self, box: Box, first_use: dict[str, int]) -> float:
        """The middle of what it reads; inputs stand in the order of their use."""
        known = [self.centre[name] for name in box.reads]
        return sum(known) / len(known) if known else float(first_use.get(box.name, 1 << 20))

    def draw(self, canvas: _Canvas, x: float, y: float) -> float:
        """Draw the panel with its upper left corner at (x, y); return its height."""
        canvas.text((x, y), self.panel.title, 13)
        legend = list(self.panel.legend.items())
        for number, (colour, meaning) in enumerate(legend):
            at = y + 10 + number * _LEGEND
            canvas.rectangle((x, at), (14, 12), colour)
            canvas.text((x + 20, at + 10), meaning)
        top = y + 24 + len(legend) * _LEGEND
        inputs = {box.name for box in self.panel.boxes if box.is_input}
        for box in self.panel.boxes:
            for number, name in enumerate(box.reads):
                colour = _INPUT_EDGE if name in inputs else _EDGE
                canvas.curves.append((self._curve(name, box.name, number, x, top), colour))
        for box in self.panel.boxes:
            left, up = self._corner(box.name, x, top)
            canvas.rectangle(
                (left, up), (_WIDTH, _HEIGHT), box.colour, f"{box.title}\n{box.detail}"
            )
            middle = left + _WIDTH / 2
            lines = [line for line in (box.title, box.detail) if line]
            for number, line in enumerate(lines):
                at = up + (17 if len(lines) > 1 else 24) + 15 * number
                canvas.text((middle, at), _short(line), centred=True)
        return top - y + self.height

    def _corner(self, name: str, x: float, top: float) -> Point:
        return (
            x + self.centre[name] - _WIDTH / 2,
            top + self.row[name] * (_HEIGHT + _GAP_Y),
        )

    def _curve(
        self, source: str, target: str, number: int, x: float, top: float
    ) -> tuple[Point, ...]:
        """From the lower side of one box to the upper side of another, around those between."""
        (x1, y1), (x2, y2) = self._corner(source, x, top), self._corner(target, x, top)
        x1, y1, x2 = x1 + _WIDTH / 2, y1 + _HEIGHT, x2 + _WIDTH / 2
        rows = self.row[target] - self.row[source]
        aside = 0.0 if rows <= 1 else _WIDTH * 0.7 + 10 * (number % 3) + min(rows, 12)
        bend = (y2 - y1) * (0.4 if rows <= 1 else 0.15)
        return (x1, y1), (x1 + aside, y1 + bend), (x2 + aside, y2 - bend), (x2, y2)


def _short(text: str) -> str:
    return text if len(text) <= MOST_LETTERS else text[: MOST_LETTERS - 1] + "…"


def _svg(canvas: _Canvas) -> Iterator[str]:
    width, height = canvas.width + _MARGIN, canvas.height + _MARGIN
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" font-family="sans-serif">'
    )
    yield f'<rect width="{width:.0f}" height="{height:.0f}" fill="white"/>'
    for points, colour in canvas.curves:
        (x1, y1), *rest = points
        bends = ", ".join(f"{x:.1f} {y:.1f}" for x, y in rest)
        yield f'<path d="M {x1:.1f} {y1:.1f} C {bends}" fill="none" stroke="{colour}"/>'
    for (x, y), (wide, high), colour, title in canvas.rectangles:
        yield (
            f'<g><title>{escape(title)}</title><rect x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" '
            f'height="{high:.1f}" rx="4" fill="{colour}" stroke="{_LINE}"/></g>'
        )
    for (x, y), text, size, centred in canvas.texts:
        anchor = ' text-anchor="middle"' if centred else ""
        # A text must not take the pointer from the box below it, which has the whole of it.
        yield (
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}"{anchor} pointer-events="none">'
            f"{escape(text)}</text>"
        )
    yield "</svg>"


def _png(canvas: _Canvas, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import FancyBboxPatch, PathPatch
    from matplotlib.path import Path as Curve

    width, height = canvas.width + _MARGIN, canvas.height + _MARGIN
    # Twice as many pixels as units, but not more than 20,000: the limit of many viewers.
    scale = min(2.0, 2e4 / max(width, height))
    figure = Figure(figsize=(width / 100, height / 100), dpi=100 * scale)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    axes.set_axis_off()
    for points, colour in canvas.curves:
        codes = [Curve.MOVETO, Curve.CURVE4, Curve.CURVE4, Curve.CURVE4]
        axes.add_patch(PathPatch(Curve(points, codes), fill=False, ec=colour, lw=0.7))
    for (x, y), (wide, high), colour, _ in canvas.rectangles:
        style = "round,pad=0,rounding_size=4"
        axes.add_patch(
            FancyBboxPatch((x, y), wide, high, boxstyle=style, fc=colour, ec=_LINE, lw=0.7)
        )
    for (x, y), text, size, centred in canvas.texts:
        # 100 units are an inch of 72 points. A `$` would begin a formula.
        axes.text(
            x, y, text.replace("$", r"\$"), ha="center" if centred else "left", va="baseline",
            fontsize=size * 0.72,
        )  # fmt: skip
    figure.savefig(path)

"""`Report.draw`: the graphs before and after, folded, coloured, as SVG and PNG."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest
import torch
from torch import nn

from edgeweave import cli
from edgeweave.compile import explain
from edgeweave.compile._picture import _MOST_BOXES, _without_repeats, panels_of

SVG = "{http://www.w3.org/2000/svg}"


class Sums(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x, edges):
        h = self.linear(x)
        return torch.zeros_like(h).index_add_(0, edges[1], h[edges[0]]).relu()


def inputs(nodes: int = 9):
    return torch.randn(nodes, 5), torch.randint(0, 9, (2, 60))


def report_of(model=None, given=None, **options):
    options = {"engine": "eager", "training": False, **options}
    return explain((model or Sums()).eval(), given or inputs(), **options)


def test_before_and_after_of_a_small_graph() -> None:
    before, after = panels_of(1, report_of().graphs[0])
    assert before.title.startswith("graph 1 as captured: ")
    assert after.title.endswith(", eager")
    titles = [box.title for box in before.boxes]
    assert titles[:2] == ["input x", "input edges"]  # the weights are left out
    assert "index_add_" in titles
    rewritten = {box.title: box.colour for box in before.boxes}
    new = {box.title: box for box in after.boxes}["edgeweave::mm"]
    assert new.detail == "[9, 5]"
    # One colour for the pass, on both sides; another for what it left alone.
    assert rewritten["index_add_"] == new.colour
    assert rewritten["linear"] != new.colour
    assert before.legend[new.colour] == after.legend[new.colour] == "fuse_mm"
    assert "ATen" in after.legend.values()
    reads = {box.name: box.title for box in after.boxes}
    assert sorted(reads[name] for name in new.reads) == ["input edges", "linear"]


class Deep(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        make = lambda: nn.Sequential(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 5), nn.Tanh())  # noqa: E731
        self.blocks = nn.ModuleList(make() for _ in range(blocks))
        self.sums = Sums()

    def forward(self, x, edges):
        for block in self.blocks:
            x = x + block(x)
        return self.sums(x, edges)


def test_large_graphs_are_folded_by_module() -> None:
    graph = report_of(Deep(40)).graphs[0]
    assert graph.calls_before > 200
    before, after = panels_of(1, graph)
    for panel in (before, after):
        boxes = [box for box in panel.boxes if not box.is_input]
        assert len(boxes) <= _MOST_BOXES
        order = [box.name for box in panel.boxes]
        for box in panel.boxes:
            assert all(order.index(name) < order.index(box.name) for name in box.reads)
    # What was rewritten is not folded into what was not.
    assert "edgeweave::mm" in [box.title for box in after.boxes]
    assert "fuse_mm" in before.legend.values()
    assert "blocks.7: 5 calls" in [box.title for box in before.boxes]


def test_what_repeats_is_folded_too() -> None:
    # Layers that Dynamo cannot tell apart by module: one after the other by hand.
    class Alike(nn.Module):
        def forward(self, x):
            for _ in range(30):
                x = (x.sin() + x).cos() * 2
            return x.exp()

    before, after = panels_of(1, report_of(Alike(), (torch.randn(3, 3),)).graphs[0])
    details = [(box.title, box.detail) for box in before.boxes]
    assert details[:5] == [
        ("input x", "[3, 3]"), ("sin", "[3, 3]"), ("add", "[3, 3]"), ("cos", "[3, 3]"),
        ("mul", "[3, 3]"),
    ]  # fmt: skip
    assert details[5:] == [("the last 4 boxes", "29 times more: 116 calls"), ("exp", "[3, 3]")]
    assert [box.reads for box in before.boxes][-2:] == [("b4",), ("b5",)]
    assert len(after.boxes) == len(before.boxes)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("abcabcabc" * 6, ("the period is shortest", 3, 17)),
        ("a" * 60, ("one letter", 1, 59)),
        ("".join(map(chr, range(200, 260))), ("nothing repeats", 0, 0)),
    ],
)
def test_repeats(words, expected) -> None:
    _, period, times = expected
    spans = _without_repeats(words)
    assert [a for a, _, _ in spans[1:]] == [b for _, b, _ in spans[:-1]]
    assert (spans[0][0], spans[-1][1]) == (0, len(words))
    folded = [(a, b, n) for a, b, n in spans if n]
    assert folded == ([(period, period * (times + 1), times)] if times else [])


def test_partitions_have_colours_of_their_own() -> None:
    pytest.importorskip("edgeweave.graphfuse")
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Flatten(), nn.GLU()
    )
    report = report_of(model, (torch.randn(4, 3, 32, 32),), engine="onednn")
    (graph,) = report.graphs
    assert sum(graph.got.values()) > 0
    _, after = panels_of(1, graph)
    if graph.left:  # measured, and no faster: nothing is coloured
        assert set(after.legend.values()) == {"ATen"}
        return
    colours = {box.title: box.colour for box in after.boxes}
    assert after.title.startswith("as onednn runs it: ")
    assert colours["conv2d"] != colours["glu"]
    assert after.boxes[0].detail == "[4, 3, 32, 32]"


def test_svg(tmp_path) -> None:
    path = tmp_path / "graphs.svg"
    report_of(given=[inputs(), inputs(17)]).draw(path)
    root = ET.parse(path).getroot()
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert texts[0] == "Sums: 2 graphs compiled, 0 graph breaks, 1 call recompiled"
    assert texts.count("edgeweave::mm") == 2
    assert "fuse_mm" in texts
    width, height = float(root.get("width")), float(root.get("height"))
    rectangles = list(root.iter(f"{SVG}rect"))
    for each in rectangles[1:]:
        assert 0 <= float(each.get("x")) <= width - float(each.get("width"))
        assert 0 <= float(each.get("y")) <= height - float(each.get("height"))
    assert len(list(root.iter(f"{SVG}path"))) > 8


def test_boxes_of_one_side_do_not_overlap(tmp_path) -> None:
    path = tmp_path / "graphs.svg"
    report_of(Deep(40)).draw(path)
    boxes = [
        tuple(float(each.get(key)) for key in ("x", "y", "width", "height"))
        for each in list(ET.parse(path).getroot().iter(f"{SVG}rect"))[1:]
    ]
    for k, (x, y, w, h) in enumerate(boxes):
        for x2, y2, w2, h2 in boxes[:k]:
            assert x + w <= x2 or x2 + w2 <= x or y + h <= y2 or y2 + h2 <= y


def test_png(tmp_path) -> None:
    path = tmp_path / "graphs.png"
    report_of().draw(path)
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_other_endings_are_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"draw: path must end in \.svg or \.png"):
        report_of().draw(tmp_path / "graphs.pdf")


_FILE = """
import torch
from torch import nn

class Layer(nn.Module):
    def forward(self, x, edges):
        return torch.zeros_like(x).index_add_(0, edges[1], x[edges[0]])

def example():
    return Layer(), (torch.randn(9, 5), torch.randint(0, 9, (2, 60)))
"""


def test_the_command(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.path", list(__import__("sys").path))
    file, picture = tmp_path / "model_to_draw.py", tmp_path / "graph.svg"
    file.write_text(_FILE)
    words = ["explain", str(file), "--engine", "eager", "--draw"]
    assert cli.main([*words, str(picture)]) == 0
    assert "edgeweave::mm" in picture.read_text()
    assert cli.main([*words, "graph.pdf"]) == 1
    assert "--draw must end in .svg or .png, got graph.pdf" in capsys.readouterr().err
    __import__("sys").modules.pop(file.stem, None)

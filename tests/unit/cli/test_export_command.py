"""`edgeweave export`: what MODEL must be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from edgeweave import cli

_MODELS = """\
empty = {}
number = 5
other = {"weights": 1}
unknown = {"module": None, "colour": 1}
"""


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("exported", "MODEL must be module:attribute, got 'exported'"),
        ("exported:absent", "has no attribute 'absent'"),
        ("exported:number", "a dictionary with `module`, got int"),
        ("exported:empty", "a dictionary with `module`, got an empty one"),
        ("exported:other", "a dictionary with `module`, got one with weights"),
        ("exported:unknown", "keys among architecture, "),
        ("exported:unknown", ", got colour"),
    ],
)
def test_wrong_models(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    model: str,
    message: str,
) -> None:
    pytest.importorskip("grpc")
    (tmp_path / "exported.py").write_text(_MODELS)
    monkeypatch.syspath_prepend(tmp_path)
    assert cli.main(["export", model, str(tmp_path / "models")]) == 1
    assert message in capsys.readouterr().err


def test_a_built_in_class_is_written_by_its_built_in_name(tmp_path: Path) -> None:
    pytest.importorskip("grpc")
    gcn = pytest.importorskip("torch_geometric.nn.models").GCN
    from edgeweave.inference_server import ModelConfigError, export_model

    arguments = {"in_channels": 8, "hidden_channels": 4, "num_layers": 2, "out_channels": 3}
    x, edges = torch.randn(10, 8), torch.randint(10, (2, 20))
    options = {"graph": {"features": 8, "channels": 3, "hops": 3}}
    given: dict[str, Any] = {"arguments": arguments, "kind": "resident_graph", "options": options}
    with pytest.raises(ModelConfigError, match="graph must be given"):
        export_model(gcn(**arguments), tmp_path, "papers", **given)
    folder = export_model(gcn(**arguments), tmp_path, "papers", graph=(x, edges), **given)
    table = json.loads((folder / "config.json").read_text())
    assert table["architecture"]["name"] == "torch_geometric.nn.models:GCN"

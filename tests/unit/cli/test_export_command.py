"""`edgeweave export`: what MODEL must be."""

from __future__ import annotations

from pathlib import Path

import pytest

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

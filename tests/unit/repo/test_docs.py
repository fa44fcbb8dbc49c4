"""The checker of the documentation, on texts with known faults and on the documentation itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import check_docs

ROOT = Path(__file__).resolve().parents[3]


def test_the_documentation_has_no_fault() -> None:
    documents = check_docs.documents()
    assert ROOT / "README.md" in documents
    assert [fault for path in documents for fault in check_docs.complaints(path)] == []


def test_links(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# Two words\n")
    page = tmp_path / "page.md"
    text = (
        "# Here & `there`\n[ok](other.md) [ok](other.md#two-words) [ok](#here--there)\n"
        "[web](https://example.org/x)\n[gone](gone.md) [bad](other.md#three) ![pic](gone.png)\n"
        "```\n[in a block](nowhere.md)\n```\n"
    )
    page.write_text(text)
    assert list(check_docs.check_links(page, text)) == [
        "link to gone.md: no such file",
        "link to other.md#three: no such heading",
        "link to gone.png: no such file",
    ]


def test_paths_in_backticks() -> None:
    text = (
        "`edgeweave/runtime.py` `edgeweave/gone.py` `a/b.py` `csrc/` `edgeweave/_C.so` `Makefile`"
    )
    faults = list(check_docs.check_paths(ROOT / "README.md", text))
    assert faults == ["`edgeweave/gone.py`: no such path"]


@pytest.mark.parametrize(
    ("block", "fault"),
    [
        ("```python\nx = 1\n```", None),
        ("```python\nx = = 1\n```", "python block, line 2: invalid syntax"),
        ("```python\n>>> 1 +\n```", None),
        ("```bash\nmake test\nmake TORCH=torch==2.11.0 test\n```", None),
        ("```bash\nmake tset\n```", "the Makefile has no target tset"),
        ("```console\n$ edgeweave doctor --json\n```", None),
        ("```console\n$ edgeweave docter\n```", "edgeweave has no subcommand docter"),
        ("```bash\npython examples/gone.py\n```", "there is no examples/gone.py"),
        ("```text\nmake tset\n```", None),
    ],
)
def test_blocks(block: str, fault: str | None) -> None:
    found = list(check_docs.check_blocks(block))
    assert len(found) == (fault is not None)
    assert fault is None or fault in found[0]


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("<!-- numbers:start -->\n<!-- numbers:end -->", []),
        ("<!-- numbers:start -->", ["marker numbers:start has no end"]),
        ("<!-- numbers:end -->", ["marker numbers:end has no start"]),
    ],
)
def test_markers(text: str, faults: list[str]) -> None:
    assert list(check_docs.check_markers(text)) == faults


def test_block_lines_and_languages() -> None:
    (block,) = check_docs.blocks("one\n\n```python no-run\nx\n```\n")
    assert (block.language, block.info, block.text, block.line) == (
        "python",
        "python no-run",
        "x\n",
        4,
    )

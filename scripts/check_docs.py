"""Check that the documentation says nothing that is not so.

For every Markdown file of the repository: relative links and anchors resolve; Python blocks
parse; paths in `backticks` exist; `make` targets and `edgeweave` subcommands that shell blocks use
exist; the markers that tools fill between are paired. (The integration tests run the blocks.)
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_FENCE = re.compile(r"^(`{3,})([^\n`]*)\n(.*?)^\1\s*$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)|!\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#{1,6}\s+(.*?)\s*$", re.MULTILINE)
_CODE = re.compile(r"`([^`\n]+)`")
_ROOMS = "edgeweave|csrc|tests|docs|scripts|benchmarks|examples"
_PATH = re.compile(rf"(?:{_ROOMS})/[\w./-]+|\w+\.(?:md|toml|txt)|Makefile|\.ci/run")
_MARKER = re.compile(r"<!--\s*([\w-]+):(start|end)\s*-->")
# Named by the documentation, made when the project is used or built.
_MADE = ("edgeweave/_C.so",)


@dataclass(frozen=True)
class Block:
    """A fenced block of a Markdown file: its info string, its text, the line it starts on."""

    info: str
    text: str
    line: int

    @property
    def language(self) -> str:
        """The first word of the info string."""
        return self.info.split(" ")[0]


def blocks(text: str) -> Iterator[Block]:
    """Yield the fenced blocks of a Markdown text."""
    for match in _FENCE.finditer(text):
        line = text.count("\n", 0, match.start()) + 2
        yield Block(match.group(2).strip(), match.group(3), line)


def _without_blocks(text: str) -> str:
    return _FENCE.sub(lambda match: "\n" * match.group(0).count("\n"), text)


def _anchor(heading: str) -> str:
    plain = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
    return re.sub(r"[^\w\- ]", "", plain).strip().replace(" ", "-")


def _anchors(path: Path) -> set[str]:
    return {_anchor(heading) for heading in _HEADING.findall(_without_blocks(path.read_text()))}


def check_links(path: Path, text: str) -> Iterator[str]:
    """Yield a complaint for each relative link or anchor that leads nowhere."""
    for match in _LINK.finditer(_without_blocks(text)):
        target = match.group(1) or match.group(2)
        if re.match(r"[a-z][a-z+.-]*:", target):
            continue
        file_part, _, anchor = target.partition("#")
        linked = (path.parent / file_part) if file_part else path
        if not linked.exists():
            yield f"link to {target}: no such file"
        elif anchor and linked.suffix == ".md" and anchor not in _anchors(linked):
            yield f"link to {target}: no such heading"


def check_paths(path: Path, text: str) -> Iterator[str]:
    """Yield a complaint for each path in backticks that does not exist."""
    for code in _CODE.findall(_without_blocks(text)):
        if not _PATH.fullmatch(code) or code in _MADE:
            continue
        if not (ROOT / code).exists() and not (path.parent / code).exists():
            yield f"`{code}`: no such path"


def _targets() -> set[str]:
    return set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def _subcommands() -> set[str]:
    modules = (path.stem for path in (ROOT / "edgeweave" / "cli").glob("_[a-z]*.py"))
    return {module.removeprefix("_") for module in modules}


def check_blocks(text: str) -> Iterator[str]:
    """Yield a complaint for each Python block that does not parse and each unknown command."""
    for block in blocks(text):
        if block.language == "python" and ">>>" not in block.text:
            try:
                ast.parse(block.text)
            except SyntaxError as error:
                yield f"python block, line {block.line}: {error}"
        if block.language not in ("bash", "console", "sh"):
            continue
        for line in block.text.splitlines():
            command = line.removeprefix("$ ").split("#")[0].strip()
            for target in re.findall(r"^make(?:\s+\w+=\S+)*\s+([\w-]+)", command):
                if target not in _targets():
                    yield f"block, line {block.line}: the Makefile has no target {target}"
            for name in re.findall(r"^edgeweave\s+([a-z]+)", command):
                if name not in _subcommands():
                    yield f"block, line {block.line}: edgeweave has no subcommand {name}"
            for script in re.findall(r"^python3?\s+([\w./-]+\.py)", command):
                if "/" in script and not (ROOT / script).exists():
                    yield f"block, line {block.line}: there is no {script}"


def check_markers(text: str) -> Iterator[str]:
    """Yield a complaint unless each `<!-- name:start -->` has its `<!-- name:end -->`."""
    opened: list[str] = []
    for name, kind in _MARKER.findall(text):
        if kind == "start":
            opened.append(name)
        elif not opened or opened.pop() != name:
            yield f"marker {name}:end has no start"
    for name in opened:
        yield f"marker {name}:start has no end"


def documents() -> list[Path]:
    """Return the Markdown files that git knows or would take."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    paths = (ROOT / name for name in listed.stdout.splitlines())
    return sorted(path for path in paths if path.exists())


def complaints(path: Path) -> list[str]:
    """Return everything that is wrong with one Markdown file."""
    text = path.read_text()
    found = [
        *check_links(path, text),
        *check_paths(path, text),
        *check_blocks(text),
        *check_markers(text),
    ]
    return [f"{path.relative_to(ROOT)}: {complaint}" for complaint in found]


def main() -> int:
    """Check all documents; return 1 if any has a fault."""
    paths = documents()
    faults = [complaint for path in paths for complaint in complaints(path)]
    for fault in faults:
        print(fault, file=sys.stderr)
    print(f"{len(paths)} documents, {len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())

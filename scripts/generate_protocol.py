"""Write edgeweave/inference_server/_descriptors.py from the .proto files beside it.

    python scripts/generate_protocol.py          write it
    python scripts/generate_protocol.py --check  fail if it is not what would be written

What is kept is the compiled description of each file, not protoc's Python modules: those register
themselves in protobuf's process-wide pool, where another package may hold the same names.
"""

from __future__ import annotations

import base64
import sys
import tempfile
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "edgeweave" / "inference_server" / "protos"
TARGET = ROOT / "edgeweave" / "inference_server" / "_descriptors.py"
_HEADER = '''"""Compiled .proto files, written by scripts/generate_protocol.py: not to be edited."""

from __future__ import annotations

from typing import Final

__all__ = ["FILES"]

# base64 of one serialised FileDescriptorProto per file
FILES: Final[dict[str, str]] = {
'''


def compiled() -> dict[str, bytes]:
    """Compile every .proto file; return its FileDescriptorProto by file name."""
    from google.protobuf import descriptor_pb2
    from grpc_tools import protoc

    names = sorted(path.name for path in PROTOS.glob("*.proto"))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "set"
        status = protoc.main(["protoc", f"-I{PROTOS}", f"--descriptor_set_out={out}", *names])
        if status != 0:
            raise RuntimeError(f"generate_protocol: protoc must succeed, got status {status}")
        files = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file
    return {file.name: file.SerializeToString(deterministic=True) for file in files}


def generated() -> str:
    """Return the text of `_descriptors.py`."""
    parts = [_HEADER]
    for name, data in compiled().items():
        text = base64.b64encode(data).decode("ascii")
        lines = "\n".join(f'        "{line}"' for line in textwrap.wrap(text, 88))
        parts.append(f'    "{name}": (\n{lines}\n    ),\n')
    return "".join([*parts, "}\n"])


def main() -> int:
    """Write the file, or compare; return the exit status."""
    text = generated()
    if "--check" in sys.argv[1:]:
        return int(TARGET.read_text(encoding="utf-8") != text)
    TARGET.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

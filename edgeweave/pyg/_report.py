"""What the drop-in did: per call site, how often it fused and why it did not."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

_lock = threading.Lock()
_fused: Counter[str] = Counter()
_fell_back: dict[str, Counter[str]] = {}

MAX_REASONS = 32
"""Distinct reasons that are counted per call site; further ones are counted together."""

OTHER_REASONS = "other reasons"


def _reset_after_fork() -> None:
    global _lock
    _lock = threading.Lock()  # the parent's may be held by a thread that does not exist here


os.register_at_fork(after_in_child=_reset_after_fork)


@dataclass(frozen=True)
class SiteReport:
    """Counts of one call site.

    Attributes:
        site: Layer class (`GCNConv`) or function (`utils.scatter`).
        fused: Calls that ran on edgeweave's kernels.
        reasons: Calls that ran PyG's own code, by reason; after 32 different ones, the rest is
            counted as `other reasons`.
    """

    site: str
    fused: int
    reasons: Mapping[str, int]

    @property
    def fell_back(self) -> int:
        """Number of calls that ran PyG's own code."""
        return sum(self.reasons.values())


@dataclass(frozen=True)
class Report:
    """Counts of every call site since the process started or `reset_report()` was called.

    Attributes:
        sites: One entry per call site, sorted by name.
    """

    sites: tuple[SiteReport, ...]

    def __getitem__(self, site: str) -> SiteReport:
        """Return the entry of `site`, all zero if it was never reached.

        Args:
            site: Layer class or function name, as in `SiteReport.site`.

        Returns:
            The counts of that site.
        """
        for entry in self.sites:
            if entry.site == site:
                return entry
        return SiteReport(site, 0, {})

    def __str__(self) -> str:
        if not self.sites:
            return (
                "edgeweave.pyg: no call has been seen yet; was edgeweave.accelerate() called, and "
                "is EDGEWEAVE_DISABLE not set?"
            )
        width = max(len("call site"), *(len(entry.site) for entry in self.sites))
        lines = [f"{'call site':<{width}}  {'fused':>8}  {'fell back':>9}  why"]
        for entry in self.sites:
            whys = [
                f"{count}x {reason}"
                for reason, count in sorted(entry.reasons.items(), key=lambda item: -item[1])
            ] or [""]
            head = f"{entry.site:<{width}}  {entry.fused:>8}  {entry.fell_back:>9}  "
            lines.append((head + whys[0]).rstrip())
            lines.extend(" " * len(head) + why for why in whys[1:])
        return "\n".join(lines)


def record_fused(site: str) -> None:
    """Count one call of `site` that ran on edgeweave's kernels.

    Args:
        site: Layer class or function name.
    """
    # A Counter update is several bytecodes, so counts would be lost between threads without this.
    with _lock:
        _fused[site] += 1


def record_fallback(site: str, reason: str) -> None:
    """Count one call of `site` that runs PyG's own code.

    Args:
        site: Layer class or function name.
        reason: Why, in words a user can act on; dtypes and class names may be in it, sizes and
            values not, or the report would grow with the data.
    """
    with _lock:
        reasons = _fell_back.get(site)
        if reasons is None:
            reasons = _fell_back[site] = Counter()
        if reason not in reasons and len(reasons) >= MAX_REASONS:
            reason = OTHER_REASONS
        reasons[reason] += 1


def report() -> Report:
    """Return what was fused, what fell back and why, per call site.

    Calls seen by `torch.compile` and `torch.jit.script` are not counted: they are traced once and
    then run without Python.

    Returns:
        A snapshot; printing it gives a table.

    Example:
        >>> from edgeweave.pyg import report, reset_report
        >>> reset_report()
        >>> print(report())
        edgeweave.pyg: no call has been seen yet; was edgeweave.accelerate() called, and ...
    """
    with _lock:
        names = sorted(_fused.keys() | _fell_back.keys())
        return Report(
            tuple(SiteReport(name, _fused[name], dict(_fell_back.get(name, {}))) for name in names)
        )


def reset_report() -> None:
    """Set all counts to zero.

    Example:
        >>> from edgeweave.pyg import report, reset_report
        >>> reset_report()
        >>> report()["GCNConv"].fused
        0
    """
    with _lock:
        _fused.clear()
        _fell_back.clear()

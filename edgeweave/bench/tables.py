"""Tables of a benchmark report for the terminal, made from its JSON form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table

from edgeweave.bench.targets import GROUP_TITLES

_VERDICT_STYLES = {"pass": "green", "miss": "red", "-": "dim"}


def group_table(run: Mapping[str, Any], quick: bool) -> Table:
    """Table of the groups: geometric mean, worst case, target, reached or not.

    Args:
        run: An entry of `runs`.
        quick: Whether the graphs were small, which the targets are not meant for.

    Returns:
        The table.
    """
    table = Table(
        title=f"speed-up by group (allocator: {run['allocator']}, both sides)",
        caption="small graphs: the targets are for the full ones" if quick else None,
    )
    for heading in ("group", "against"):
        table.add_column(heading)
    for heading in ("cases", "geomean", "at least", "worst", "at least"):
        table.add_column(heading, justify="right")
    table.add_column("worst case")
    table.add_column("target")
    for group in run["groups"]:
        style = _VERDICT_STYLES[group["verdict"]]
        table.add_row(
            GROUP_TITLES.get(group["group"], group["group"]),
            group["peer"],
            str(group["cases"]),
            f"{group['geomean']:.2f}x",
            _target(group["target_geomean"]),
            f"{group['worst']:.2f}x",
            _target(group["target_worst"]),
            group["worst_case"].split("/", 1)[-1],
            f"[{style}]{group['verdict']}[/{style}]",
        )
    return table


def case_table(run: Mapping[str, Any], group: str) -> Table:
    """Table of the cases of one group.

    Args:
        run: An entry of `runs`.
        group: The group.

    Returns:
        The table: medians with quartiles, ratios, and bandwidth or loss curves where they apply.
    """
    cases = [case for case in run["cases"] if case["group"] == group]
    has_traffic = any(case["bandwidth_gb_s"] is not None for case in cases)
    has_losses = any("loss curve" in case["distances"] for case in cases)
    title = f"{GROUP_TITLES.get(group, group)} (allocator: {run['allocator']})"
    table = Table(title=title, caption="median (quartiles); distance: to a float64 reference")
    table.add_column("case", no_wrap=True)
    table.add_column("ours, ms", justify="right")
    table.add_column("against")
    for heading in ("peer, ms", "speed-up"):
        table.add_column(heading, justify="right")
    for heading in ("GB/s", "compulsory") if has_traffic else ():
        table.add_column(heading, justify="right")
    table.add_column("distance, peer's", justify="right")
    if has_losses:
        table.add_column("losses differ", justify="right")
    for case in cases:
        for row in _case_rows(case, has_traffic, has_losses):
            table.add_row(*row)
    return table


def environment_line(run: Mapping[str, Any]) -> str:
    """One line on what a run was measured on.

    Args:
        run: An entry of `runs`.

    Returns:
        CPU, ISA, threads, versions, allocator, bandwidth, commit and date.
    """
    environment = run["environment"]
    versions = environment["versions"]
    allocator = environment["allocator"]
    parts = [
        f"{environment['cpu']} ({environment['isa']}, {environment['threads']} threads)",
        f"edgeweave {versions['edgeweave']} at {environment['commit'] or 'no commit'}",
        f"torch {versions['torch']}",
        f"PyG {versions.get('torch_geometric') or 'none'}",
        f"{allocator['name']} {allocator['version']} ({run['allocator']})",
        f"huge pages {environment['transparent_huge_pages']}",
        environment["date"],
    ]
    if "gpu" in environment:
        parts.insert(0, f"{environment['gpu']['name']}, CUDA {environment['gpu']['cuda']}")
    if run["stream_gb_s"] is not None:
        parts.insert(-1, f"STREAM triad {run['stream_gb_s']:.1f} GB/s")
    return ", ".join(parts)


def _case_rows(
    case: Mapping[str, Any], has_traffic: bool, has_losses: bool
) -> Iterator[Sequence[str]]:
    name = case["case_id"].split("/", 1)[-1]
    if case["status"] != "ok":
        yield [name, f"[red]{case['status']}[/red]"]
        return
    ours, *peers = case["timings"]
    distances = case["distances"]
    for i, (peer, speedup) in enumerate(zip(peers, case["speedups"], strict=True)):
        first = i == 0
        row = [name, _times(ours)] if first else ["", ""]
        row += [peer["name"], _times(peer)]
        row.append(f"{speedup['ratio']:.2f}x ({speedup['q25']:.2f}-{speedup['q75']:.2f})")
        if has_traffic:
            row += _traffic(case) if first else ["", ""]
        row.append(f"{distances[ours['name']]:.0e}, {distances[peer['name']]:.0e}")
        if has_losses:
            row.append(f"{distances['loss curve']:.1e}" if first else "")
        yield row


def _times(timing: Mapping[str, Any]) -> str:
    return f"{_ms(timing['median_s'])} ({_ms(timing['q25_s'])}-{_ms(timing['q75_s'])})"


def _traffic(case: Mapping[str, Any]) -> list[str]:
    if case["bandwidth_gb_s"] is None:
        return ["", ""]
    fraction = case["compulsory_fraction"]
    return [
        f"{case['bandwidth_gb_s']:.1f}",
        f"{100 * fraction:.0f} %" if fraction is not None else "",
    ]


def _ms(seconds: float) -> str:
    milliseconds = 1e3 * seconds
    if milliseconds >= 100:
        return f"{milliseconds:.0f}"
    return f"{milliseconds:.3f}" if milliseconds < 1 else f"{milliseconds:.3g}"


def _target(value: float | None) -> str:
    return "" if value is None else f"{value:g}x"

"""Summaries against targets, and the JSON form of a report."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from edgeweave.bench import harness, results, targets
from edgeweave.bench.environment import describe_environment, measure_stream_gb_s
from edgeweave.bench.models import MODELS, TEN_MODELS
from edgeweave.bench.records import CaseResult, Traffic


def timed(group: str, name: str, **peers: float) -> CaseResult:
    """A case of 1 s whose peers take as many seconds as given."""
    return CaseResult(
        group,
        f"{group}/{name}",
        {"graph": name},
        distances={"edgeweave": 0.0, **dict.fromkeys(peers, 1e-7)},
        timings=[
            harness.summarise(side, [s] * 3) for side, s in {"edgeweave": 1.0, **peers}.items()
        ],
        speedups=[harness.compare(peer, [1.0] * 3, [s] * 3) for peer, s in peers.items()],
        traffic=Traffic(2_000_000_000, 1_000_000_000),
    )


def make_report(*cases: CaseResult) -> dict[str, Any]:
    groups = targets.summarise_groups(cases)
    run = results.run_record("default", describe_environment(), 50.0, cases, groups)
    return results.report("ops", {"quick": True}, [run])


def test_group_summary_against_the_target() -> None:
    peer = "torch.sparse.mm"
    cases = [timed("mm-forward", "a", **{peer: 2.0}), timed("mm-forward", "b", **{peer: 8.0})]
    (row,) = targets.summarise_groups(cases)
    assert (row.cases, row.geomean, row.worst) == (2, pytest.approx(4.0), 2.0)
    assert row.worst_case == "mm-forward/a"
    assert (row.target_geomean, row.target_worst, row.verdict) == (3.0, 2.0, "pass")


@pytest.mark.parametrize(
    ("group", "peer", "ratios", "verdict"),
    [
        ("mm-forward", "torch.sparse.mm", (1.9, 20.0), "miss"),  # one case below 2
        ("mm-forward", "torch.sparse.mm", (2.5, 2.5), "miss"),  # geometric mean below 3
        ("mm-forward-backward", "torch.sparse.mm", (2.0, 50.0), "pass"),  # no worst case promised
        ("mm-mkl", "scipy (1 thread)", (0.5,), "-"),
    ],
)
def test_verdicts(group: str, peer: str, ratios: tuple[float, ...], verdict: str) -> None:
    cases = [timed(group, str(i), **{peer: ratio}) for i, ratio in enumerate(ratios)]
    assert [row.verdict for row in targets.summarise_groups(cases)] == [verdict]


def test_tuned_runs_have_their_own_target() -> None:
    cases = [timed("train-gnn", "GCN", **{"stock PyG": 4.0})]
    assert targets.summarise_groups(cases)[0].verdict == "miss"
    assert targets.summarise_groups(cases, tuned=True)[0].verdict == "pass"


def ten_models(**ratios: float) -> list[CaseResult]:
    """A training row of each of the ten models, 6x where no other ratio is given."""
    return [
        timed(MODELS[name].group, f"half-arxiv/{name}", **{"stock PyG": ratios.get(name, 6.0)})
        for name in TEN_MODELS
    ]


@pytest.mark.parametrize(("slowest", "verdict"), [(1.5, "pass"), (0.5, "miss")])
def test_ten_models_have_a_row_together(slowest: float, verdict: str) -> None:
    cached = timed("train-gcn-cached", "half-arxiv/GCN, cached=True", **{"stock PyG": 99.0})
    rows = targets.summarise_groups([*ten_models(RGCN=slowest), cached])
    assert [row.group for row in rows].count("train-ten") == 1
    row = rows[-1]
    assert (row.group, row.peer, row.cases) == ("train-ten", "stock PyG", 10)
    assert row.geomean == pytest.approx((6.0**9 * slowest) ** 0.1)
    assert (row.worst, row.worst_case) == (slowest, "train-relational/half-arxiv/RGCN")
    assert (row.target_geomean, row.target_worst, row.verdict) == (5.0, None, verdict)


def test_some_of_the_ten_models_have_no_row_together() -> None:
    other_graph = timed("train-gnn", "other/GCN", **{"stock PyG": 6.0})
    results = [case for case in ten_models() if not case.case_id.endswith("/GCN")]
    groups = [row.group for row in targets.summarise_groups([*results, other_graph])]
    assert "train-ten" not in groups


def test_a_second_peer_of_a_few_models_is_no_part_of_it() -> None:
    peers = {"stock PyG": 6.0, "PyG + SparseTensor": 2.0}
    results = [timed("train-gnn", "half-arxiv/GCN", **peers), *ten_models()[1:]]
    rows = [row for row in targets.summarise_groups(results) if row.group == "train-ten"]
    assert [(row.peer, row.geomean) for row in rows] == [("stock PyG", pytest.approx(6.0))]


def test_cases_without_times_do_not_count() -> None:
    wrong = CaseResult("mm-forward", "mm-forward/a", {}, "wrong", "off by one")
    assert targets.summarise_groups([wrong]) == []


def test_report_survives_the_file(tmp_path: Path) -> None:
    report = make_report(
        timed("mm-forward", "a", **{"torch.sparse.mm": 3.0}),
        CaseResult("gather", "gather/a", {}, "wrong", "nan", distances={"edgeweave": math.inf}),
    )
    path = tmp_path / "new" / "report.json"
    results.write_report(report, path)
    again = results.read_report(path)
    (run,) = again["runs"]
    first, second = run["cases"]
    assert first["speedups"][0]["ratio"] == 3.0
    assert (first["bandwidth_gb_s"], first["compulsory_fraction"]) == (2.0, 0.02)
    assert second["distances"] == {"edgeweave": None}
    assert json.loads(path.read_text())["schema"] == results.SCHEMA


def test_environment_says_what_was_measured_on() -> None:
    environment = describe_environment()
    assert environment["versions"]["torch"]
    assert environment["versions"]["edgeweave"]
    assert environment["isa"]
    assert environment["threads"] >= 1
    assert environment["cpu"]
    assert {"name", "version", "tuned", "huge_pages"} <= environment["allocator"].keys()
    json.dumps(environment)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda r: r.pop("suite"), "report must have suite"),
        (lambda r: r.update(schema="other/1"), "schema must be 'edgeweave-bench/1', got 'other/1'"),
        (lambda r: r["runs"][0].pop("environment"), r"runs\[0\] must have environment"),
        (lambda r: r["runs"][0]["environment"].pop("isa"), r"environment must have isa"),
        (
            lambda r: r["runs"][0]["cases"][0]["timings"][0].update(median_s="1"),
            r"cases\[0\].timings.median_s must have another type, got str '1'",
        ),
        (lambda r: r["runs"].append(3), r"runs\[1\] must be an object, got int"),
    ],
)
def test_damaged_reports_are_refused(damage: Any, message: str, tmp_path: Path) -> None:
    report = make_report(timed("mm-forward", "a", **{"torch.sparse.mm": 3.0}))
    damage(report)
    with pytest.raises(ValueError, match=message):
        results.write_report(report, tmp_path / "report.json")
    assert not (tmp_path / "report.json").exists()


def test_stream_is_a_plausible_bandwidth() -> None:
    # Between a slow disk and the fastest cache there is.
    assert 0.1 < measure_stream_gb_s(elements=1 << 20, repeats=3) < 1e5

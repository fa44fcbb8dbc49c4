"""Every op case, on a small graph: all sides agree with the float64 reference."""

from __future__ import annotations

import pytest

from edgeweave.bench import generators, harness, op_runs
from edgeweave.bench.cases import CaseSpec
from edgeweave.bench.cases_family import family_specs
from edgeweave.bench.cases_mm import mm_specs
from edgeweave.bench.cases_scatter import scatter_specs
from edgeweave.bench.op_graph import OpGraph
from edgeweave.bench.records import Settings
from edgeweave.bench.targets import GROUP_TITLES, TARGETS

GRAPHS = {
    "rmat8": OpGraph(lambda: generators.rmat(8, 4)),
    "arxiv-random": OpGraph(lambda: generators.arxiv_sized("random", shrink=400)),
    "molecules": OpGraph(lambda: generators.molecule_batch(8)),
}
SPECS = [
    spec
    for name, graph in GRAPHS.items()
    for specs in (mm_specs, scatter_specs, family_specs)
    for spec in specs(graph, name, quick=True)
]


@pytest.mark.parametrize("spec", SPECS, ids=[spec.case_id for spec in SPECS])
def test_all_sides_agree_with_the_reference(spec: CaseSpec) -> None:
    case = spec.build()
    assert case.case_id == spec.case_id
    assert case.group == spec.group
    distances = harness.check(case)
    assert set(distances) == {side.name for side in (case.ours, *case.peers)}


# Their cases can only be built there.
ON_A_GPU = ("optimize-", "accelerate-")


def test_every_promised_number_has_cases_and_its_peer() -> None:
    built = {(s.group, peer.name) for s in SPECS for peer in s.build().peers}
    promised = {
        (group, target.peer)
        for group, row in TARGETS.items()
        for target in row
        if not group.startswith(("train-", "infer-", "inference-", *ON_A_GPU))
    }
    assert promised <= built
    assert {spec.group for spec in SPECS} <= GROUP_TITLES.keys()


def test_full_list_covers_four_graphs_and_all_widths() -> None:
    names = [spec.case_id for spec in op_runs.op_specs(quick=False)]
    assert len(set(names)) == len(names)
    for graph in ("rmat17", "arxiv-community", "arxiv-random", "molecules"):
        for reduce in ("sum", "mean", "amax", "amin"):
            for width in (16, 32, 64, 128, 256):
                assert f"mm-forward/{graph}/{reduce}/F{width}" in names
                assert f"mm-forward-backward/{graph}/{reduce}/F{width}" in names


def test_filter() -> None:
    names = [spec.case_id for spec in op_runs.op_specs(quick=True, pattern="^bf16/.*sum")]
    assert names
    assert all(name.startswith("bf16/") and "/sum/" in name for name in names)


def test_uncached_scatter_misses_the_plan_cache(empty_cache: None) -> None:
    from edgeweave import sparse

    (spec,) = [s for s in SPECS if s.case_id == "scatter-uncached/rmat8/sum/F64"]
    ours = spec.build().ours
    assert ours.prepare is not None
    for _ in range(3):
        index = ours.prepare()
        before = sparse.cache_info()
        ours.run(index)
        after = sparse.cache_info()
        assert after.misses == before.misses + 1


def test_cached_scatter_hits_the_plan_cache(empty_cache: None) -> None:
    from edgeweave import sparse

    (spec,) = [s for s in SPECS if s.case_id == "scatter-cached/rmat8/sum/F64"]
    ours = spec.build().ours
    ours.run(None)
    before = sparse.cache_info()
    ours.run(None)
    assert sparse.cache_info().misses == before.misses
    assert sparse.cache_info().hits > before.hits


def test_an_exception_becomes_a_result() -> None:
    def build() -> harness.Case:
        raise RuntimeError("no such kernel")

    result = op_runs.run_spec(CaseSpec("group", "group/case", build), Settings())
    assert result.status == "error"
    assert "RuntimeError: no such kernel" in result.message
    assert "test_cases.py" in result.message

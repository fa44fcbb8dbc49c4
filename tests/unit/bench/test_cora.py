"""Facts of the Cora graph, its split, and what happens where it is missing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from edgeweave.bench import cora
from edgeweave.bench.cora import Cora, CoraUnavailableError


@pytest.fixture(scope="module")
def data() -> Cora:
    return cora.load_cora()


def test_sizes(data: Cora) -> None:
    assert data.x.shape == (cora.NUM_PAPERS, cora.NUM_FEATURES) == (2708, 1433)
    assert data.x.dtype == torch.float32
    assert torch.bincount(data.y).tolist() == [818, 180, 217, 426, 351, 418, 298]


def test_edges_are_the_citations_in_both_directions(data: Cora) -> None:
    src, dst = data.edge_index
    # 5,429 citations, of which 151 go both ways: 2 * (5429 - 151) = 10,556, as in Planetoid.
    assert data.edge_index.shape == (2, 10_556)
    assert bool((src != dst).all())
    keys, reverse = src * cora.NUM_PAPERS + dst, dst * cora.NUM_PAPERS + src
    assert bool((keys[1:] > keys[:-1]).all())
    assert torch.equal(reverse.sort().values, keys)


def test_citing_papers_share_their_subject(data: Cora) -> None:
    # Known edge homophily of Cora: 0.81. Mixed-up paper numbers would give 0.18.
    same = data.y[data.edge_index[0]] == data.y[data.edge_index[1]]
    assert same.float().mean().item() == pytest.approx(0.81, abs=0.005)


def test_features_are_bags_of_words_divided_by_their_size(data: Cora) -> None:
    sums = data.x.sum(dim=1)
    assert torch.allclose(sums, torch.ones_like(sums), atol=1e-5)
    present = (data.x > 0).sum(dim=1)
    assert int(present.min()) >= 1
    assert torch.allclose(data.x.amax(dim=1), 1.0 / present, atol=1e-7)


def test_split_has_20_papers_per_class_and_no_overlap(data: Cora) -> None:
    split = cora.split_cora(data.y, seed=0)
    assert torch.bincount(data.y[split.train]).tolist() == [20] * 7
    assert (split.val.numel(), split.test.numel()) == (500, 1000)
    everything = torch.cat([split.train, split.val, split.test])
    assert everything.unique().numel() == everything.numel()
    assert torch.equal(cora.split_cora(data.y, seed=0).test, split.test)
    assert not torch.equal(cora.split_cora(data.y, seed=1).test, split.test)


def test_split_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="num_val \\+ num_test must be at most 90"):
        cora.split_cora(torch.arange(100) % 2, 0, per_class=5, num_val=60, num_test=40)


def test_graphdatascience_is_not_imported(data: Cora) -> None:
    assert "graphdatascience" not in sys.modules


def test_missing_data_names_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cora, "_installed_folder", lambda: None)
    datasets = pytest.importorskip("torch_geometric.datasets", reason="the fallback is PyG's")

    def offline(*args: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr(datasets, "Planetoid", offline)
    with pytest.raises(CoraUnavailableError, match=r"no network.*pip install graphdatascience"):
        cora.load_cora(tmp_path)

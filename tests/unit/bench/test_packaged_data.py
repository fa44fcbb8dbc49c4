"""Facts of the data that the examples train on, and what happens where it is missing."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch

from edgeweave.bench import imdb, lastfm, molecules, packaged
from edgeweave.bench.imdb import Imdb
from edgeweave.bench.lastfm import LastFm
from edgeweave.bench.molecules import Molecule
from edgeweave.bench.packaged import DataUnavailableError


@pytest.fixture(scope="module")
def movies() -> Imdb:
    return imdb.load_imdb()


@pytest.fixture(scope="module")
def music() -> LastFm:
    return lastfm.load_lastfm()


@pytest.fixture(scope="module")
def mixture() -> list[Molecule]:
    return molecules.load_molecules(300)


class TestImdb:
    def test_sizes(self, movies: Imdb) -> None:
        assert {kind: tuple(x.shape) for kind, x in movies.x.items()} == {
            "movie": (imdb.NUM_MOVIES, imdb.NUM_KEYWORDS),
            "director": (imdb.NUM_DIRECTORS, imdb.NUM_KEYWORDS),
            "actor": (imdb.NUM_ACTORS, imdb.NUM_KEYWORDS),
        }
        assert {x.dtype for x in movies.x.values()} == {torch.float32}
        assert all(set(x.unique().tolist()) == {0.0, 1.0} for x in movies.x.values())
        # Unknown, and the three genres.
        assert torch.bincount(movies.y + 1).tolist() == [1722, 543, 924, 1472]

    def test_relations(self, movies: Imdb) -> None:
        sizes = {relation: index.size(1) for relation, index in movies.edge_index.items()}
        assert sizes == {
            ("director", "directed", "movie"): 4_661,
            ("movie", "directed_by", "director"): 4_661,
            ("actor", "acted_in", "movie"): 13_983,
            ("movie", "has_actor", "actor"): 13_983,
        }
        for (src, _, dst), index in movies.edge_index.items():
            assert index.dtype is torch.int64
            # Nobody is without an edge, so that the largest numbers are known.
            assert index[0].unique().numel() == int(index[0].max()) + 1 == len(movies.x[src])
            assert index[1].unique().numel() == int(index[1].max()) + 1 == len(movies.x[dst])

    def test_who_made_a_movie_has_its_keywords(self, movies: Imdb) -> None:
        """Rows that were mixed up would not: the keywords of a person are those of the movies."""
        for kind, relation in (("director", "directed"), ("actor", "acted_in")):
            person, movie = movies.edge_index[kind, relation, "movie"]
            wanted, had = movies.x["movie"][movie], movies.x[kind][person]
            assert ((wanted > 0) <= (had > 0)).all()
            assert not ((wanted > 0) <= (had.roll(1, 0) > 0)).all()


class TestLastFm:
    def test_sizes(self, music: LastFm) -> None:
        assert music.listens.shape == (2, 92_834)
        assert music.plays.shape == (92_834,)
        assert music.friends.shape == (2, 2 * 12_717)
        assert {t.dtype for t in (music.listens, music.friends, music.tagged)} == {torch.int64}
        bounds = [
            (music.listens, lastfm.NUM_USERS, 17_632),
            (music.friends, lastfm.NUM_USERS, lastfm.NUM_USERS),
            (music.tagged, lastfm.NUM_TAGS, lastfm.NUM_ARTISTS),
        ]
        for index, rows, columns in bounds:
            assert int(index.min()) == 0
            assert int(index[0].max()) + 1 == rows
            # 390 artists that were tagged were never listened to; they come last.
            assert int(index[1].max()) + 1 == columns

    def test_listens(self, music: LastFm) -> None:
        user, artist = music.listens
        key = user * lastfm.NUM_ARTISTS + artist
        assert bool((key[1:] > key[:-1]).all()), "sorted, no pair twice"
        # The data set has the 50 favourites of each user.
        assert int(torch.bincount(user).max()) == 50
        # Its first line: user 2 heard artist 51 13,883 times.
        assert music.listens[:, 0].tolist() == [0, 0]
        assert music.plays[0] == 13_883
        assert music.plays.double().mean().item() == pytest.approx(745.24, abs=0.01)

    def test_friends_go_both_ways(self, music: LastFm) -> None:
        key = music.friends[0] * lastfm.NUM_USERS + music.friends[1]
        back = music.friends[1] * lastfm.NUM_USERS + music.friends[0]
        assert key.unique().numel() == key.numel()
        assert torch.equal(key.sort().values, back.sort().values)

    def test_tags_are_counted(self, music: LastFm) -> None:
        assert music.times.sum() == 186_479
        key = music.tagged[0] * lastfm.NUM_ARTISTS + music.tagged[1]
        assert bool((key[1:] > key[:-1]).all()), "each pair once"
        assert int(music.times.min()) == 1


class TestMolecules:
    def test_first(self, mixture: list[Molecule]) -> None:
        """Methylbenzoquinone: two of nine atoms are oxygen, six in a ring that is not aromatic."""
        first = mixture[0]
        assert first.smiles == "CC1=CC(=O)C=CC1=O"
        assert first.x.shape == (9, molecules.ATOM_FEATURES)
        assert first.edge_attr.shape == (18, molecules.BOND_FEATURES)
        assert first.x[:, molecules.ELEMENTS.index(8)].sum() == 2
        assert first.x[:, molecules.ELEMENTS.index(6)].sum() == 7
        assert first.x[:, -1].sum() == 6
        assert first.x[:, -2].sum() == 0
        # The methyl group: three hydrogens, one neighbour.
        assert first.x[0, -3] == 0.75
        assert first.x[0, -5] == 0.25
        single, double = first.edge_attr[:, :2].sum(0).tolist()
        assert (single, double) == (10, 8)
        assert first.log_p == pytest.approx(0.64, abs=0.01)

    def test_bonds_go_both_ways(self, mixture: list[Molecule]) -> None:
        assert len(mixture) == 300
        for molecule in mixture:
            there, back = molecule.edge_index[:, ::2], molecule.edge_index[:, 1::2]
            assert torch.equal(there, back.flip(0))
            assert torch.equal(molecule.edge_attr[::2], molecule.edge_attr[1::2])
            assert int(molecule.edge_index.max()) < len(molecule.x)
            assert bool((molecule.x[:, : len(molecules.ELEMENTS) + 1].sum(1) == 1).all())
            assert bool((molecule.edge_attr[:, :4].sum(1) == 1).all())

    def test_some_are_aromatic_and_charged(self, mixture: list[Molecule]) -> None:
        atoms = torch.cat([molecule.x for molecule in mixture])
        assert 0.2 < atoms[:, -2].mean() < 0.8
        assert {-1.0, 0.0, 1.0} <= set(atoms[:, -4].tolist())


LOADERS = {
    "load_imdb": (imdb, imdb.load_imdb),
    "load_lastfm": (lastfm, lastfm.load_lastfm),
    "load_molecules": (molecules, molecules.load_molecules),
}


@pytest.mark.parametrize("name", LOADERS)
def test_missing_data_names_the_command(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, load = LOADERS[name]
    monkeypatch.setattr(module, "find_files", lambda *_: None)
    with pytest.raises(DataUnavailableError, match=rf"{name}: package .*pip install 'edgeweave"):
        load()


def test_missing_pandas_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(DataUnavailableError, match=r"load_imdb: packages pandas.*pip install"):
        imdb.load_imdb()


def test_packages_are_not_imported(movies: Imdb, music: LastFm) -> None:
    assert "graphdatascience" not in sys.modules


def test_positions_name_what_is_not_known() -> None:
    assert packaged.positions_of([5, 3], [3, 4, 5]).tolist() == [2, 0]
    for unknown in (2, 6):
        with pytest.raises(ValueError, match=f"must be among the 2 known ones, got {unknown}"):
            packaged.positions_of([3, unknown], [3, 4])
    with pytest.raises(ValueError, match="among the 0 known ones, got 1"):
        packaged.positions_of([1], [])
    assert packaged.positions_of([], [3]).numel() == 0


def test_files_that_are_not_all_there(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some_package" / "data").mkdir(parents=True)
    (tmp_path / "some_package" / "__init__.py").write_text("raise RuntimeError('imported')")
    (tmp_path / "some_package" / "data" / "a").touch()
    monkeypatch.syspath_prepend(tmp_path)
    find: Callable[..., object] = packaged.find_files
    assert find("some_package", "data", ("a",)) == tmp_path / "some_package" / "data"
    assert find("some_package", "data", ("a", "b")) is None
    assert find("some_package", "elsewhere", ("a",)) is None

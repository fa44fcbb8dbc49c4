"""A heterogeneous graph of the examples: IMDB's movies, their actors and directors.

The PyPI package `graphdatascience` carries it as parquet files, which are read from where the
package lies, without importing it (it would pull in a database client).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from edgeweave.bench.packaged import (
    DataUnavailableError,
    find_files,
    positions_of,
    read_parquet,
    stack_rows,
)

__all__ = ["Imdb", "load_imdb"]

NUM_MOVIES = 4_661
NUM_DIRECTORS = 2_270
NUM_ACTORS = 5_841
NUM_KEYWORDS = 1_256
NUM_GENRES = 3
UNKNOWN = -1
"""Class of a movie whose genre is not known."""

_MOVIES = ("imdb_movies_with_genre.parquet.gzip", "imdb_movies_without_genre.parquet.gzip")
_PEOPLE = {"director": "imdb_directors.parquet.gzip", "actor": "imdb_actors.parquet.gzip"}
_RELATIONS = {
    "director": ("directed", "imdb_directed_in.parquet.gzip"),
    "actor": ("acted_in", "imdb_acted_in.parquet.gzip"),
}
_FILES = (*_MOVIES, *_PEOPLE.values(), *(name for _, name in _RELATIONS.values()))


@dataclass(frozen=True)
class Imdb:
    """Movies and people, each with the keywords of the plots.

    Attributes:
        x: By kind of node (`movie`, `director`, `actor`): fp32 `[N, 1256]` of 0 and 1.
        y: int64 `[4661]` genre of each movie, 0 to 2, or `UNKNOWN`.
        edge_index: By relation, int64 `[2, E]`: who `directed` and who `acted_in` which movie, and
            the same backwards (`directed_by`, `has_actor`).
        source: Where the data came from.
    """

    x: dict[str, Tensor]
    y: Tensor
    edge_index: dict[tuple[str, str, str], Tensor]
    source: str


def load_imdb() -> Imdb:
    """Reads the graph from the installed `graphdatascience` package.

    Returns:
        The graph, each relation in both directions.

    Raises:
        DataUnavailableError: If the package is not installed; the message names the pip command.

    Example:
        >>> from edgeweave.bench.imdb import load_imdb
        >>> imdb = load_imdb()
        >>> {kind: len(x) for kind, x in imdb.x.items()}
        {'movie': 4661, 'director': 2270, 'actor': 5841}
    """
    folder = find_files("graphdatascience", "resources/imdb", _FILES)
    if folder is None:
        raise DataUnavailableError(
            "load_imdb: package graphdatascience must be installed, got none with IMDB's files; "
            "pip install 'edgeweave[demo]'"
        )
    labelled, others = (read_parquet(folder / name, "load_imdb") for name in _MOVIES)
    # The labelled movies are in an order of their own; identifiers of movies are 0, 1, 2, ...
    identifiers = [*labelled["nodeId"], *others["nodeId"]]
    order = torch.tensor(identifiers).argsort()
    genres = torch.full((len(identifiers),), UNKNOWN)
    genres[: len(labelled)] = torch.from_numpy(labelled["genre"].to_numpy(copy=True))
    keywords = torch.cat(
        [stack_rows(labelled["plot_keywords"]), stack_rows(others["plot_keywords"])]
    )
    known = {"movie": torch.tensor(identifiers)[order].numpy()}
    x = {"movie": keywords[order]}
    for kind, name in _PEOPLE.items():
        people = read_parquet(folder / name, "load_imdb")
        known[kind] = people["nodeId"].to_numpy()
        x[kind] = stack_rows(people["plot_keywords"])
    edges = {}
    back = {"director": "directed_by", "actor": "has_actor"}
    for kind, (relation, name) in _RELATIONS.items():
        pairs = read_parquet(folder / name, "load_imdb")
        index = torch.stack(
            [
                positions_of(pairs["sourceNodeId"], known[kind]),
                positions_of(pairs["targetNodeId"], known["movie"]),
            ]
        )
        edges[kind, relation, "movie"] = index
        edges["movie", back[kind], kind] = index.flip(0)
    return Imdb(x, genres[order], edges, str(folder))

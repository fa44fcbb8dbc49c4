"""A heterogeneous graph of the examples: who listens to what on Last.fm.

The PyPI package `graphdatascience` carries it (HetRec 2011) as parquet files, which are read from
where the package lies, without importing it (it would pull in a database client).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from edgeweave.bench.packaged import DataUnavailableError, find_files, positions_of, read_parquet

__all__ = ["LastFm", "load_lastfm"]

NUM_USERS = 1_892
NUM_ARTISTS = 18_022
NUM_TAGS = 9_749

_USERS = "user_nodes.parquet.gzip"
_ARTISTS = "artist_nodes.parquet.gzip"
_FRIENDS = "user_friend_df_directed.parquet.gzip"
_LISTENS = "user_listen_artist_rels.parquet.gzip"
_TAGGED = "user_tag_artist_rels.parquet.gzip"


@dataclass(frozen=True)
class LastFm:
    """Users, artists and tags. None of them has features.

    Attributes:
        listens: int64 `[2, 92834]`, users and artists they listened to, sorted by user.
        plays: fp32 `[92834]`, how often.
        friends: int64 `[2, 25434]`, users and users, both directions.
        tagged: int64 `[2, E]`, tags and artists that some user gave them to, each pair once.
        times: fp32 `[E]`, how many users did.
        source: Where the data came from.
    """

    listens: Tensor
    plays: Tensor
    friends: Tensor
    tagged: Tensor
    times: Tensor
    source: str


def load_lastfm() -> LastFm:
    """Reads the graph from the installed `graphdatascience` package.

    Returns:
        The graph; nodes of each kind are numbered from 0.

    Raises:
        DataUnavailableError: If the package is not installed; the message names the pip command.

    Example:
        >>> from edgeweave.bench.lastfm import load_lastfm
        >>> load_lastfm().listens.shape
        torch.Size([2, 92834])
    """
    names = (_USERS, _ARTISTS, _FRIENDS, _LISTENS, _TAGGED)
    folder = find_files("graphdatascience", "resources/lastfm", names)
    if folder is None:
        raise DataUnavailableError(
            "load_lastfm: package graphdatascience must be installed, got none with Last.fm's "
            "files; pip install 'edgeweave[demo]'"
        )
    users, artists, friends, listens, tagged = (
        read_parquet(folder / name, "load_lastfm") for name in names
    )
    user_ids, artist_ids = users["nodeId"].to_numpy(), artists["nodeId"].to_numpy()
    heard = torch.stack(
        [
            positions_of(listens["sourceNodeId"], user_ids),
            positions_of(listens["targetNodeId"], artist_ids),
        ]
    )
    order = (heard[0] * len(artist_ids) + heard[1]).argsort()
    plays = torch.from_numpy(listens["weight"].to_numpy(dtype=np.float32, copy=True))
    pairs = torch.stack(
        [positions_of(friends[end], user_ids) for end in ("sourceNodeId", "targetNodeId")]
    )
    tag_ids = np.unique(tagged["tagID"].to_numpy())
    tags = positions_of(tagged["tagID"], tag_ids)
    key = tags * len(artist_ids) + positions_of(tagged["targetNodeId"], artist_ids)
    distinct, times = torch.unique(key, return_counts=True)
    return LastFm(
        listens=heard[:, order],
        plays=plays[order],
        friends=torch.cat([pairs, pairs.flip(0)], dim=1),
        tagged=torch.stack([distinct // len(artist_ids), distinct % len(artist_ids)]),
        times=times.float(),
        source=str(folder),
    )

"""The real citation graph of the demo: Cora, from an installed package or from PyG.

The PyPI package `graphdatascience` carries Cora as two parquet files. They are read from where
the package lies, without importing it (it would pull in a database client). Where it is not
installed, PyG's `Planetoid` downloads the same data set.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from edgeweave.bench.packaged import DataUnavailableError, find_files

NUM_PAPERS = 2_708
NUM_FEATURES = 1_433
NUM_CLASSES = 7
NUM_CITATIONS = 5_429
_NODES_FILE = "cora_nodes.parquet.gzip"
_CITATIONS_FILE = "cora_rels.parquet.gzip"


class CoraUnavailableError(DataUnavailableError):
    """Cora is neither installed nor to be downloaded."""


@dataclass(frozen=True)
class Cora:
    """The Cora citation graph, undirected.

    Attributes:
        x: fp32 `[2708, 1433]` bag of words, each row divided by its sum.
        y: int64 `[2708]` subject of each paper, 0 to 6.
        edge_index: int64 `[2, E]`, every citation in both directions, sorted, no repeats.
        source: Where the data came from.
    """

    x: Tensor
    y: Tensor
    edge_index: Tensor
    source: str


@dataclass(frozen=True)
class Split:
    """Disjoint node sets of one experiment, int64 node numbers.

    Attributes:
        train: 20 papers of each class.
        val: Papers that select the epoch.
        test: Papers that the accuracy is measured on.
    """

    train: Tensor
    val: Tensor
    test: Tensor


def load_cora(download_dir: Path | None = None) -> Cora:
    """Loads Cora from the installed `graphdatascience` package, or else with PyG's Planetoid.

    Args:
        download_dir: Where Planetoid keeps its download; default `~/.cache/edgeweave`.

    Returns:
        The graph with row-normalised features and symmetric edges.

    Raises:
        CoraUnavailableError: If neither source can be had; the message names the pip command.

    Example:
        >>> from edgeweave.bench.cora import load_cora
        >>> load_cora().x.shape
        torch.Size([2708, 1433])
    """
    folder = _installed_folder()
    if folder is not None:
        return _read_parquet(folder)
    return _download(download_dir or Path.home() / ".cache" / "edgeweave")


def split_cora(
    y: Tensor, seed: int, per_class: int = 20, num_val: int = 500, num_test: int = 1000
) -> Split:
    """Draws a split: `per_class` training papers of each class, the rest at random.

    Args:
        y: int64 `[N]` classes.
        seed: Seed of the draw.
        per_class: Training papers of each class.
        num_val: Size of the validation set.
        num_test: Size of the test set.

    Returns:
        Three disjoint node sets.

    Raises:
        ValueError: If there are not enough papers.

    Example:
        >>> import torch
        >>> from edgeweave.bench.cora import split_cora
        >>> split = split_cora(torch.arange(100) % 2, 0, per_class=5, num_val=20, num_test=30)
        >>> split.train.numel(), split.val.numel(), split.test.numel()
        (10, 20, 30)
    """
    order = torch.randperm(y.numel(), generator=torch.Generator().manual_seed(seed))
    train = torch.cat([order[y[order] == c][:per_class] for c in range(int(y.max()) + 1)])
    free = torch.ones(y.numel(), dtype=torch.bool)
    free[train] = False
    rest = order[free[order]]
    if rest.numel() < num_val + num_test:
        raise ValueError(
            f"split_cora: num_val + num_test must be at most {rest.numel()}, the papers left "
            f"after training, got {num_val + num_test}"
        )
    return Split(train, rest[:num_val], rest[num_val : num_val + num_test])


def _installed_folder() -> Path | None:
    return find_files("graphdatascience", "resources/cora", (_NODES_FILE, _CITATIONS_FILE))


def _read_parquet(folder: Path) -> Cora:
    try:
        import pandas as pd
    except ImportError as error:
        raise CoraUnavailableError(
            "load_cora: package pandas must be installed to read Cora's parquet files, got none; "
            "pip install 'edgeweave[demo]'"
        ) from error
    nodes = pd.read_parquet(folder / _NODES_FILE)
    citations = pd.read_parquet(folder / _CITATIONS_FILE)
    words = torch.from_numpy(np.stack(nodes["features"].to_numpy()).astype(np.float32))
    y = torch.from_numpy(nodes["subject"].to_numpy(dtype=np.int64, copy=True))
    # Paper identifiers are arbitrary numbers: replace them by row numbers.
    rows = pd.Series(np.arange(len(nodes), dtype=np.int64), index=nodes["nodeId"])
    pairs = np.stack(
        [
            rows.loc[citations["sourceNodeId"]].to_numpy(),
            rows.loc[citations["targetNodeId"]].to_numpy(),
        ]
    )
    return Cora(
        _normalise_rows(words), y, _undirected(torch.from_numpy(pairs), len(nodes)), str(folder)
    )


def _download(root: Path) -> Cora:
    try:
        from torch_geometric.datasets import Planetoid

        data = Planetoid(str(root), "Cora")[0]
    except Exception as error:
        raise CoraUnavailableError(
            f"load_cora: Cora must be installed or downloadable, got neither ({error}); "
            "pip install graphdatascience pandas pyarrow"
        ) from error
    edge_index = _undirected(data.edge_index, int(data.num_nodes))
    return Cora(_normalise_rows(data.x), data.y, edge_index, f"Planetoid in {root}")


def _normalise_rows(words: Tensor) -> Tensor:
    return words / words.sum(dim=1, keepdim=True).clamp(min=1.0)


def _undirected(pairs: Tensor, num_nodes: int) -> Tensor:
    """Adds the other direction of every edge; sorts by source, drops repeats."""
    both = torch.cat([pairs, pairs.flip(0)], dim=1)
    key = torch.unique(both[0] * num_nodes + both[1])
    return torch.stack([key // num_nodes, key % num_nodes])

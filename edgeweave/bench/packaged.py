"""Data sets that installed packages carry, found and read without importing those packages."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["DataUnavailableError", "find_files", "positions_of", "read_parquet", "stack_rows"]


class DataUnavailableError(RuntimeError):
    """A data set is not installed."""


def find_files(package: str, folder: str, names: tuple[str, ...]) -> Path | None:
    """Looks for files in the folder of an installed package.

    Args:
        package: Name that the package is imported by.
        folder: Path below the package's own folder.
        names: Files that all must be there.

    Returns:
        The folder, None if the package or one of the files is missing.

    Example:
        >>> from edgeweave.bench.packaged import find_files
        >>> find_files("numpy", ".", ("__init__.py",)) is not None
        True
        >>> find_files("no_such_package", ".", ())
    """
    spec = importlib.util.find_spec(package)
    for location in (spec.submodule_search_locations or []) if spec else []:
        found = Path(location) / folder
        if all((found / name).is_file() for name in names):
            return found
    return None


def read_parquet(path: Path, reader: str) -> Any:
    """Reads a parquet file.

    Args:
        path: The file.
        reader: Function that the user called, for the message.

    Returns:
        A pandas data frame.

    Raises:
        DataUnavailableError: If pandas or pyarrow is not installed.

    Example:
        >>> from pathlib import Path
        >>> import pandas as pd
        >>> from edgeweave.bench.packaged import read_parquet
        >>> path = getfixture("tmp_path") / "a.parquet"
        >>> pd.DataFrame({"a": [1, 2]}).to_parquet(path)
        >>> read_parquet(path, "load_cora")["a"].tolist()
        [1, 2]
    """
    try:
        import pandas as pd

        return pd.read_parquet(path)
    except ImportError as error:
        raise DataUnavailableError(
            f"{reader}: packages pandas and pyarrow must be installed to read parquet files, got "
            f"{error}; pip install 'edgeweave[demo]'"
        ) from error


def stack_rows(column: Any) -> Tensor:
    """Makes a matrix of a data frame's column of equally long lists.

    Args:
        column: A pandas series of lists of numbers.

    Returns:
        fp32 `[rows, length]`.

    Example:
        >>> import pandas as pd
        >>> from edgeweave.bench.packaged import stack_rows
        >>> stack_rows(pd.Series([[1, 0], [0, 1]])).tolist()
        [[1.0, 0.0], [0.0, 1.0]]
    """
    return torch.from_numpy(np.stack(column.to_numpy()).astype(np.float32))


def positions_of(identifiers: Any, among: Any) -> Tensor:
    """Replaces identifiers by their row numbers.

    Args:
        identifiers: Integers, each one of `among`.
        among: Distinct integers.

    Returns:
        int64, the position in `among` of each identifier.

    Raises:
        ValueError: If an identifier is not among them.

    Example:
        >>> from edgeweave.bench.packaged import positions_of
        >>> positions_of([30, 10, 30], [10, 20, 30]).tolist()
        [2, 0, 2]
    """
    known = np.asarray(among, dtype=np.int64)
    wanted = np.asarray(identifiers, dtype=np.int64)
    order = np.argsort(known, kind="stable")
    places = np.searchsorted(known[order], wanted)
    inside = places < len(known)
    places = order[np.where(inside, places, 0)] if len(known) else places
    found = inside & (known[places] == wanted) if len(known) else inside
    if not found.all():
        first = int(wanted[np.flatnonzero(~found)[0]])
        raise ValueError(
            f"positions_of: identifiers must be among the {len(known)} known ones, got {first}"
        )
    return torch.from_numpy(places.astype(np.int64))

"""The folder of models: names, versions, policies. Nothing outside it is ever read."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ._config import ModelConfig, parse_model_config, read_table
from ._errors import InvalidArgumentError, ModelConfigError, NotFoundError
from ._fields import Fields

__all__ = ["Repository", "VersionFolder", "check_model_name"]

_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_VERSION: Final = re.compile(r"[1-9][0-9]{0,8}")
_CONFIG_FILES: Final = ("config.toml", "config.json")
_POLICY_FILE: Final = "versions.toml"


def check_model_name(name: str) -> str:
    """Return a model's name if it is one.

    Args:
        name: What somebody asked for.

    Returns:
        The name.

    Raises:
        InvalidArgumentError: It is none.
    """
    if not _NAME.fullmatch(name):
        raise InvalidArgumentError(
            f"model: name must match {_NAME.pattern}, got {name[:64]!r}", "model_name"
        )
    return name


@dataclass(frozen=True)
class VersionFolder:
    """One version of one model on disk.

    Attributes:
        name: The model.
        version: Its version, a number as text.
        repository: Where it lies.
    """

    name: str
    version: str
    repository: Repository

    def file(self, file_name: str) -> Path:
        """The path of a file of this version, links resolved and inside the repository."""
        return self.repository.inside(Path(self.name) / self.version / file_name)

    def config(self) -> ModelConfig:
        """Read the configuration."""
        for file_name in _CONFIG_FILES:
            file = self.file(file_name)
            if file.is_file():
                where = f"{self.name}/{self.version}/{file_name}"
                return parse_model_config(read_table(file, where), where)
        raise ModelConfigError(
            f"{self.name}/{self.version}: must have a config.toml or config.json"
        )


class Repository:
    """A folder of models.

    Args:
        root: The folder.

    Raises:
        ModelConfigError: There is no such folder.
    """

    def __init__(self, root: Path) -> None:
        if not root.is_dir():
            raise ModelConfigError(f"repository: must be a folder, got {root}")
        self._root = root.resolve()

    def inside(self, relative: Path) -> Path:
        """Resolve a path and make sure that it stays in the repository.

        Args:
            relative: Below the repository's folder.

        Returns:
            The resolved path; it need not exist.

        Raises:
            ModelConfigError: It leads out.
        """
        path = (self._root / relative).resolve()
        if not path.is_relative_to(self._root):
            raise ModelConfigError(f"{relative}: must stay inside the repository")
        return path

    def names(self) -> list[str]:
        """The models there are, by name; other entries are ignored."""
        return sorted(
            entry.name
            for entry in self._root.iterdir()
            if _NAME.fullmatch(entry.name) and self._is_folder_inside(Path(entry.name))
        )

    def _is_folder_inside(self, relative: Path) -> bool:
        path = (self._root / relative).resolve()
        return path.is_relative_to(self._root) and path.is_dir()

    def versions(self, name: str) -> list[str]:
        """The versions of a model there are, oldest first.

        Args:
            name: The model.

        Returns:
            Version numbers as text.

        Raises:
            NotFoundError: There is no such model.
        """
        check_model_name(name)
        if not self._is_folder_inside(Path(name)):
            raise NotFoundError(f"model {name}: must be in the repository")
        found = [
            entry.name
            for entry in self.inside(Path(name)).iterdir()
            if _VERSION.fullmatch(entry.name) and self._is_folder_inside(Path(name) / entry.name)
        ]
        return sorted(found, key=int)

    def wanted(self, name: str) -> list[VersionFolder]:
        """The versions to serve, by the model's policy.

        The file `versions.toml` in the model's folder has `policy` `latest` (with `count`),
        `all`, or `specific` (with `versions`). Without it the latest one is served.

        Args:
            name: The model.

        Returns:
            Oldest first.

        Raises:
            NotFoundError: There is no such model, or it has no version.
            ModelConfigError: The policy is wrong.
        """
        versions = self.versions(name)
        file = self.inside(Path(name) / _POLICY_FILE)
        where = f"{name}/{_POLICY_FILE}"
        table = Fields(where, read_table(file, where) if file.is_file() else {})
        policy = table.choice("policy", ("latest", "all", "specific"), "latest")
        if policy == "latest":
            chosen = versions[-table.count("count", 1, least=1) :]
        elif policy == "all":
            chosen = versions
        else:
            chosen = [str(number) for number in table.integers("versions")]
            absent = sorted(set(chosen) - set(versions))
            if absent:
                raise ModelConfigError(f"{where}: versions must exist, got {', '.join(absent)}")
        table.end()
        if not chosen:
            raise NotFoundError(f"model {name}: must have a version folder such as {name}/1")
        return [VersionFolder(name, version, self) for version in chosen]

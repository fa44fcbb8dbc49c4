"""Which models are served, and how one takes another's place without dropping a request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from edgeweave._errors import EdgeweaveError

from ._config import ModelConfig
from ._cpus import available_cpus, numa_nodes, share_cpus, threads_per_instance
from ._errors import (
    FailedPreconditionError,
    ModelConfigError,
    NotFoundError,
    UnavailableError,
)
from ._instances import Instance
from ._loader import LoadedVersion, ModelRunner, Trust, load_version
from ._repository import Repository, VersionFolder, check_model_name
from ._scheduler import Scheduler
from ._settings import ServerSettings
from ._stats import ModelStats

__all__ = ["Entry", "Registry", "Served"]

_log = logging.getLogger("edgeweave.server")
READY: Final = "READY"
LOADING: Final = "LOADING"
UNAVAILABLE: Final = "UNAVAILABLE"


@dataclass(frozen=True)
class Served:
    """One version that takes requests."""

    loaded: LoadedVersion
    scheduler: Scheduler
    instances: int
    threads: int

    @property
    def runner(self) -> ModelRunner:
        """What runs its batches."""
        return self.loaded.runner


@dataclass
class Entry:
    """What is known about one version, served or not.

    Attributes:
        state: READY, LOADING or UNAVAILABLE.
        reason: Why it is not ready, or why its last reload failed.
        served: What takes the requests.
        stats: Kept over reloads.
    """

    state: str
    reason: str = ""
    served: Served | None = None
    stats: ModelStats = field(default_factory=ModelStats)


class Registry:
    """All models of a server. Everything but loading itself runs in the event loop.

    Args:
        settings: Of the server.
        repository: Where models lie.
    """

    def __init__(self, settings: ServerSettings, repository: Repository) -> None:
        self._settings = settings
        self._repository = repository
        self._trust = Trust(frozenset(settings.allow_architectures), dict(settings.trust_models))
        self._entries: dict[str, dict[str, Entry]] = {}
        self._newest: dict[str, str] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._background: set[asyncio.Task[bool]] = set()
        self._cpus = available_cpus()
        self.closing = False
        # Models that nothing serves because loading failed: the server is not ready then.
        self.failures: dict[str, str] = {}
        # Called after a version came or went.
        self.on_change: Callable[[], None] = lambda: None

    # --- look-ups ---

    def entries(self) -> Iterator[tuple[str, str, Entry]]:
        """All versions that are known: name, version, entry."""
        for name, versions in self._entries.items():
            for version in sorted(versions, key=int):
                yield name, version, versions[version]

    def versions(self, name: str) -> list[str]:
        """Versions of a model that take requests, oldest first."""
        found = self._entries.get(name, {})
        return sorted((v for v, entry in found.items() if entry.served is not None), key=int)

    def resolve(self, name: str, version: str = "") -> tuple[str, Entry, Served]:
        """Find what answers a request.

        Args:
            name: The model.
            version: Its version; "" for the newest that is ready.

        Returns:
            The version, its entry and what serves it.

        Raises:
            NotFoundError: There is no such model or version.
            UnavailableError: It is being loaded, or the server ends.
        """
        if self.closing:
            raise UnavailableError("request: server must be serving, got one that ends", "draining")
        versions = self._entries.get(name)
        if not versions:
            raise NotFoundError(f"model: name must be that of a served model, got {name[:64]!r}")
        if not version:
            version = self._newest.get(name) or next(iter(versions))
        entry = versions.get(version)
        if entry is None:
            raise NotFoundError(
                f"model {name}: version must be one of {', '.join(versions)}, got {version[:64]!r}"
            )
        if entry.served is None:
            if entry.state == UNAVAILABLE:
                raise NotFoundError(f"model {name}: version {version} must be loaded")
            raise UnavailableError(
                f"model {name}: version {version} must be ready, got {entry.state}", "loading"
            )
        return version, entry, entry.served

    # --- loading ---

    async def load_all(self) -> dict[str, str]:
        """Load every model of the repository, or those named in the settings.

        Returns:
            What went wrong, by model name.
        """
        for name in self._settings.models or self._repository.names():
            try:
                await self.load(name)
            except EdgeweaveError as error:
                self.failures[name] = str(error)
                _log.error("model not loaded: %s", error, extra={"model": name})
        return dict(self.failures)

    async def load(self, name: str) -> None:
        """Load or reload a model: new versions take over, then the old ones finish.

        A version that fails to load leaves the one that served before in place.

        Args:
            name: The model.

        Raises:
            NotFoundError: It is not in the repository.
            ModelConfigError: A version does not load.
        """
        check_model_name(name)
        if name not in self._entries:
            # Before there is a lock: names that clients invent must not pile up.
            await asyncio.to_thread(self._repository.versions, name)
        async with self._locks.setdefault(name, asyncio.Lock()):
            wanted = await asyncio.to_thread(self._repository.wanted, name)
            entries = self._entries.setdefault(name, {})
            problems = [
                problem
                for folder in wanted
                if (problem := await self._load_version(entries, folder)) is not None
            ]
            for version in set(entries) - {folder.version for folder in wanted}:
                self._retire(name, version, entries[version])
            if self.versions(name):
                self.failures.pop(name, None)
            if problems:
                raise ModelConfigError("; ".join(problems))

    async def _load_version(self, entries: dict[str, Entry], folder: VersionFolder) -> str | None:
        entry = entries.setdefault(folder.version, Entry(LOADING))
        entry.state = LOADING
        extra = {"model": folder.name, "version": folder.version}
        try:
            loaded = await asyncio.to_thread(
                load_version, folder, self._trust, self._settings.limits, self._threads_of
            )
        # Whatever a model's code raises while it is built must not end the server.
        except Exception as error:
            known = isinstance(error, EdgeweaveError)
            entry.reason = str(error) if known else f"{type(error).__name__} while loading"
            entry.state = UNAVAILABLE if entry.served is None else READY
            if not known:
                _log.error("model not loaded", exc_info=error, extra=extra)
            return f"{folder.name}/{folder.version}: {entry.reason}"
        if self.closing:
            return f"{folder.name}/{folder.version}: server ends"
        before, entry.served = entry.served, self._serve(loaded, entry.stats)
        entry.state, entry.reason = READY, ""
        if before is not None:
            self._drain_later(before)
        self._changed(folder.name)
        _log.info("model loaded", extra=extra)
        return None

    def _threads_of(self, config: ModelConfig) -> int:
        count = config.instances or self._settings.instances
        # Workers are processes: they share the processors as instances do.
        sharers = count * self._settings.workers
        wanted = config.threads or self._settings.threads
        return threads_per_instance(len(self._cpus), sharers, wanted)

    def _serve(self, loaded: LoadedVersion, stats: ModelStats) -> Served:
        config = loaded.config
        count = config.instances or self._settings.instances
        threads = self._threads_of(config)
        sets: list[list[int]] = [[]] * count
        if config.pin:
            # Workers too: two processes on the same processors would be no better than none.
            first = count * self._settings.worker_index
            shares = share_cpus(numa_nodes(self._cpus), count * self._settings.workers, threads)
            sets = shares[first : first + count]
        label = f"{loaded.name}/{loaded.version}"
        instances = [Instance(f"{label}#{i}", threads, cpus) for i, cpus in enumerate(sets)]
        scheduler = Scheduler(label, loaded.runner, instances, config.batching, stats)
        return Served(loaded, scheduler, count, threads)

    def _changed(self, name: str) -> None:
        ready = self.versions(name)
        # Looked up by every request that names no version.
        self._newest[name] = ready[-1] if ready else ""
        self.on_change()

    def _drain_later(self, served: Served) -> None:
        task = asyncio.get_running_loop().create_task(
            served.scheduler.drain(self._settings.drain_s)
        )
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _retire(self, name: str, version: str, entry: Entry) -> None:
        if entry.served is not None:
            self._drain_later(entry.served)
            entry.served = None
            _log.info("model unloaded", extra={"model": name, "version": version})
        entry.state, entry.reason = UNAVAILABLE, "unloaded"
        self._changed(name)

    async def unload(self, name: str) -> None:
        """Take a model out of service; requests inside it finish.

        Args:
            name: The model.

        Raises:
            NotFoundError: It is not known.
        """
        check_model_name(name)
        if name not in self._entries:
            raise NotFoundError(f"model: name must be that of a served model, got {name!r}")
        async with self._locks.setdefault(name, asyncio.Lock()):
            self.failures.pop(name, None)
            for version, entry in self._entries[name].items():
                self._retire(name, version, entry)

    async def close(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for all that are inside.

        Args:
            timeout_s: How long to wait.

        Returns:
            Whether all finished in time.
        """
        self.closing = True
        waits = [
            entry.served.scheduler.drain(timeout_s)
            for _, _, entry in self.entries()
            if entry.served is not None
        ]
        return all(await asyncio.gather(*waits, *self._background))

    def check_control(self) -> None:
        """Refuse repository control unless it is switched on."""
        if not self._settings.allow_repository_control:
            raise FailedPreconditionError(
                "repository: control must be switched on; "
                "start the server with --allow-repository-control"
            )

    def index(self, ready_only: bool) -> list[tuple[str, str, str, str]]:
        """Name, version, state and reason of all models, also those on disk that are not loaded."""
        rows = [
            (name, version, READY if e.served is not None else e.state, e.reason)
            for name, version, e in self.entries()
        ]
        known = {name for name, *_ in rows}
        rows += [
            (name, "", UNAVAILABLE, "not loaded")
            for name in self._repository.names()
            if name not in known
        ]
        return [row for row in rows if not ready_only or row[2] == READY]

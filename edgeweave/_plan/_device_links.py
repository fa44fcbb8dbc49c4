"""Which tensors on a device lead to which plan, without a look at what is in them.

To compare two numbers on a device is to wait for all that it was given to do before, so a tensor
that was seen is known again by its storage, its place in it, and its version. That takes views for
what they are: compiled code makes new ones at each call.

Versions do not tell of everything. What torch cannot see (`.data`, other libraries' kernels) goes
unnoticed; `EDGEWEAVE_CHECK_PLANS=1` compares everything. And Inductor writes to its buffers, and
reuses them, without counting: in compiled code only a graph's inputs are known by their versions,
since Inductor never writes there behind torch's back; all other tensors are known by their storage
and a sample of their contents.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from ._device import index_fingerprint
from ._plan import Plan

__all__ = ["DeviceLinks", "Geometry"]

# Any: torch's class has no annotations.
_StorageWeakRef: Final[Any] = reductions.StorageWeakRef
_LINKS_PER_STORAGE = 16
# Storages that died are looked for when there are so many more than at the last time.
_SWEEP_EVERY = 64


class Geometry(NamedTuple):
    """How a tensor lies in its storage, and what it is asked for."""

    place: tuple[object, ...]
    counts: tuple[int, int, int]  # num_src, num_dst, row of the destinations

    @classmethod
    def of(cls, tensor: Tensor, counts: tuple[int, int, int]) -> Geometry:
        """The geometry of a tensor."""
        place = tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()
        return cls(place, counts)


class _Link(NamedTuple):
    geometry: Geometry
    version: int | None  # None: not known, the samples must do
    samples: int | None
    plan: Plan
    content: tuple[object, ...]  # key in the cache's plans


class _Storage(NamedTuple):
    alive: Any  # a weak reference: it holds the address, which cannot come to mean another one
    links: list[_Link]


class DeviceLinks:
    """The table of them.

    Args:
        samples: How many entries stand for all.
        check_all: Compare all contents at each look-up.
    """

    def __init__(self, samples: int, check_all: bool) -> None:
        self._samples = samples
        self._check_all = check_all
        self._storages: dict[int, _Storage] = {}
        self._owners: dict[int, tuple[Any, weakref.ref[Tensor]]] = {}
        self._lock = threading.RLock()
        self._sweep_at = _SWEEP_EVERY

    def find(
        self, tensor: Tensor, geometry: Geometry, compiled: bool
    ) -> tuple[Plan, tuple[object, ...]] | None:
        """The plan that a tensor led to and its key, None if it is not known or was edited."""
        found = self._storages.get(_address(tensor))
        if found is None or found.alive.expired():
            return None
        version = self._version(tensor, compiled)
        for link in list(found.links):
            if link.geometry != geometry:
                continue
            if self._check_all:
                same = link.plan.matches(tensor, geometry.counts[2])
            elif version is not None:
                same = link.version == version
            else:
                # Inference tensors have no version, and no samples are kept of them.
                same = link.samples is not None and link.samples == self._sample(tensor, geometry)
            if same:
                return link.plan, link.content
        return None

    def add(
        self,
        tensor: Tensor,
        geometry: Geometry,
        compiled: bool,
        plan: Plan,
        content: tuple[object, ...],
    ) -> None:
        """Remembers that a tensor leads to a plan."""
        version = self._version(tensor, compiled)
        if version is None and not compiled:
            return
        samples = self._sample(tensor, geometry) if version is None else None
        link = _Link(geometry, version, samples, plan, content)
        address = _address(tensor)
        with self._lock:
            found = self._storages.get(address)
            if found is None or found.alive.expired():
                found = _Storage(_StorageWeakRef(tensor.untyped_storage()), [])
                self._storages[address] = found
            kept = [old for old in found.links if old.geometry != geometry]
            found.links[:] = [link, *kept[: _LINKS_PER_STORAGE - 1]]
            if len(self._storages) >= self._sweep_at:
                self._sweep()

    def share(self, tensor: Tensor, links: list[_Link]) -> None:
        """Makes a list of links that of a new tensor too; what one learns, all of them know."""
        with self._lock:
            storage = _StorageWeakRef(tensor.untyped_storage())
            self._storages[_address(tensor)] = _Storage(storage, links)
            if len(self._storages) >= self._sweep_at:
                self._sweep()

    def note_owner(self, tensor: Tensor) -> None:
        """Makes a tensor's version that of all views of its storage in compiled code."""
        address = _address(tensor)
        known = self._owners.get(address)
        if known is not None and known[1]() is tensor:
            return
        owners = self._owners

        def forget(dead: weakref.ref[Tensor]) -> None:
            entry = owners.get(address)
            if entry is not None and entry[1] is dead:
                owners.pop(address, None)

        owner = _StorageWeakRef(tensor.untyped_storage()), weakref.ref(tensor, forget)
        owners[address] = owner

    def drop(self, content: tuple[object, ...]) -> None:
        """Forgets what leads to a plan."""
        with self._lock:
            for address in list(self._storages):
                found = self._storages.get(address)
                if found is None:
                    continue
                found.links[:] = [link for link in found.links if link.content != content]
                if not found.links:
                    del self._storages[address]

    def clear(self) -> None:
        """Forgets everything but who owns what."""
        with self._lock:
            self._storages.clear()

    def _version(self, tensor: Tensor, compiled: bool) -> int | None:
        if compiled:
            known = self._owners.get(_address(tensor))
            owner = None if known is None or known[0].expired() else known[1]()
            # A storage may have been exchanged under its tensor.
            if owner is None or _address(owner) != _address(tensor):
                return None
            tensor = owner
        return None if tensor.is_inference() else tensor._version

    def _sample(self, tensor: Tensor, geometry: Geometry) -> int:
        return index_fingerprint(tensor, geometry.counts[2], self._samples)

    def _sweep(self) -> None:
        for address in list(self._storages):
            if self._storages[address].alive.expired():
                del self._storages[address]
        self._sweep_at = len(self._storages) + _SWEEP_EVERY


def _address(tensor: Tensor) -> int:
    with torch._C._DisableFuncTorch():
        return int(tensor.untyped_storage()._cdata)

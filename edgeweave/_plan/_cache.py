"""The plan cache: models that pass plain tensors, or rebuild equal ones, get plans without knowing.

Two ways lead to a plan. By tensor: a weak reference to it (to its base, if it is a view), its
version, shape, strides and offset, and a check of its contents, full below `FULL_CHECK_EDGES` and
sampled above. By content: a fingerprint of all indices finds a candidate, and an exact comparison
with the plan's private copy confirms it. Never by address: a freed tensor's address may be
another's tomorrow.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from .._checks import INDEX_DTYPES
from .._native import ops
from ._device import index_fingerprint, is_native, make_plan
from ._device_links import DeviceLinks, Geometry
from ._plan import Plan, outside_tracing

__all__ = [
    "CacheInfo",
    "cache_clear",
    "cache_info",
    "charge",
    "check_everything",
    "forget_plan",
    "named",
    "note_graph_inputs",
    "plan_for_edges",
    "plan_for_index",
    "set_cache_limit",
    "share_links",
]

FULL_CHECK_EDGES: Final = 100_000
_SAMPLES: Final = 64
_LINKS_PER_TENSOR: Final = 16  # views of one tensor that are remembered
_CHECK_ALL: Final = os.environ.get("EDGEWEAVE_CHECK_PLANS", "0") not in ("", "0")


def check_everything(num_edges: int, *, on_cpu: bool = True) -> bool:
    """Whether an index of this length is compared as a whole even where its version is known.

    On CUDA only if the environment asks for it: to compare is to wait for the device.
    """
    return _CHECK_ALL or (on_cpu and num_edges < FULL_CHECK_EDGES)


class CacheInfo(NamedTuple):
    """State of the plan cache.

    Attributes:
        hits: Look-ups answered by the tensor itself.
        content_hits: Look-ups answered by an equal edge set in another tensor.
        misses: Look-ups that built a plan.
        entries: Plans held.
        bytes: Bytes that the held plans may take, their transposes included.
        max_bytes: The bound; the least recently used plan goes first.
    """

    hits: int
    content_hits: int
    misses: int
    entries: int
    bytes: int
    max_bytes: int


class _Link(NamedTuple):
    """What a tensor looked like when it led to a plan."""

    owner: weakref.ref[Tensor]
    version: int
    geometry: tuple[object, ...]  # shape, strides, offset
    counts: tuple[int, int, int]  # num_src, num_dst, row of the destinations
    samples: int | None  # fingerprint of a sample; None: everything is compared, and that is enough
    plan: Plan
    content: tuple[object, ...]  # key in _plans


_lock = threading.RLock()
# By id of the owner; the weak reference says whether it is still the same tensor.
_links: dict[int, list[_Link]] = {}
_plans: OrderedDict[tuple[object, ...], Plan] = OrderedDict()
_device_links = DeviceLinks(_SAMPLES, _CHECK_ALL)
_bytes = 0
_max_bytes = 2 << 30
_hits = _content_hits = _misses = 0


def _reset_after_fork() -> None:
    global _lock
    _lock = threading.RLock()  # the parent's may be held by a thread that does not exist here


os.register_at_fork(after_in_child=_reset_after_fork)


def plan_for_edges(
    edge_index: Tensor,
    num_src: int,
    num_dst: int,
    *,
    flip: bool = False,
    op: str = "mm",
    compiled: bool = False,
) -> Plan:
    """The plan of `edge_index` `[2, E]`.

    Row 0 is the source, row 1 the destination; the other way round with `flip`. `compiled`: the
    caller is an op of a compiled graph, whose buffers change without their versions; see
    `_device_links`.

    Raises:
        IndexError: If an index is out of range.
    """
    return _lookup(edge_index, num_src, num_dst, 0 if flip else 1, op, compiled)


def plan_for_index(
    index: Tensor, dim_size: int, *, op: str = "scatter_reduce", compiled: bool = False
) -> Plan:
    """The plan of a plain index `[E]` into `dim_size` slots; `compiled` as in `plan_for_edges`.

    Raises:
        IndexError: If an index is out of range.
    """
    return _lookup(index, 0, dim_size, -1, op, compiled)


def _lookup(
    tensor: Tensor, num_src: int, num_dst: int, dst_row: int, op: str, compiled: bool
) -> Plan:
    global _hits
    if not is_native(tensor):
        return _lookup_on_device(tensor, num_src, num_dst, dst_row, op, compiled)
    owner = tensor._base
    if owner is None:
        owner = tensor
    links = _links.get(id(owner))
    if links is None:
        return _lookup_content(tensor, owner, num_src, num_dst, dst_row, op)
    counts = (num_src, num_dst, dst_row)
    for link in links:
        if link.counts != counts or link.owner() is not owner:
            continue
        if link.samples is None:
            same = link.plan.matches(tensor, dst_row)
        else:
            same = (
                link.geometry == _geometry(tensor)
                and link.version == owner._version
                and link.samples == ops.fingerprint(tensor, dst_row, _SAMPLES)
            )
        if same:
            _hits += 1
            if link.content in _plans:  # may have been evicted while this tensor still led to it
                _plans.move_to_end(link.content)
            return link.plan
    return _lookup_content(tensor, owner, num_src, num_dst, dst_row, op)


def _lookup_content(
    tensor: Tensor, owner: Tensor, num_src: int, num_dst: int, dst_row: int, op: str
) -> Plan:
    with _lock, outside_tracing():
        plain = tensor.detach()
        plan, content = _find_content(plain, num_src, num_dst, dst_row, op)
        full = check_everything(plan.num_edges)
        samples = None if full else ops.fingerprint(plain, dst_row, _SAMPLES)
        _remember(tensor, owner, plan, content, (num_src, num_dst, dst_row), samples)
        return plan


def _find_content(
    plain: Tensor, num_src: int, num_dst: int, dst_row: int, op: str
) -> tuple[Plan, tuple[object, ...]]:
    """The plan of these indices, built if there is none, and its key. To be called locked."""
    global _content_hits, _misses, _bytes
    fingerprint = index_fingerprint(plain, dst_row, 0)
    content = fingerprint, plain.shape, num_src, num_dst, dst_row, plain.device
    plan = _plans.get(content)
    if plan is not None and plan.matches(plain, dst_row):
        _content_hits += 1
        _plans.move_to_end(content)
        return plan, content
    if plan is not None:  # two edge sets with one fingerprint: the newer takes the place
        _bytes -= _plans.pop(content).nbytes_bound
        _unlink(content)
    plan = _build(plain, num_dst, num_src, dst_row, op)
    _misses += 1
    _plans[content] = plan
    _bytes += plan.nbytes_bound
    _evict()
    return plan, content


def _lookup_on_device(
    tensor: Tensor, num_src: int, num_dst: int, dst_row: int, op: str, compiled: bool
) -> Plan:
    global _hits
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    geometry = Geometry.of(tensor, (num_src, num_dst, dst_row))
    found = _device_links.find(tensor, geometry, compiled)
    if found is not None:
        _hits += 1
        plan, content = found
        if content in _plans:
            _plans.move_to_end(content)
        return plan
    with _lock, outside_tracing():
        plain = tensor.detach()
        plan, content = _find_content(plain, num_src, num_dst, dst_row, op)
        _device_links.add(tensor, geometry, compiled, plan, content)
        return plan


def note_graph_inputs(inputs: Iterable[object]) -> None:
    """Tells of the tensors that a compiled graph is about to be called with.

    The graph may read them, but reuses the memory of none: their versions tell of edits.
    """
    for value in inputs:
        if isinstance(value, Tensor) and value.is_cuda and value.dtype in INDEX_DTYPES:
            _device_links.note_owner(value)


def share_links(tensor: Tensor, links: list[Any]) -> None:
    """Lets a tensor on a device lead to the plans that its copies, of the same contents, led to."""
    _device_links.share(tensor, links)


def _build(edges: Tensor, num_dst: int, num_src: int, dst_row: int, op: str) -> Plan:
    try:
        if dst_row < 0:
            return make_plan(edges, None, num_dst, num_src)
        return make_plan(edges[dst_row], edges[1 - dst_row], num_dst, num_src)
    except IndexError as error:
        raise named(error, op) from None


def named(error: IndexError, op: str) -> IndexError:
    """The library's error, said by the operator that the user called."""
    return IndexError(str(error).replace("edgeweave:", f"{op}:", 1))


def _remember(
    tensor: Tensor,
    owner: Tensor,
    plan: Plan,
    content: tuple[object, ...],
    counts: tuple[int, int, int],
    samples: int | None,
) -> None:
    """Links a tensor to its plan, unless it is an inference tensor.

    Those have no version to tell of edits.
    """
    if owner.is_inference():
        return
    key = id(owner)
    geometry = _geometry(tensor)
    link = _Link(
        weakref.ref(owner, lambda _: _drop_dead(key)),
        owner._version,
        geometry,
        counts,
        samples,
        plan,
        content,
    )
    kept = [
        old
        for old in _links.get(key, ())
        if old.owner() is owner and (old.geometry, old.counts) != (geometry, counts)
    ]
    _links[key] = [link, *kept[: _LINKS_PER_TENSOR - 1]]


def _geometry(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.stride(), tensor.storage_offset()


def _drop_dead(key: int) -> None:
    # Runs whenever a tensor dies, in any thread: one dictionary operation each, no lock.
    links = _links.get(key)
    if links is None:
        return
    alive = [link for link in links if link.owner() is not None]
    if alive:
        _links[key] = alive
    else:
        _links.pop(key, None)


def _evict() -> None:
    global _bytes
    while _bytes > _max_bytes and len(_plans) > 1:
        content, plan = _plans.popitem(last=False)
        _bytes -= plan.nbytes_bound
        _unlink(content)


def _unlink(content: tuple[object, ...]) -> None:
    _device_links.drop(content)
    # Keys alone: a list of pairs allocates as it goes, a collection may run in between, and a
    # tensor that dies in it takes its entry out of the dictionary that is being walked.
    for key in list(_links):
        links = _links.get(key, [])
        kept = [link for link in links if link.content != content]
        if len(kept) != len(links):
            if kept:
                _links[key] = kept
            else:
                _links.pop(key, None)


def forget_plan(plan: Plan) -> None:
    """Drops one plan from the cache: the next look-up of its edges builds a new one."""
    global _bytes
    with _lock:
        for content, held in list(_plans.items()):
            if held is plan:
                del _plans[content]
                _bytes -= plan.nbytes_bound
                _unlink(content)


def charge(plan: Plan, nbytes: int) -> None:
    """Counts what was built from a plan, and is kept with it, as part of it."""
    global _bytes
    with _lock:
        plan.nbytes_bound += nbytes
        if any(held is plan for held in _plans.values()):
            _bytes += nbytes
            _evict()


def cache_info() -> CacheInfo:
    """Counters and size of the plan cache.

    Example:
        >>> import edgeweave, torch
        >>> edgeweave.sparse.cache_clear()
        >>> edges = torch.tensor([[0, 1], [1, 0]])
        >>> _ = edgeweave.sparse.mm(edges, torch.rand(2, 4))
        >>> _ = edgeweave.sparse.mm(edges, torch.rand(2, 4))
        >>> info = edgeweave.sparse.cache_info()
        >>> info.misses, info.hits, info.entries
        (1, 1, 1)
    """
    return CacheInfo(_hits, _content_hits, _misses, len(_plans), _bytes, _max_bytes)


def cache_clear() -> None:
    """Drops every cached plan and sets the counters to zero. Graphs keep theirs.

    Example:
        >>> import edgeweave, torch
        >>> _ = edgeweave.sparse.mm(torch.tensor([[0, 1], [1, 0]]), torch.rand(2, 4))
        >>> edgeweave.sparse.cache_clear()
        >>> info = edgeweave.sparse.cache_info()
        >>> info.misses, info.entries, info.bytes
        (0, 0, 0)
    """
    global _bytes, _hits, _content_hits, _misses
    with _lock:
        _plans.clear()
        _links.clear()
        _device_links.clear()
        _bytes = _hits = _content_hits = _misses = 0


def set_cache_limit(max_bytes: int) -> None:
    """Bounds the bytes that cached plans may take (2 GiB at first).

    The most recent plan always stays.

    Args:
        max_bytes: The bound in bytes, not negative.

    Raises:
        ValueError: If `max_bytes` is negative.

    Example:
        >>> import edgeweave
        >>> before = edgeweave.sparse.cache_info().max_bytes
        >>> edgeweave.sparse.set_cache_limit(64 << 20)  # 64 MiB
        >>> edgeweave.sparse.cache_info().max_bytes
        67108864
        >>> edgeweave.sparse.set_cache_limit(before)
    """
    global _max_bytes
    if max_bytes < 0:
        raise ValueError(f"set_cache_limit: max_bytes must not be negative, got {max_bytes}")
    with _lock:
        _max_bytes = max_bytes
        _evict()

"""Plans of segments: entries `ptr[g]` to `ptr[g + 1]` are group g.

Such a plan is one over an index whose entries are in order. What is kept here is which `ptr` led
to which plan, so that the index `[E]` is not written and searched for again at each call; the plans
themselves are in the plan cache, bounded like all others. As there, never by address: a `ptr` is
compared with a copy.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import OrderedDict
from typing import Final, NamedTuple

import torch
from torch import Tensor

from ._cache import plan_for_index
from ._plan import Plan, outside_modes

__all__ = ["check_ptr_values", "plan_for_ptr", "segment_groups"]

_MOST_SHAPES: Final = 16
_MOST_OF_A_SHAPE: Final = 4


class _Link(NamedTuple):
    ptr: Tensor  # a copy
    plan: weakref.ref[Plan]


_lock = threading.RLock()
# By number of segments and of entries.
_links: OrderedDict[tuple[int, int, torch.dtype, torch.device], list[_Link]] = OrderedDict()


def _reset_after_fork() -> None:
    global _lock
    _lock = threading.RLock()  # the parent's may be held by a thread that does not exist here


os.register_at_fork(after_in_child=_reset_after_fork)


def plan_for_ptr(ptr: Tensor, num_entries: int, *, op: str) -> Plan:
    """The plan of segments `ptr` `[G + 1]` over `num_entries` entries.

    Raises:
        ValueError: If `ptr` does not start at 0, decreases, or does not end at `num_entries`.
    """
    with _lock, outside_modes(ptr.device):
        ptr = ptr.detach()
        key = (ptr.shape[0], num_entries, ptr.dtype, ptr.device)
        known = _links.setdefault(key, [])
        _links.move_to_end(key)
        for link in known:
            plan = link.plan()
            if plan is not None and torch.equal(link.ptr, ptr):
                return plan
        check_ptr_values(op, ptr, num_entries)
        plan = plan_for_index(segment_groups(ptr, num_entries), ptr.shape[0] - 1, op=op)
        known.insert(0, _Link(ptr.clone(), weakref.ref(plan)))
        del known[_MOST_OF_A_SHAPE:]
        while len(_links) > _MOST_SHAPES:
            _links.popitem(last=False)
        return plan


def check_ptr_values(op: str, ptr: Tensor, num_entries: int) -> None:
    """`ptr` must cut `num_entries` entries into segments."""
    first, last = int(ptr[0]), int(ptr[-1])
    falls = (ptr[1:] < ptr[:-1]).nonzero()
    if falls.numel() > 0:
        position = int(falls[0])
        raise ValueError(
            f"{op}: ptr must not decrease, got {int(ptr[position])} and then "
            f"{int(ptr[position + 1])} at position {position + 1}"
        )
    if first != 0 or last != num_entries:
        raise ValueError(
            f"{op}: ptr must run from 0 to the number of entries, {num_entries}, got {first} to "
            f"{last}"
        )


def segment_groups(ptr: Tensor, num_entries: int) -> Tensor:
    """Group of each entry, `[E]` int64, for any device and traceable."""
    if torch._C._functorch.is_batchedtensor(ptr):  # no batching rule for repeat_interleave
        entries = torch.arange(num_entries, dtype=ptr.dtype, device=ptr.device)
        return (entries.unsqueeze(-1) >= ptr[1:]).sum(-1)
    groups = torch.arange(ptr.shape[0] - 1, device=ptr.device)
    return torch.repeat_interleave(groups, ptr.diff().long(), output_size=num_entries)

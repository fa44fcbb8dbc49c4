"""The report stays small whatever the data, and nothing hangs in a child of fork."""

import contextlib
import os
import threading

import pytest
import torch
from torch_geometric import utils
from torch_geometric.nn import GraphConv, SAGEConv

import edgeweave.pyg
from edgeweave.pyg import _install, _report, _state


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")
def test_reasons_do_not_hold_sizes_or_values():
    layer, weighted = SAGEConv(4, 4), GraphConv(4, 4)
    with edgeweave.pyg.accelerated():
        for n in range(3, 8):
            bad = torch.tensor([[0, 1], [1, n + 50]])
            calls = [
                lambda n=n, bad=bad: layer(torch.rand(n, 4), bad),
                lambda n=n: layer(torch.rand(n, 4), torch.zeros(3, n, dtype=torch.long)),
                lambda n=n: layer(torch.rand(n, 4), torch.zeros(2, 2).long(), size=(n + 1, n + 1)),
                lambda n=n: weighted(torch.rand(n, 4), torch.zeros(2, 2).long(), torch.rand(n, 2)),
                lambda n=n: utils.scatter(torch.rand(3, 2), torch.tensor([0, 1, n]), 0, 2),
                lambda n=n: utils.scatter(torch.rand(3, 2), torch.zeros(3).long(), n),
                lambda n=n: utils.spmm(torch.eye(n).to_sparse_csr(), torch.rand(n + 1, 2)),
            ]
            for call in calls:
                with contextlib.suppress(Exception):  # Stock's own errors, of several kinds.
                    call()
    sites = edgeweave.pyg.report().sites
    assert {site.site for site in sites} >= {"SAGEConv", "GraphConv", "utils.scatter", "utils.spmm"}
    for site in sites:
        for reason, count in site.reasons.items():
            assert count % 5 == 0, f"{site.site}: {reason} was counted {count} times"


def test_reasons_are_bounded():
    for n in range(100):
        _report.record_fallback("Some", f"reason {n}")
    _report.record_fallback("Some", "reason 0")
    entry = edgeweave.pyg.report()["Some"]
    assert len(entry.reasons) == _report.MAX_REASONS + 1
    assert entry.reasons["reason 0"] == 2
    assert entry.reasons[_report.OTHER_REASONS] == 100 - _report.MAX_REASONS
    assert entry.fell_back == 101


# Python 3.12 warns of what this test is about.
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_child_of_fork_does_not_wait_for_threads_it_does_not_have():
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with _state._lock, _install._lock, _report._lock:
            held.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    try:
        child = os.fork()
        if child == 0:
            free = all(
                lock.acquire(blocking=False)
                for lock in (_state._lock, _install._lock, _report._lock)
            )
            os._exit(0 if free else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        done.set()
        thread.join()

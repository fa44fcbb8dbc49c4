"""Forked workers: the cache, its lock and torch's threads survive a fork."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")

LOADER = """
import torch
from torch.utils.data import DataLoader, Dataset
from edgeweave import scatter, sparse


def make(seed):
    generator = torch.Generator().manual_seed(seed)
    edges = torch.randint(0, 20, (2, 5000), generator=generator)
    return edges, torch.randint(-9, 10, (20, 3), generator=generator).float()


SHARED = make(99)


class Graphs(Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, item):
        edges, x = make(item)
        own = sparse.mm(edges, x)
        shared = sparse.mm(*SHARED, "amax")
        reduced = scatter.scatter_reduce(x[edges[0]], edges[1], dim_size=20)
        return own, shared, reduced


if __name__ == "__main__":
    torch.set_num_threads(2)
    # The parent has used its thread pool and its cache, so the children inherit both.
    leaf = SHARED[1].clone().requires_grad_()
    sparse.mm(SHARED[0], leaf).sum().backward()
    largest = sparse.mm(*SHARED, "amax")
    seen = 0
    for item, (own, shared, reduced) in enumerate(
        DataLoader(Graphs(), batch_size=None, num_workers=1, timeout=30,
                   multiprocessing_context="fork")
    ):
        edges, x = make(item)
        expected = torch.zeros(20, 3).index_add_(0, edges[1], x[edges[0]])
        assert torch.equal(own, expected), item
        assert torch.equal(reduced, expected), item
        assert torch.equal(shared, largest), item
        seen += 1
    assert seen == 6
    assert torch.equal(sparse.mm(*SHARED, "amax"), largest)
    print("loaded", seen)
"""


def test_data_loader_worker(run_python, tmp_path):
    script = tmp_path / "loader.py"
    script.write_text(LOADER)
    done = run_python(script=str(script))
    assert "loaded 6" in done.stdout


LOCKED = """
import os, signal, threading, time, torch
from edgeweave import sparse

torch.set_num_threads(1)
x = torch.randint(-9, 10, (20, 3)).float()
stop = threading.Event()


def busy(seed):
    generator = torch.Generator().manual_seed(seed)
    while not stop.is_set():
        sparse.mm(torch.randint(0, 20, (2, 20_000), generator=generator), x)


threads = [threading.Thread(target=busy, args=(seed,), daemon=True) for seed in range(3)]
for thread in threads:
    thread.start()
time.sleep(0.2)
edges = torch.randint(0, 20, (2, 300))
expected = torch.zeros(20, 3).index_add_(0, edges[1], x[edges[0]])
failures = []
for attempt in range(20):
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # a child that waits for a lock which nobody holds any more
        good = torch.equal(sparse.mm(edges, x), expected)
        good = good and torch.equal(sparse.mm(edges.clone(), x), expected)
        sparse.cache_clear()
        good = good and sparse.cache_info().entries == 0
        os._exit(0 if good else 3)
    status = os.waitpid(child, 0)[1]
    if status != 0:
        failures.append((attempt, status))
    if len(failures) == 2:
        break
stop.set()
for thread in threads:
    thread.join()
assert not failures, failures
print("forked 20")
"""


def test_fork_while_other_threads_hold_the_lock(run_python):
    done = run_python(LOCKED)
    assert "forked 20" in done.stdout

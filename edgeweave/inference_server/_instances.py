"""Threads that run models: each with its own number of torch threads and its own processors."""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["Instance"]


class Instance:
    """One thread that runs one job at a time and reports to the event loop.

    Args:
        name: Of the thread.
        threads: Torch threads of a job.
        cpus: Processors it is bound to; none to leave it unbound.
    """

    def __init__(self, name: str, threads: int, cpus: Sequence[int] = ()) -> None:
        self.threads = threads
        self.cpus = tuple(cpus)
        self._jobs: queue.SimpleQueue[
            tuple[asyncio.AbstractEventLoop, Callable[[], Any], Callable[[Any], None]] | None
        ] = queue.SimpleQueue()
        # A daemon: a model that never returns must not keep the process from ending.
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def submit(
        self,
        loop: asyncio.AbstractEventLoop,
        job: Callable[[], Any],
        done: Callable[[Any], None],
    ) -> None:
        """Run `job` in the thread, then `done` with its result in the loop.

        `job` must not raise: a batch's failure is part of its result.
        """
        self._jobs.put((loop, job, done))

    def stop(self) -> None:
        """Let the thread end after the job it runs."""
        self._jobs.put(None)

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread's end; return whether it came."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _main(self) -> None:
        if self.cpus:
            # 0 is the calling thread; the threads that OpenMP starts for it inherit the mask.
            os.sched_setaffinity(0, self.cpus)
        # OpenMP keeps the number per thread that starts parallel regions. A thread's first look at
        # it takes over the process-wide one, so look before setting, or another model's wins.
        torch.get_num_threads()
        torch.set_num_threads(self.threads)
        with torch.inference_mode():
            while True:
                task = self._jobs.get()
                if task is None:
                    return
                loop, job, done = task
                outcome = job()
                # Or the last batch would stay in memory until the next one comes.
                del task, job
                if loop.is_closed():  # the server gave up waiting for this job
                    return
                loop.call_soon_threadsafe(done, outcome)
                del outcome, done

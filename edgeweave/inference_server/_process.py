"""One serving process: signals, `--check`, and the switches of the interpreter."""

from __future__ import annotations

import asyncio
import ctypes
import dataclasses
import gc
import logging
import os
import signal
import sys
from typing import Final

from ._client import AsyncClient
from ._server import InferenceServer
from ._settings import ServerSettings

__all__ = ["check", "end_with_parent", "serve"]

_log = logging.getLogger("edgeweave.server")
# A model's thread that comes back from torch, as it does after every operator, waits for the
# interpreter lock until the event loop lets go of it. The default of 5 ms is longer than most
# models run, and even a tenth of that, operator by operator, than a small one does.
_SWITCH_INTERVAL_S: Final = 0.00005
_PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h


def end_with_parent() -> None:
    """Have the kernel send SIGTERM to this process when its parent dies, however it does (Linux).

    A worker whose parent is gone would keep the port, and nobody would watch over it.
    """
    if sys.platform.startswith("linux"):
        parent = os.getppid()
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it died before the kernel was asked
            os.kill(os.getpid(), signal.SIGTERM)


def serve(settings: ServerSettings) -> int:
    """Serve until SIGTERM or SIGINT, then drain; a second signal ends at once.

    Args:
        settings: How to serve.

    Returns:
        0, or 1 if requests were still running after `drain_s`.

    Raises:
        ModelConfigError: A setting is wrong.
    """
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    finished = asyncio.run(_serve(settings))
    if not finished:
        # A model is still running in a daemon thread; the interpreter must not wait for it.
        logging.shutdown()
        os._exit(1)
    return 0


async def _serve(settings: ServerSettings) -> bool:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if stopping.is_set():
            _log.warning("ended by a second signal")
            logging.shutdown()
            os._exit(1)
        stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    server = InferenceServer(settings)
    starting = asyncio.ensure_future(server.start())
    asked_to_stop = asyncio.ensure_future(stopping.wait())
    await asyncio.wait({starting, asked_to_stop}, return_when=asyncio.FIRST_COMPLETED)
    if starting.done():
        # Raises what start raised.
        starting.result()
        # torch and the models are there for good: a full collection that looks at them all would
        # halt requests for half a second.
        gc.collect()
        gc.freeze()
        await asked_to_stop
        return await server.stop()
    starting.cancel()
    await server.stop()
    # Whatever is loading or compiling has no requests; nobody waits for it.
    logging.shutdown()
    os._exit(0)


def check(settings: ServerSettings) -> dict[str, str]:
    """Load every model, listen, ask over the wire, end.

    Args:
        settings: How to serve; the ports are replaced by free ones of this machine.

    Returns:
        What is wrong, by model name; empty if all is well. What concerns the server itself is
        under "".

    Raises:
        ModelConfigError: A setting is wrong.
    """
    # The client below would need the server's name and a certificate for TLS.
    local = dataclasses.replace(
        settings, host="127.0.0.1", port=0, metrics_port=None, tls=None, token_file=None, workers=1
    )
    return asyncio.run(_check(local))


async def _check(settings: ServerSettings) -> dict[str, str]:
    server = InferenceServer(settings)
    await server.start()
    try:
        problems = dict(server.failures)
        async with AsyncClient(f"127.0.0.1:{server.port}") as client:
            for name, version, _ in server.registry.entries():
                if name not in problems and not await client.model_ready(name, version):
                    problems[name] = f"version {version} does not answer"
            if not problems and next(server.registry.entries(), None) is None:
                folder = settings.model_repository
                problems[""] = f"no model in {folder}: it must hold NAME/VERSION/ folders"
            if not problems and not await client.server_ready():
                problems[""] = "server does not become ready"
        return problems
    finally:
        await server.stop()

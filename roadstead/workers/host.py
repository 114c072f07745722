"""One worker process: connect, poll, give signs of life, stop in a bounded time.

Owns: the process's signal handlers, its Temporal client, its pulse, its metrics, its exit code. Never touches: what
activities do.
Invariant: SIGTERM and SIGINT are acted on at once, and the process is gone _HARD_S later whatever hangs: the SDK's
own grace does not bound a shutdown (a blocked thread waits for ever), so a watchdog thread ends the process.
A crash leaves: activities that Temporal gives to somebody else after their heartbeat timeout; a pulse file that stands
still.
Exit codes: 0 stopped in order, 75 killed by the watchdog (try again), 1 failed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from pathlib import Path

import structlog
from temporalio.client import Client, Interceptor
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.runtime import Runtime
from temporalio.worker import Worker

from roadstead.config import RunConfig, load
from roadstead.metrics import catalogue
from roadstead.metrics.registry import Metrics
from roadstead.workers.measured import Measured, begin
from roadstead.workers.telemetry import shown

GRACE = timedelta(seconds=3)
"""What running activities get to notice that the worker is stopping; they are all safe to interrupt."""
_HARD_S = 10.0
_PULSE_S = 1.0
_CONNECT_S = 30.0
STICKY = timedelta(seconds=2)
"""How long a workflow task waits for a dead worker's cache: 2 s instead of 10 s halves recovery (measured)."""

log = structlog.get_logger()


async def connect(
    address: str, namespace: str, *, interceptors: Sequence[Interceptor] = (), runtime: Runtime | None = None
) -> Client:
    """A client that carries our messages. Raises TimeoutError that names the address.

    interceptors: of the client, and of the workers on it. runtime: None is the SDK's default one.
    """
    deadline = time.monotonic() + _CONNECT_S
    while True:
        try:
            return await Client.connect(
                address,
                namespace=namespace,
                data_converter=pydantic_data_converter,
                interceptors=interceptors,
                runtime=runtime,
            )
        except RuntimeError as error:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"temporal.address: no Temporal at {address} after {_CONNECT_S:.0f} s ({error}); "
                    "start it (`roadstead up`) or correct the address"
                ) from error
            await asyncio.sleep(0.2)


MakeWorkers = Callable[
    [RunConfig, Client, Path, Metrics], Awaitable[tuple[Sequence[Worker], Sequence[Awaitable[None]]]]
]
"""From configuration, client, this machine's folder of the run and the process's metrics to a role's workers and what
runs beside them."""


def pulse_file(folder: Path, role: str) -> Path:
    """Touched every _PULSE_S by the role's event loop: one that stands still belongs to a hung worker."""
    return folder / "pulse" / role


def main(role: str, make: MakeWorkers) -> None:
    parser = argparse.ArgumentParser(prog=f"roadstead.workers.{role}", description=f"Roadstead's {role} worker.")
    parser.add_argument("--config", type=Path, required=True, help="the run's YAML, addresses filled in")
    parser.add_argument("--folder", type=Path, required=True, help="this machine's folder of the run")
    arguments = parser.parse_args()
    asyncio.run(_serve(role, load(arguments.config), arguments.folder.resolve(), make))
    # Native threads of the SDK outlive the loop and crash the interpreter's own shutdown now and then ("PyGILState
    # _Release", exit 134); everything is stopped and flushed, so leave without it.
    sys.stdout.flush()
    os._exit(0)


async def _serve(role: str, config: RunConfig, folder: Path, make: MakeWorkers) -> None:
    stop = asyncio.Event()
    watchdog = _Watchdog(role)
    loop = asyncio.get_running_loop()

    def terminate(*_: object) -> None:
        watchdog.arm()
        loop.call_soon_threadsafe(stop.set)

    for number in (signal.SIGTERM, signal.SIGINT):
        # Not the loop's own handlers: those wait for the loop, and a loop that hangs is what must be ended in time.
        signal.signal(number, terminate)
    assert config.temporal.address is not None, "filled in by whoever starts the role"
    metrics = Metrics(role)
    async with contextlib.AsyncExitStack() as stack:
        runtime = stack.enter_context(shown(config, folder, metrics))
        client = await connect(
            config.temporal.address, config.temporal.namespace, interceptors=[Measured(metrics)], runtime=runtime
        )
        workers, beside = await make(config, client, folder, metrics)
        log.info("worker up", role=role, run=config.name, pid=os.getpid())
        for worker in workers:
            begin(metrics, worker)
            await stack.enter_async_context(worker)
        companions = [asyncio.ensure_future(c) for c in (*beside, _pulse(pulse_file(folder, role), metrics))]
        stopping = asyncio.ensure_future(stop.wait())
        done, _ = await asyncio.wait([stopping, *companions], return_when=asyncio.FIRST_COMPLETED)
        watchdog.arm()  # what follows is cleaning up, whatever began it
        for companion in companions:
            companion.cancel()
        for task in done - {stopping}:
            await task  # a companion never ends by itself: raise what ended it
    log.info("worker stopped", role=role)


async def _pulse(file: Path, metrics: Metrics) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    while True:
        file.touch()
        metrics.set(catalogue.PULSE, time.time())
        await asyncio.sleep(_PULSE_S)


class _Watchdog:
    """Ends the process _HARD_S after it was armed."""

    def __init__(self, role: str) -> None:
        self._role, self._armed = role, False

    def arm(self) -> None:
        if not self._armed:
            self._armed = True
            threading.Thread(target=self._kill, daemon=True).start()

    def _kill(self) -> None:
        time.sleep(_HARD_S)
        log.error("worker did not stop in time, exiting", role=self._role, after_s=_HARD_S)
        os._exit(75)

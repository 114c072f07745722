"""A run on this machine: local servers where the configuration leaves them open, and the run's processes.

Owns: the order in which parts come up and go down. Never touches: what they do.
Invariant: when the session ends (finished, failed, Ctrl-C, SIGTERM), nothing that it started is left.
A crash leaves: a durable run; `roadstead resume` brings the processes back and it goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from roadstead.cli import begin
from roadstead.cli.begin import CannotBegin, RunWorkflow
from roadstead.config import RunConfig
from roadstead.infra import roles
from roadstead.infra.ports import remembered_ports
from roadstead.infra.processes import Supervisor
from roadstead.infra.s3_server import credentials
from roadstead.infra.stack import stack
from roadstead.storage.keys import RunKeys
from roadstead.storage.objects import ObjectStore
from roadstead.storage.open import open_run
from roadstead.workers.host import connect

Report = Callable[[str], None]
T = TypeVar("T")


class Interrupted(Exception):
    """Ctrl-C or SIGTERM."""


@dataclass
class Session:
    store: ObjectStore
    keys: RunKeys
    workflow: RunWorkflow
    temporal_ui: str | None
    logs: Path
    _supervisors: list[Supervisor]

    async def while_up(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work` while the processes are watched. Raises ProcessFailed when one can't be kept alive."""
        task = asyncio.ensure_future(work)
        watches = [asyncio.ensure_future(s.watch()) for s in self._supervisors]
        try:
            await asyncio.wait([task, *watches], return_when=asyncio.FIRST_COMPLETED)
            for watch in watches:
                if watch.done():
                    await watch
            return await task
        finally:
            for other in (task, *watches):
                other.cancel()


def given_config(data: Path, name: str) -> Path:
    """A run's configuration as its user gave it, addresses left open: what `resume` starts from."""
    return data / "runs" / name / "given.yaml"


@contextlib.asynccontextmanager
async def local_store(data: Path, report: Report) -> AsyncIterator[str]:
    """Endpoint of the data directory's S3, up for the block; its credentials in our environment."""
    async with stack(data, report) as (endpoints, _):
        os.environ.update(credentials(data).environment)
        yield endpoints.s3


@contextlib.asynccontextmanager
async def session(config: RunConfig, data: Path, report: Report) -> AsyncIterator[Session]:
    """Bring everything of a run up. Inputs are checked before anything is started."""
    checked = begin.check_inputs(config)
    given = given_config(data, config.name)
    given.parent.mkdir(parents=True, exist_ok=True)
    async with contextlib.AsyncExitStack() as cleanup:
        cleanup.enter_context(_drive(given.parent))
        given.write_text(config.dump())
        supervisors: list[Supervisor] = []
        ui = None
        if config.storage.endpoint_url is None or config.temporal.address is None:
            endpoints, servers = await cleanup.enter_async_context(stack(data, report))
            supervisors += [servers] if servers else []
            ui = endpoints.temporal_ui
            if config.storage.endpoint_url is None:
                os.environ.update(credentials(data).environment)
            config = endpoints.applied_to(config)
        folder = given.parent
        logs = data / "logs" / config.name
        config = _with_port(config, data)
        config_file = folder / "config.yaml"
        config_file.write_text(config.dump())

        store, keys = open_run(config)
        await asyncio.to_thread(store.probe)
        report("recording the run: weights of version 0, run.json")
        await asyncio.to_thread(begin.record_run, config, checked, store, keys)
        assert config.temporal.address is not None, "filled in above"
        client = await connect(config.temporal.address, config.temporal.namespace)
        await begin.is_running(config, client, store, keys)  # refused before the slow parts start

        processes = Supervisor(report)
        cleanup.push_async_callback(processes.stop)
        await processes.start(
            *roles.engine_and_trainer(config, config_file, folder, logs),
            *roles.workers(config, config_file, folder, logs),
        )
        workflow, new = await begin.start_or_attach(config, client, store, keys)
        report(f"run {config.name} {'begun' if new else 'goes on'}")
        yield Session(
            store=store,
            keys=keys,
            workflow=workflow,
            temporal_ui=ui,
            logs=logs,
            _supervisors=[*supervisors, processes],
        )


def run_interruptible(main: Coroutine[Any, Any, T]) -> T:
    """asyncio.run that turns SIGINT and SIGTERM into a cancellation, so that every block cleans up.

    Raises Interrupted. A second signal while it cleans up changes nothing: the clean-up is bounded.
    """
    interrupted = False

    async def guarded() -> T:
        nonlocal interrupted
        task = asyncio.current_task()
        assert task is not None

        def on_signal() -> None:
            nonlocal interrupted
            if not interrupted:
                interrupted = True
                task.cancel()

        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, on_signal)
        return await main

    try:
        return asyncio.run(guarded())
    except asyncio.CancelledError as error:
        if interrupted:
            raise Interrupted from error
        raise


@contextlib.contextmanager
def _drive(folder: Path) -> Iterator[None]:
    """Be the only one on this machine that hosts the run: a second ledger worker or engine would be one too many."""
    with (folder / "lock").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise CannotBegin(
                f"run {folder.name!r} is hosted by process {lock.read().strip()} already; follow it with "
                f"`roadstead status {folder.name}`, or stop that process first"
            ) from None
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        yield


def _with_port(config: RunConfig, data: Path) -> RunConfig:
    if config.engine.port:
        return config
    port = remembered_ports(data / "ports.json", ["engine"])["engine"]
    return config.model_copy(update={"engine": config.engine.model_copy(update={"port": port})})

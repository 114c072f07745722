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

from temporalio.client import WorkflowExecutionStatus
from tenacity import retry, retry_if_exception_type, stop_after_delay, wait_fixed

from roadstead.cli import begin
from roadstead.cli.begin import CannotBegin, RunWorkflow
from roadstead.cli.hosting import hosting
from roadstead.config import RunConfig
from roadstead.infra import roles
from roadstead.infra.ports import remembered_row
from roadstead.infra.processes import Supervisor
from roadstead.infra.s3_server import credentials
from roadstead.infra.stack import stack
from roadstead.metrics.server import TEMPORAL, target
from roadstead.storage import evals, steps
from roadstead.storage.keys import RunKeys
from roadstead.storage.objects import ObjectStore
from roadstead.storage.open import open_run
from roadstead.storage.recovery import Recovered
from roadstead.workers.host import connect
from roadstead.workflows.messages import RunStatus

Report = Callable[[str], None]
T = TypeVar("T")


class Interrupted(Exception):
    """Ctrl-C or SIGTERM."""


@dataclass
class Session:
    store: ObjectStore
    keys: RunKeys
    workflow: RunWorkflow | None
    """None: there is nothing left to do."""
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


@dataclass(frozen=True)
class Resume:
    """The run exists already. allowed: keys of its configuration that may differ from what it was."""

    allowed: tuple[str, ...] = ()


@contextlib.asynccontextmanager
async def session(
    config: RunConfig, data: Path, report: Report, resume: Resume | None = None
) -> AsyncIterator[Session]:
    """Bring everything of a run up. Inputs are checked first; a run that has all its steps brings nothing up."""
    checked = begin.check_inputs(config, recorded=resume is not None)
    given = given_config(data, config.name)
    given.parent.mkdir(parents=True, exist_ok=True)
    async with contextlib.AsyncExitStack() as cleanup:
        cleanup.enter_context(_drive(given.parent))
        supervisors: list[Supervisor] = []
        ui = None
        as_given = config
        if config.storage.endpoint_url is None or config.temporal.address is None:
            endpoints, servers = await cleanup.enter_async_context(stack(data, report))
            supervisors += [servers] if servers else []
            ui = endpoints.temporal_ui
            if config.storage.endpoint_url is None:
                os.environ.update(credentials(data).environment)
            if config.temporal.address is None and config.metrics.enabled:
                labels = {"run": config.name, "role": "temporal-server"}
                cleanup.enter_context(
                    target(given.parent, labels["role"], endpoints.temporal_metrics, TEMPORAL, labels)
                )
            config = endpoints.applied_to(config)
        folder = given.parent
        logs = data / "logs" / config.name
        config = _with_ports(config, data)
        store, keys = open_run(config)
        await asyncio.to_thread(store.probe)
        assert config.temporal.address is not None, "filled in above"
        client = await connect(config.temporal.address, config.temporal.namespace)
        running = await begin.state_of(config, client) == WorkflowExecutionStatus.RUNNING
        why = "begun"
        if resume is None:
            report("recording the run: weights of version 0, run.json")
            await asyncio.to_thread(begin.record_run, config, checked, store, keys)
            await begin.refuse_ended(config, client, store, keys)  # before the slow parts start
        else:
            changed = await asyncio.to_thread(
                begin.check_resume, config, checked.dataset_digest, resume.allowed, store, keys
            )
            why = "resumed" + (f" with other {', '.join(changed)}" if changed else "")
            if running and changed:
                raise CannotBegin(
                    f"run {config.name!r} still goes on in Temporal with the configuration it has; `roadstead stop "
                    f"{config.name}` it first, then resume it with another {', '.join(changed)}"
                )
            done = await asyncio.to_thread(steps.count, store, keys)
            # A run that was killed in its last evaluation has all its steps and still something to do.
            evaluated = config.evaluation is None or await asyncio.to_thread(evals.is_closed, store, keys, done)
            if not running and done >= config.training.steps and evaluated:
                report(f"run {config.name} has its {done} steps: nothing to do")
                yield Session(store, keys, None, ui, logs, supervisors)
                return
        await cleanup.enter_async_context(hosting(store, keys, report))
        # Kept only now: a configuration that was refused is not what the run has.
        given.write_text(as_given.dump())
        config_file = folder / "config.yaml"
        config_file.write_text(config.dump())

        processes = Supervisor(report)
        cleanup.push_async_callback(processes.stop)
        await processes.start(
            *roles.engines_and_trainer(config, config_file, folder, logs),
            *roles.workers(config, config_file, folder, logs),
        )
        workflow: RunWorkflow = client.get_workflow_handle(config.name, result_type=RunStatus)
        if running:
            report(f"run {config.name} goes on")
        else:
            workflow, found = await begin.begin(config, client, store, keys, why)
            report(_began(config.name, found))
        yield Session(
            store=store,
            keys=keys,
            workflow=workflow,
            temporal_ui=ui,
            logs=logs,
            _supervisors=[*supervisors, processes],
        )


def _began(name: str, found: Recovered) -> str:
    if found.attempt == 0:
        return f"run {name} begun"
    pending = f", the committed batch of step {found.version} first" if found.pending else ""
    return (
        f"run {name} goes on from S3 as attempt {found.attempt + 1}: version {found.version}{pending}, "
        f"{len(found.staged)} finished groups adopted or judged, {len(found.backlog)} to generate again"
    )


class Signals:
    """SIGINT cancels at once. SIGTERM asks `orderly`, if there is one by then, and cancels the second time."""

    def __init__(self) -> None:
        self.orderly: Callable[[], Coroutine[Any, Any, None]] | None = None


def run_interruptible(main: Coroutine[Any, Any, T], signals: Signals | None = None) -> T:
    """asyncio.run that turns signals into a cancellation, so that every block cleans up.

    Raises Interrupted. Another signal while it cleans up changes nothing: the clean-up is bounded.
    """
    interrupted = False

    async def guarded() -> T:
        nonlocal interrupted
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        stopping: list[asyncio.Task[None]] = []

        def cancel() -> None:
            nonlocal interrupted
            if not interrupted:
                interrupted = True
                task.cancel()

        async def in_order(orderly: Callable[[], Coroutine[Any, Any, None]]) -> None:
            try:
                await orderly()
            except Exception:  # whatever keeps it from stopping in order, it stops
                cancel()

        def terminate() -> None:
            if signals is None or signals.orderly is None or stopping:
                cancel()
            else:
                stopping.append(asyncio.create_task(in_order(signals.orderly)))

        loop.add_signal_handler(signal.SIGINT, cancel)
        loop.add_signal_handler(signal.SIGTERM, terminate)
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
            _lock(lock.fileno())
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


@retry(retry=retry_if_exception_type(BlockingIOError), wait=wait_fixed(0.1), stop=stop_after_delay(0.5), reraise=True)
def _lock(descriptor: int) -> None:
    """A few tries: somebody who only looks (`host_of`) holds it for an instant."""
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def host_of(folder: Path) -> int | None:
    """The process on this machine that hosts the run of that folder, or None."""
    try:
        lock = (folder / "lock").open("r")
    except FileNotFoundError:
        return None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return int(lock.read().strip() or 0) or None
        return None


def _with_ports(config: RunConfig, data: Path) -> RunConfig:
    """`engine.port` filled in; the other replicas listen on the ports after it."""
    if config.engine.port or config.engine.urls:
        return config
    names = ["engine", *(f"engine-{i}" for i in range(1, config.engine.replicas))]
    port = remembered_row(data / "ports.json", names)["engine"]
    return config.model_copy(update={"engine": config.engine.model_copy(update={"port": port})})

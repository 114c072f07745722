"""How a command gets at a run from outside: its store, started for as long as it is needed, or its live workflow.

Invariant: data of a finished run is never out of reach, whether or not `roadstead up` runs.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from temporalio.client import Client, WorkflowExecutionStatus
from temporalio.service import RPCError

from roadstead.cli.begin import CannotBegin, RunWorkflow
from roadstead.cli.session import given_config, local_store, run_interruptible
from roadstead.config import RunConfig, StorageSection, TemporalSection, load, parse
from roadstead.infra.stack import data_directory, endpoints
from roadstead.storage import runs
from roadstead.storage.keys import RunKeys
from roadstead.storage.objects import ObjectMissing, ObjectStore, StoreAddress
from roadstead.workers.host import connect
from roadstead.workflows.messages import RunStatus

T = TypeVar("T")


def with_run(name: str, data: Path | None, read: Callable[[ObjectStore, RunKeys], T]) -> T:
    """Call `read` with the store and keys of run `name`. Raises ObjectMissing with the known names."""

    async def main() -> T:
        async with storage_of(name, data) as storage:
            store = ObjectStore(StoreAddress(storage.bucket, storage.endpoint_url, storage.region))
            keys = RunKeys(storage.prefix, name)
            return await asyncio.to_thread(_read, store, keys, read)

    return run_interruptible(main())


@contextlib.asynccontextmanager
async def storage_of(name: str, data: Path | None) -> AsyncIterator[StorageSection]:
    """Where the run's objects are, its endpoint filled in: the local server is up for the length of the block."""
    where = data_directory(data)
    file = given_config(where, name)
    storage = load(file).storage if file.exists() else StorageSection()
    async with contextlib.AsyncExitStack() as cleanup:
        if storage.endpoint_url is None:
            endpoint = await cleanup.enter_async_context(local_store(where, tell))
            storage = storage.model_copy(update={"endpoint_url": endpoint})
        yield storage


def tell(line: str) -> None:
    """Progress goes to stderr: stdout may be somebody's JSON."""
    Console(stderr=True, style="dim", highlight=False).print(line, soft_wrap=True)


def _read(store: ObjectStore, keys: RunKeys, read: Callable[[ObjectStore, RunKeys], T]) -> T:
    if not store.exists(keys.run):
        known = store.folders(f"{keys.prefix}/")
        raise ObjectMissing(
            f"run {keys.run_id!r}: not in {store.url(keys.prefix)}; "
            + (f"known runs: {', '.join(known[-10:])}" if known else "there is no run yet")
        )
    runs.read(store, keys)
    return read(store, keys)


def recorded_config(store: ObjectStore, keys: RunKeys) -> RunConfig:
    """The run's configuration as its last attempt had it: addresses are this machine's own."""
    return parse(runs.current_config(store, keys), store.url(keys.run))


@contextlib.asynccontextmanager
async def live_run(name: str, data: Path | None) -> AsyncIterator[tuple[Client, RunWorkflow]]:
    """The run's workflow, which must be running. Raises CannotBegin when it is not."""
    where = data_directory(data)
    file, up = given_config(where, name), endpoints(where)
    temporal = load(file).temporal if file.exists() else TemporalSection()
    address = temporal.address or (up.temporal if up else None)
    if address is None:
        raise CannotBegin(f"run {name!r}: no stack is up in {where}, so nothing of it runs there; give its --data")
    client = await connect(address, temporal.namespace)
    workflow: RunWorkflow = client.get_workflow_handle(name, result_type=RunStatus)
    try:
        status = (await workflow.describe()).status
    except RPCError as error:
        raise CannotBegin(f"run {name!r}: not known to Temporal at {address} ({error.message})") from error
    if status != WorkflowExecutionStatus.RUNNING:
        state = status.name.lower() if status else "unknown"
        raise CannotBegin(f"run {name!r} is not running: it is {state}; see `roadstead status {name}`")
    yield client, workflow

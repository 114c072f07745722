"""How a command that only reads gets at a run's store: the local one is started for as long as it is needed.

Invariant: data of a finished run is never out of reach, whether or not `roadstead up` runs.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from roadstead.cli.session import given_config, local_store, run_interruptible
from roadstead.config import StorageSection, load
from roadstead.infra.stack import data_directory
from roadstead.storage import runs
from roadstead.storage.keys import RunKeys
from roadstead.storage.objects import ObjectMissing, ObjectStore, StoreAddress

T = TypeVar("T")


def with_run(name: str, data: Path | None, read: Callable[[ObjectStore, RunKeys], T]) -> T:
    """Call `read` with the store and keys of run `name`. Raises ObjectMissing with the known names."""
    where = data_directory(data)
    file = given_config(where, name)
    storage = load(file).storage if file.exists() else StorageSection()
    # Progress goes to stderr: stdout may be somebody's JSON.
    console = Console(stderr=True, style="dim", highlight=False)

    def report(line: str) -> None:
        console.print(line, soft_wrap=True)

    async def main() -> T:
        async with contextlib.AsyncExitStack() as cleanup:
            endpoint = storage.endpoint_url
            if endpoint is None:
                endpoint = await cleanup.enter_async_context(local_store(where, report))
            store = ObjectStore(StoreAddress(storage.bucket, endpoint, storage.region))
            keys = RunKeys(storage.prefix, name)
            return await asyncio.to_thread(_read, store, keys, read)

    return run_interruptible(main())


def _read(store: ObjectStore, keys: RunKeys, read: Callable[[ObjectStore, RunKeys], T]) -> T:
    if not store.exists(keys.run):
        known = store.folders(f"{keys.prefix}/")
        raise ObjectMissing(
            f"run {keys.run_id!r}: not in {store.url(keys.prefix)}; "
            + (f"known runs: {', '.join(known[-10:])}" if known else "there is no run yet")
        )
    runs.read(store, keys)
    return read(store, keys)

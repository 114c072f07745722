"""Being the only host of a run, on whatever machine.

Owns: the beat of this process while it hosts a run, and the look at another's. Never touches: the run.
Invariant: two hosts at once are refused, not fenced: fencing (storage/runs.py) is for the one that comes back later.
A crash leaves: a beat that stands still; the next host waits SILENCE_S to be sure, or not at all on the same machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable

from roadstead.cli.begin import CannotBegin
from roadstead.storage import alive
from roadstead.storage.alive import BEAT_S, SILENCE_S, Beat
from roadstead.storage.keys import RunKeys
from roadstead.storage.objects import ObjectStore, StoreError


@contextlib.asynccontextmanager
async def hosting(store: ObjectStore, keys: RunKeys, report: Callable[[str], None]) -> AsyncIterator[None]:
    """Beat for the length of the block. Raises CannotBegin while another host's beat moves."""
    await _alone(store, keys, report)
    mine = Beat(host=socket.gethostname(), pid=os.getpid(), token=secrets.token_hex(8), number=0)
    await asyncio.to_thread(alive.write, store, keys, mine)
    task = asyncio.create_task(_beat(store, keys, mine))
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(StoreError):
            await asyncio.to_thread(alive.write, store, keys, mine.model_copy(update={"ended": True}))


async def _beat(store: ObjectStore, keys: RunKeys, beat: Beat) -> None:
    while True:
        await asyncio.sleep(BEAT_S)
        beat = beat.model_copy(update={"number": beat.number + 1})
        with contextlib.suppress(StoreError):  # a store that is down is noticed by those that need it
            await asyncio.to_thread(alive.write, store, keys, beat)


async def _alone(store: ObjectStore, keys: RunKeys, report: Callable[[str], None]) -> None:
    last = await asyncio.to_thread(alive.read, store, keys)
    # On this machine the lock of the run's folder has spoken: whoever wrote that beat is gone.
    if last is None or last.ended or (last.host == socket.gethostname() and not _runs(last.pid)):
        return
    report(f"waiting up to {SILENCE_S:.0f} s: process {last.pid} on {last.host} hosted {keys.run_id}; is it alive?")
    deadline = time.monotonic() + SILENCE_S
    while time.monotonic() < deadline:
        await asyncio.sleep(1.0)
        now = await asyncio.to_thread(alive.read, store, keys)
        if now is None or now.ended:
            return
        if now != last:
            raise CannotBegin(
                f"run {keys.run_id!r} is alive: process {now.pid} on {now.host} hosts it; stop it there "
                f"(`roadstead stop {keys.run_id}`), or wait until that machine is gone"
            )


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True

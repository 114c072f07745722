"""Trackers beside a worker: one thread each, so that none can stop or delay the run.

Owns: the threads and how long they get at the end. Never touches: the run.
Invariant: the event loop never waits for a tracker, but for _CLOSE_S when the worker stops.
A crash leaves: what the trackers have; the next worker's threads begin behind it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Sequence
from pathlib import Path

import structlog

from roadstead.config import RunConfig
from roadstead.storage.keys import RunKeys
from roadstead.storage.objects import ObjectStore
from roadstead.trackers.follow import Follower
from roadstead.trackers.tracker import check_installed, make_tracker

__all__ = ["check_installed", "trackers"]

_CLOSE_S = 6.0
"""For the last points and the tracker's own end. The worker's watchdog ends the process after 10 s."""

log = structlog.get_logger()


def trackers(config: RunConfig, store: ObjectStore, keys: RunKeys, folder: Path) -> Sequence[Awaitable[None]]:
    """What runs beside the worker for `config.trackers`: nothing when there are none."""
    return [_track(config, store, keys, folder)] if config.trackers else []


async def _track(config: RunConfig, store: ObjectStore, keys: RunKeys, folder: Path) -> None:
    stop = threading.Event()
    threads = []
    for section in config.trackers:
        follower = Follower(section.kind, make_tracker(section, folder), store, keys)
        # Daemons, and not the loop's pool: a request without a deadline must not keep the process.
        threads.append(threading.Thread(target=follower.run, args=(stop,), name=f"tracker-{section.kind}", daemon=True))
    for thread in threads:
        thread.start()
    try:
        await asyncio.Event().wait()
    finally:
        stop.set()
        await _ended(threads)


async def _ended(threads: Sequence[threading.Thread]) -> None:
    deadline = time.monotonic() + _CLOSE_S
    while late := [thread.name for thread in threads if thread.is_alive()]:
        if time.monotonic() > deadline:
            log.warning("tracker not closed in time, its last points may be missing", trackers=late, after_s=_CLOSE_S)
            return
        try:
            await asyncio.sleep(0.05)
        except asyncio.CancelledError:
            continue  # again, by the loop's own end: the deadline stays the one above

"""Heartbeats beside the work.

Owns: the beat of an activity while it waits or blocks. Invariant: a beat comes from a task of its own, so that a
long read or a slow rank never looks like a dead worker, and a cancelled activity stops beating.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any, ParamSpec, TypeVar

from temporalio import activity

P = ParamSpec("P")
T = TypeVar("T")

# Six beats fit into the heartbeat timeout of workflows/options.py (15 s).
_BEAT_S = 2.5


@contextlib.asynccontextmanager
async def beating(details: Callable[[], Any] = lambda: None) -> AsyncIterator[None]:
    """Heartbeat with `details()` until the block ends."""

    async def beat() -> None:
        while True:
            activity.heartbeat(details())
            await asyncio.sleep(_BEAT_S)

    task = asyncio.create_task(beat())
    try:
        yield
    finally:
        task.cancel()


async def in_thread(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run blocking work beside the event loop, beating."""
    async with beating():
        return await asyncio.to_thread(call, *args, **kwargs)

"""Keeps one engine on the newest published weights, or on those that are chosen for it.

Owns: the loop poll -> download -> load -> read back, its deadlines and its alarm, and what is known about the engine's
version.
Never touches: requests, the server process, publication.
Invariant: `version` is what the engine itself reported last, never what it was told; None from the moment an update
leaves it uncertain. A file's digest is checked as it is downloaded, and again by the worker before it touches a weight.
One watcher an engine: two would interleave their updates.
A crash leaves: at most an update broken off half-way, which the next watcher finds (`Engine.attach`) and
repeats.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

import structlog

from roadstead.inference.engine import (
    Engine,
    EngineDown,
    EngineError,
    EngineStalled,
    NotAttached,
    UpdateFailed,
)
from roadstead.inference.folders import remove_old, version_folder
from roadstead.storage import weights
from roadstead.storage.keys import RunKeys
from roadstead.storage.objects import ObjectStore, StoreError

log = structlog.get_logger(__name__)

_LONGEST_BACKOFF_S = 2.0
"""A look at an engine that is away costs nothing, and a restarted one serves nobody until it is noticed (10 s cost as
much as two thirds of its start)."""
_NOT_STARTED = "not started"
_IDLE = "idle"

Choose = Callable[[int | None, int], int | None]
"""(version now, newest published) -> version to serve; None, or the version now: leave it alone. The version now is
None when the engine has none that is certain. One older than now is loaded only into an engine without requests. Runs
in a thread and may ask the store; its errors are those of the round."""
OnStage = Callable[[str, float], None]
"""(stage, seconds), after each stage that went well."""


def newest(current: int | None, published: int) -> int | None:
    """Never back: an engine that was told of an older version than it has keeps its own."""
    return published if current is None or published > current else None


class WeightWatcher:
    """Follows `weights/LATEST` of one run for one engine. Use from the event loop that runs `run`.

    `folder`: where versions are kept on the engine's own disk: its launcher's `--folder`. `stage_timeout_s`:
    deadline in seconds of polling and of a download; the engine bounds its own calls. `choose`: what to load, for those
    who need an engine to stay at a version.
    """

    def __init__(
        self,
        engine: Engine,
        store: ObjectStore,
        keys: RunKeys,
        folder: Path,
        poll_seconds: float,
        stage_timeout_s: float,
        *,
        choose: Choose = newest,
        on_stage: OnStage | None = None,
    ) -> None:
        self._engine = engine
        self._store = store
        self._keys = keys
        self._folder = folder
        self._poll_seconds = poll_seconds
        self._stage_timeout_s = stage_timeout_s
        self._choose = choose
        self._on_stage = on_stage
        self._stalled: EngineStalled | None = None
        self._version: int | None = None
        self._published: int | None = None
        self._attached = False
        self._stage, self._since = _NOT_STARTED, datetime.now(UTC)
        self._changed = asyncio.Condition()

    @property
    def version(self) -> int | None:
        """What the engine reported last; None while it is unknown."""
        return self._version

    @property
    def stage(self) -> str:
        """What the watcher is doing now."""
        return self._stage

    @property
    def since(self) -> datetime:
        """When it began to."""
        return self._since

    @property
    def stalled(self) -> str | None:
        """The stage that passed its deadline last, until a round goes well again."""
        return self._stalled.stage if self._stalled else None

    async def run(self) -> None:
        """Watch until cancelled.

        Failures of the engine, the store and the disk are logged and tried again.
        """
        failures = 0
        while True:
            try:
                await self._round()
                failures, self._stalled = 0, None
                delay = self._poll_seconds
            except (EngineError, StoreError, OSError) as error:
                failures += 1
                delay = min(self._poll_seconds * 2**failures, _LONGEST_BACKOFF_S)
                self._attached = False  # whatever broke off, look at the engine anew
                self._alarm(error, failures, delay)
            self._enter(_IDLE if failures == 0 else f"waiting to retry {self._stage!r}")
            await asyncio.sleep(delay)

    async def at_least(self, version: int, timeout_s: float) -> None:
        """Wait until the engine reports `version` or newer.

        Raises EngineStalled, which says what holds it up.
        """
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: self._version is not None and self._version >= version)
        except TimeoutError as error:
            raise EngineStalled(
                "weight watcher",
                self._stage,
                self._since,
                f"version {version} for {timeout_s:g} s; the engine serves {self._version}, "
                f"published is {self._published}",
            ) from error

    def _alarm(self, error: Exception, failures: int, delay: float) -> None:
        said = {
            "stage": self._stage,
            "since": self._since.isoformat(),
            "serving": self._version,
            "published": self._published,
            "failures": failures,
            "retry_in_s": delay,
            "error": str(error),
            "notes": getattr(error, "__notes__", []),
        }
        if isinstance(error, EngineStalled):
            # Of a load, the part of it that stalled: the engine has deadlines of its own.
            self._stalled = error
            said |= {"stage": error.stage, "since": error.since.isoformat(), "waiting_for": error.waiting_for}
            log.error("weights.stalled", **said)
        else:
            log.warning("weights.failed", **said)

    async def _round(self) -> None:
        current = await self._current()
        async with self._timed("poll", self._stage_timeout_s):
            wanted = await asyncio.to_thread(self._poll, current)
        if wanted is None or wanted == current:
            return
        started = time.monotonic()
        async with self._timed("download", self._stage_timeout_s):
            folder = await asyncio.to_thread(self._download, wanted)
        downloaded = time.monotonic()
        async with self._timed("load"):
            await self._load(folder, wanted)
        loaded = time.monotonic()
        async with self._timed("read back"):
            now = await self._engine.version()
        await self._report(now)
        if now != wanted:
            raise UpdateFailed(f"the engine acknowledged version {wanted} but reads back {now}")
        log.info(
            "weights.loaded",
            version=wanted,
            previous=current,
            download_s=round(downloaded - started, 3),
            load_s=round(loaded - downloaded, 3),
        )
        async with self._timed("clean up", self._stage_timeout_s):
            await asyncio.to_thread(remove_old, self._folder, wanted)

    async def _load(self, folder: Path, version: int) -> None:
        try:
            await self._engine.load_weights(folder, version)
        except EngineError:
            # Refused weights leave the old version; anything else may have left none, and then nobody may use it.
            try:
                now = await self._engine.version()
            except EngineError:
                now = None
            await self._report(now)
            raise

    async def _current(self) -> int | None:
        """The engine's version; None when it must be given one."""
        async with self._timed("attach"):
            try:
                if self._attached:
                    current: int | None = await self._engine.version()
                else:
                    current = await self._engine.attach()
            except NotAttached:  # it was restarted since
                current = await self._engine.attach()
            except (EngineDown, EngineStalled):
                await self._report(None)
                raise
        self._attached = True
        await self._report(current)
        return current

    def _poll(self, current: int | None) -> int | None:
        """In a thread: both may ask the store."""
        self._published = weights.latest_version(self._store, self._keys)
        return None if self._published is None else self._choose(current, self._published)

    def _download(self, version: int) -> Path:
        manifest = weights.manifest_of(self._store, self._keys, version)
        return weights.download(self._store, manifest, version_folder(self._folder, version))

    async def _report(self, version: int | None) -> None:
        async with self._changed:
            self._version = version
            self._changed.notify_all()

    def _enter(self, stage: str) -> None:
        self._stage, self._since = stage, datetime.now(UTC)

    @asynccontextmanager
    async def _timed(self, stage: str, timeout_s: float | None = None) -> AsyncIterator[None]:
        self._enter(stage)
        since, started = self._since, time.monotonic()
        try:
            async with asyncio.timeout(timeout_s):
                yield
        except TimeoutError as error:
            raise EngineStalled("weight watcher", stage, since, f"{timeout_s} s allowed") from error
        if self._on_stage is not None:
            self._on_stage(stage, time.monotonic() - started)

"""The engines of one rollout worker: which of them generates the next group.

Owns: that choice, the queue of those who wait for an engine, and who is ejected since when and why. It runs the weight
watcher of each engine.
Never touches: requests, weights, server processes.
Invariant: an engine is leased only after it has itself reported the asked version or a newer one, and, if a call to it
failed, after its core has answered again. Of those who wait, the oldest admission is served first.
A crash leaves: nothing; leases are of this process, and so is what it knew.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from textwrap import shorten

import structlog

from roadstead.inference.engine import Engine, EngineDown, EngineError, EngineStalled
from roadstead.inference.evaluation_hold import VersionPassed
from roadstead.inference.watcher import WeightWatcher

log = structlog.get_logger(__name__)

_LOOK_S = 0.05
"""How often what the watchers know is looked at: it costs no request, and is late by less than a watcher's own poll."""
_WHY = 120
"""Characters of a failure in what heartbeats carry; the log has it whole, with the server's own words."""


@dataclass(frozen=True)
class Ejection:
    """An engine that gets no new group until its core answers."""

    why: str
    since: datetime


@dataclass
class Replica:
    """One engine. The watcher is of this engine alone, and so is the watcher's folder."""

    engine_id: str
    engine: Engine
    watcher: WeightWatcher
    in_flight: int = 0
    """Groups that have a lease on it."""
    ejected: Ejection | None = field(default_factory=lambda: Ejection("it has not answered yet", datetime.now(UTC)))

    def serves(self, version: int) -> bool:
        reported = self.watcher.version
        return self.ejected is None and reported is not None and reported >= version

    def __str__(self) -> str:
        out = self.ejected
        health = f", ejected since {out.since.isoformat(timespec='seconds')} ({shorten(out.why, _WHY)})" if out else ""
        return f"{self.engine_id}: version {self.watcher.version}, {self.watcher.stage}{health}"


@dataclass(order=True)
class _Lease:
    """Sorts by age: of the admission first, then of the question."""

    version: int
    arrival: int
    granted: asyncio.Future[Replica] = field(compare=False)
    replica: Replica | None = field(default=None, compare=False)
    """Who it counts for. Set with `granted`, but there at once also for a task that is cancelled before it wakes."""


class Fleet:
    """Gives each group the healthy engine with the fewest groups in flight. Use from the event loop that runs `run`.

    The members of a group share a lease, hence an engine: their common prompt is computed once.
    """

    def __init__(self, replicas: Sequence[Replica]) -> None:
        ids = [replica.engine_id for replica in replicas]
        if not ids or len(set(ids)) < len(ids):
            raise ValueError(f"engine ids {ids}: a fleet has at least one engine, and tells its engines apart by id")
        self._replicas = tuple(replicas)
        self._waiting: list[_Lease] = []
        self._arrivals = itertools.count()

    # -- what heartbeats and metrics read -------------------------------------------------------------------

    @property
    def stage(self) -> str:
        """For people: what each engine is at."""
        return "; ".join(str(replica) for replica in self._replicas)

    @property
    def in_flight(self) -> dict[str, int]:
        """Groups being generated, by engine id."""
        return {replica.engine_id: replica.in_flight for replica in self._replicas}

    @property
    def waiting(self) -> int:
        """Groups that no engine can take now."""
        return len(self._waiting)

    @property
    def ejected(self) -> dict[str, Ejection]:
        """By engine id; an engine that has not answered yet is one of them."""
        return {replica.engine_id: replica.ejected for replica in self._replicas if replica.ejected}

    @property
    def versions(self) -> dict[str, int | None]:
        """What each engine reported last, by engine id; None while it is unknown."""
        return {replica.engine_id: replica.watcher.version for replica in self._replicas}

    # -- leases ---------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def lease(self, version: int, timeout_s: float) -> AsyncIterator[Engine]:
        """An engine that reports `version` or newer, for one group.

        EngineDown or EngineStalled out of the block ejects the engine. Raises EngineStalled when there is none for
        `timeout_s`; it says what each engine is at.
        """
        lease = _Lease(version, next(self._arrivals), asyncio.get_running_loop().create_future())
        self._waiting.append(lease)
        self._serve()
        try:
            replica = await self._granted(lease, timeout_s)
            try:
                yield replica.engine
            except (EngineDown, EngineStalled) as error:
                _eject(replica, str(error))
                raise
        finally:
            if lease.replica is None:
                self._waiting.remove(lease)
            else:
                lease.replica.in_flight -= 1

    @asynccontextmanager
    async def lease_exactly(self, version: int, timeout_s: float) -> AsyncIterator[Engine]:
        """The first engine while it reports exactly `version`: for an evaluation, whose hold keeps that engine there.

        Beside the queue: whoever waits in it wants a newer version. Errors out of the block as in `lease`. Raises
        VersionPassed when the engine is past `version`, EngineStalled when it is not there for `timeout_s`.
        """
        replica, since = self._replicas[0], datetime.now(UTC)
        try:
            async with asyncio.timeout(timeout_s):
                while not replica.serves(version):
                    await asyncio.sleep(_LOOK_S)
        except TimeoutError as error:
            what = f"version {version} to evaluate ({timeout_s:g} s allowed); {replica}"
            raise EngineStalled("fleet", "lease", since, what) from error
        if replica.watcher.version != version:
            raise VersionPassed(f"version {version} can't be evaluated any more; {replica}")
        replica.in_flight += 1
        try:
            yield replica.engine
        except (EngineDown, EngineStalled) as error:
            _eject(replica, str(error))
            raise
        finally:
            replica.in_flight -= 1

    async def _granted(self, lease: _Lease, timeout_s: float) -> Replica:
        since = datetime.now(UTC)
        try:
            async with asyncio.timeout(timeout_s):
                return await lease.granted
        except TimeoutError as error:
            raise EngineStalled(
                "fleet",
                "lease",
                since,
                f"an engine at version {lease.version} or newer ({timeout_s:g} s allowed); {self.stage}",
            ) from error

    def _serve(self) -> None:
        """Give everyone who waits an engine, oldest first, while there is one."""
        for lease in sorted(self._waiting):
            ready = [replica for replica in self._replicas if replica.serves(lease.version)]
            if not ready:
                return  # the others want the same version or newer ones
            replica = min(ready, key=lambda r: r.in_flight)
            replica.in_flight += 1
            self._waiting.remove(lease)
            lease.replica = replica
            if not lease.granted.done():  # cancelled, and not yet awake to say so
                lease.granted.set_result(replica)

    # -- health ---------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Watch the engines and serve the queue until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for replica in self._replicas:
                tasks.create_task(replica.watcher.run())
                tasks.create_task(self._mind(replica))

    async def _mind(self, replica: Replica) -> None:
        while True:
            if replica.watcher.version is None:
                if replica.ejected is None:
                    _eject(replica, "its watcher can't tell its version")
            elif replica.ejected is not None:
                await _readmit(replica, replica.ejected)
            self._serve()
            await asyncio.sleep(_LOOK_S)


def _eject(replica: Replica, why: str) -> None:
    before = replica.ejected
    replica.ejected = Ejection(why, before.since if before else datetime.now(UTC))
    if before is None:
        log.warning(
            "engine.ejected",
            engine=replica.engine_id,
            why=why,
            since=replica.ejected.since.isoformat(),
            version=replica.watcher.version,
            stage=replica.watcher.stage,
            in_flight=replica.in_flight,
        )


async def _readmit(replica: Replica, ejection: Ejection) -> None:
    """Ask its core. What the watcher has may be from before the failure, and so prove nothing."""
    try:
        version = await replica.engine.version()
    except EngineError:
        return
    if replica.ejected is ejection:  # no other call has failed meanwhile
        replica.ejected = None
        log.info(
            "engine.returned",
            engine=replica.engine_id,
            why=ejection.why,
            since=ejection.since.isoformat(),
            away_s=round((datetime.now(UTC) - ejection.since).total_seconds(), 3),
            version=version,
        )

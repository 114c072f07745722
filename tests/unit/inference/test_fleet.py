"""The fleet over scripted engines and watchers: who gets which engine, when, and who is out."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from roadstead.inference.engine import BadRequest, EngineDown, EngineError, EngineStalled, NotAttached
from roadstead.inference.fleet import Fleet, Replica
from roadstead.staleness import BufferState, Ledger

WAIT_S = 10.0
NOW = datetime.now(UTC)


class Watcher:
    """What it knows is what the test says."""

    def __init__(self, version: int | None) -> None:
        self.version, self.stage = version, "idle"

    async def run(self) -> None:
        await asyncio.Event().wait()


class Engine:
    """Only its core is ever asked, by `version`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.failure: EngineError | None = None
        self.asked = 0
        self.answers = asyncio.Event()
        self.answers.set()

    async def version(self) -> int:
        self.asked += 1
        failure = self.failure  # of the moment in which it was asked
        await self.answers.wait()
        if failure:
            raise failure
        return 0


class Stand:
    """A fleet of scripted engines e0, e1, ..., all up at the versions given."""

    def __init__(self, *versions: int | None) -> None:
        self.engines = [Engine(f"e{i}") for i in range(len(versions))]
        self.watchers = [Watcher(version) for version in versions]
        parts: Any = zip(self.engines, self.watchers, strict=True)
        self.replicas = [Replica(engine.name, engine, watcher, ejected=None) for engine, watcher in parts]
        self.fleet = Fleet(self.replicas)
        self.held = contextlib.AsyncExitStack()
        self.started: list[int] = []
        """Ids of the groups of `group`, as they got an engine."""

    async def take(self, version: int = 0) -> str:
        """A lease that is kept until `held` closes; the name of its engine."""
        engine: Any = await self.held.enter_async_context(self.fleet.lease(version, WAIT_S))
        return str(engine.name)

    async def group(self, number: int, version: int, hold: asyncio.Event) -> str:
        async with self.fleet.lease(version, WAIT_S) as engine:
            self.started.append(number)
            await hold.wait()
            return str(engine.name)  # type: ignore[attr-defined]

    async def fail(self, error: BaseException, version: int = 0) -> None:
        """A group whose call ends in `error`."""
        with contextlib.suppress(type(error)):
            async with self.fleet.lease(version, WAIT_S):
                raise error

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Fleet]:
        task = asyncio.create_task(self.fleet.run())
        try:
            yield self.fleet
            assert not task.done(), "nothing may end the fleet"
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await self.held.aclose()


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not true():
            await asyncio.sleep(0.005)


# -- the choice -----------------------------------------------------------------------------------------------


async def test_a_group_goes_to_the_engine_with_the_fewest_and_ties_to_the_first() -> None:
    stand = Stand(0, 0, 0)
    async with stand.held:
        assert [await stand.take() for _ in range(5)] == ["e0", "e1", "e2", "e0", "e1"]
        assert stand.fleet.in_flight == {"e0": 2, "e1": 2, "e2": 1}
    assert stand.fleet.in_flight == {"e0": 0, "e1": 0, "e2": 0}


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=40),
)
async def test_no_lease_is_on_a_busier_or_older_engine_than_it_had_to_be(
    versions: list[int], moves: list[tuple[int, int]]
) -> None:
    """moves: a version to lease, and how many of the oldest leases end before."""
    stand, held = Stand(*versions), list[tuple[str, contextlib.AsyncExitStack]]()
    for version, ends in moves:
        for _, lease in held[:ends]:
            await lease.aclose()
        held = held[ends:]
        before = Counter(name for name, _ in held)
        able = [name for name, has in zip(stand.fleet.in_flight, versions, strict=True) if has >= version]
        if not able:
            continue
        lease = contextlib.AsyncExitStack()
        engine: Any = await lease.enter_async_context(stand.fleet.lease(version, WAIT_S))
        assert engine.name == min(able, key=lambda name: before[name])
        held.append((engine.name, lease))
        assert Counter(stand.fleet.in_flight) == Counter(name for name, _ in held)


async def test_an_idle_engine_of_an_older_version_is_no_choice() -> None:
    stand = Stand(3, 4)
    async with stand.held:
        assert [await stand.take(4) for _ in range(3)] == ["e1", "e1", "e1"]
        assert await stand.take(3) == "e0"


# -- the queue ------------------------------------------------------------------------------------------------


async def test_everyone_who_waited_starts_at_once_when_the_version_comes_and_is_spread() -> None:
    """The gate reopens: a version is published, both engines load it, and a whole refill has been waiting."""
    stand, hold = Stand(4, 4), asyncio.Event()
    async with stand.running() as fleet:
        groups = [asyncio.create_task(stand.group(i, 5, hold)) for i in range(12)]
        await until(lambda: fleet.waiting == 12)
        assert stand.started == []
        for watcher in stand.watchers:
            watcher.version = 5
        await until(lambda: fleet.waiting < 12)
        assert (fleet.waiting, fleet.in_flight) == (0, {"e0": 6, "e1": 6}), "all of them, at one look"
        hold.set()
        assert Counter(await asyncio.gather(*groups)) == {"e0": 6, "e1": 6}
    assert stand.started == list(range(12))


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=12), st.lists(st.integers(1, 6), min_size=1, max_size=4))
async def test_those_who_wait_are_served_by_admission_then_arrival_and_none_behind_a_newer_one(
    wanted: list[int], reported: list[int]
) -> None:
    stand, hold = Stand(None), asyncio.Event()
    hold.set()
    groups = [asyncio.create_task(stand.group(i, version, hold)) for i, version in enumerate(wanted)]
    await asyncio.sleep(0)
    expected, newest = list[int](), 0
    for version in [*reported, max(wanted)]:
        newest = max(newest, version)
        stand.watchers[0].version = newest
        stand.fleet._serve()
        ready = sorted((v, i) for i, v in enumerate(wanted) if v <= newest and i not in expected)
        expected += [i for _, i in ready]
        assert stand.fleet.waiting == len(wanted) - len(expected), "whoever can start has started"
        for _ in range(3):
            await asyncio.sleep(0)
    await asyncio.gather(*groups)
    assert stand.started == expected
    assert stand.fleet.in_flight == {"e0": 0}


async def test_a_lower_version_passes_those_who_wait_for_a_higher_one() -> None:
    stand, hold = Stand(3), asyncio.Event()
    async with stand.running() as fleet:
        newer = asyncio.create_task(stand.group(0, 4, hold))
        await until(lambda: fleet.waiting == 1)
        assert await stand.take(3) == "e0"
        assert fleet.waiting == 1 and stand.started == []
        stand.watchers[0].version = 4
        hold.set()
        assert await newer == "e0"


async def test_a_wait_ends_and_says_what_each_engine_is_at() -> None:
    stand = Stand(3, None, 3)
    stand.watchers[0].stage = "load"
    stand.watchers[1].stage = "waiting to retry 'attach'"
    async with stand.running() as fleet:
        await until(lambda: "e1" in fleet.ejected)
        stand.engines[2].failure = EngineDown("connection refused")
        await stand.held.enter_async_context(fleet.lease(0, WAIT_S))  # e0 is the busier one now
        await stand.fail(EngineDown("e2: its core has died"))
        with pytest.raises(EngineStalled) as error:
            async with fleet.lease(7, 0.1):
                pass
        assert fleet.waiting == 0 and fleet.in_flight == {"e0": 1, "e1": 0, "e2": 0}
    said = str(error.value)
    assert "an engine at version 7 or newer (0.1 s allowed)" in said and "since" in said
    assert "e0: version 3, load;" in said
    assert "e1: version None, waiting to retry 'attach', ejected since 2" in said
    assert "e2: version 3, idle, ejected since 2" in said and "(e2: its core has died)" in said


@pytest.mark.parametrize("moment", ["while it waits", "just after it is given an engine", "just before that"])
async def test_who_is_cancelled_holds_nothing(moment: str) -> None:
    stand, hold = Stand(0), asyncio.Event()
    waiting = asyncio.create_task(stand.group(0, 1, hold))
    await asyncio.sleep(0)
    if moment == "just before that":
        waiting.cancel()
    if moment != "while it waits":
        stand.watchers[0].version = 1
        stand.fleet._serve()
        assert stand.fleet.in_flight == {"e0": 1}
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    stand.watchers[0].version = 1
    stand.fleet._serve()
    assert (stand.fleet.waiting, stand.fleet.in_flight, stand.started) == (0, {"e0": 0}, [])


# -- health ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error", [EngineDown("e0: crashed"), NotAttached("e0: label"), EngineStalled("e0", "generate", NOW, "x")]
)
async def test_an_engine_that_failed_a_call_gets_no_group_until_its_core_answers(error: EngineError) -> None:
    """Its watcher still has the version of before: that is no proof of life."""
    stand = Stand(5, 5)
    stand.engines[0].failure = EngineDown("connection refused")
    with capture_logs() as logs:
        async with stand.running() as fleet:
            with pytest.raises(type(error)) as raised:
                async with fleet.lease(5, WAIT_S):
                    raise error
            assert raised.value is error, "the group fails with its engine's own error"
            assert fleet.ejected["e0"].why == str(error)
            since = fleet.ejected["e0"].since
            await until(lambda: stand.engines[0].asked >= 2)
            assert [await stand.take(5) for _ in range(3)] == ["e1", "e1", "e1"]
            assert fleet.ejected["e0"].since == since and fleet.versions == {"e0": 5, "e1": 5}
            stand.engines[0].failure = None
            await until(lambda: not fleet.ejected)
            assert await stand.take(5) == "e0"
    out, back = (line for line in logs if line["event"] in {"engine.ejected", "engine.returned"})
    assert (out["event"], out["engine"], out["why"], out["since"]) == (
        *("engine.ejected", "e0", str(error)),
        since.isoformat(),
    )
    assert (back["event"], back["engine"], back["why"], back["since"]) == (
        *("engine.returned", "e0", str(error)),
        since.isoformat(),
    )


@pytest.mark.parametrize("error", [BadRequest("too long"), ValueError("the environment"), asyncio.CancelledError()])
async def test_what_is_not_the_engines_fault_ejects_nobody(error: BaseException) -> None:
    stand = Stand(0)
    await stand.fail(error)
    assert stand.fleet.ejected == {} and stand.fleet.in_flight == {"e0": 0}


async def test_an_engine_whose_watcher_lost_it_is_out_until_it_is_back() -> None:
    stand = Stand(5, 5)
    with capture_logs() as logs:
        async with stand.running() as fleet:
            stand.watchers[0].version, stand.watchers[0].stage = None, "attach"
            await until(lambda: "e0" in fleet.ejected)
            assert await stand.take(5) == "e1"
            stand.watchers[0].version = 6  # it was started again, from newer weights
            await until(lambda: not fleet.ejected)
            assert await stand.take(6) == "e0"
    assert [line["event"] for line in logs] == ["engine.ejected", "engine.returned"]


async def test_an_engine_that_comes_back_with_older_weights_serves_only_what_it_has() -> None:
    stand = Stand(5, 5)
    async with stand.running():
        stand.watchers[0].version = 3
        assert [await stand.take(4), await stand.take(5), await stand.take(3)] == ["e1", "e1", "e0"]


async def test_leases_on_an_ejected_engine_go_on_and_fail_on_their_own() -> None:
    stand, hold = Stand(0), asyncio.Event()
    other = asyncio.create_task(stand.group(0, 0, hold))
    await until(lambda: stand.started == [0])
    await stand.fail(EngineDown("one connection broke"))
    assert "e0" in stand.fleet.ejected and stand.fleet.in_flight == {"e0": 1}
    hold.set()
    assert await other == "e0"


async def test_an_answer_from_before_the_last_failure_readmits_nobody() -> None:
    stand, doomed = Stand(0), contextlib.AsyncExitStack()
    engine = stand.engines[0]
    engine.answers.clear()
    async with stand.running() as fleet:
        await doomed.enter_async_context(fleet.lease(0, WAIT_S))
        await stand.fail(EngineDown("one connection broke"))
        since = fleet.ejected["e0"].since
        await until(lambda: engine.asked == 1)  # it will say that it is well: it was
        engine.failure = EngineDown("connection refused")
        with contextlib.suppress(EngineDown):
            async with doomed:
                raise EngineDown("the core died")
        engine.answers.set()
        await until(lambda: engine.asked >= 3)
        assert (fleet.ejected["e0"].why, fleet.ejected["e0"].since) == ("the core died", since)
        engine.failure = None
        await until(lambda: not fleet.ejected)


async def test_an_engine_that_never_answered_is_out_and_says_so() -> None:
    nothing: Any = Watcher(None)
    fleet = Fleet([Replica("e0", nothing, nothing)])
    assert fleet.ejected["e0"].why == "it has not answered yet"
    assert fleet.versions == {"e0": None}
    assert "e0: version None, idle, ejected since" in fleet.stage


async def test_a_long_failure_is_cut_in_heartbeats_and_whole_in_the_log() -> None:
    stand, why = Stand(0), "e0: HTTP 500: " + "word " * 200 + "end"
    with capture_logs() as logs:
        await stand.fail(EngineDown(why))
    assert "(e0: HTTP 500: word" in stand.fleet.stage and len(stand.fleet.stage) < 250
    assert logs[0]["why"] == stand.fleet.ejected["e0"].why == why


@pytest.mark.parametrize("ids", [[], ["e0", "e0"]])
def test_engines_are_told_apart(ids: list[str]) -> None:
    nothing: Any = None
    with pytest.raises(ValueError, match="engine ids"):
        Fleet([Replica(engine_id, nothing, nothing) for engine_id in ids])


# -- nobody starves -------------------------------------------------------------------------------------------


async def test_slow_groups_are_trained_as_often_as_quick_ones_while_engines_die_and_lag() -> None:
    """Bimodal lengths against the real ledger: the lengths that are trained are those of the prompts, in full."""
    steps, per_batch, dice = 12, 4, random.Random(82)
    length = {group: dice.choice([1, 1, 1, 30]) for group in range(steps * per_batch)}
    stand, ledger = Stand(0, 0), Ledger(batch_size=per_batch, max_staleness=2, step_target=steps)
    groups = dict[int, asyncio.Task[None]]()
    trained = list[int]()
    versions_used = list[tuple[int, int]]()

    async def generate(group: int, version: int) -> None:
        while True:
            try:
                async with stand.fleet.lease(version, WAIT_S) as engine:
                    replica = next(r for r in stand.replicas if r.engine is engine)
                    for _ in range(length[group]):
                        if replica.watcher.version is None:
                            raise EngineDown(f"{replica.engine_id} died")
                        versions_used.append((replica.watcher.version, version))
                        await asyncio.sleep(0.001)
                break
            except EngineDown:
                continue
        ledger.occupy(str(group))

    async def misfortune() -> None:
        """One engine or the other is away, and comes back with what is published then."""
        while True:
            victim = dice.choice(stand.watchers)
            victim.version = None
            await asyncio.sleep(0.03)
            victim.version = ledger.version
            await asyncio.sleep(0.03)

    async with stand.running(), asyncio.timeout(60):
        trouble = asyncio.create_task(misfortune())
        while len(trained) < steps * per_batch:
            while ledger.capacity() and len(groups) < steps * per_batch:
                assert ledger.reserve(str(len(groups))) is not None
                groups[len(groups)] = asyncio.create_task(generate(len(groups), ledger.version))
            if ledger.state(ledger.taken) == BufferState.READY:
                trained += [int(group) for group in ledger.take() or ()]
                ledger.publish(ledger.version + 1)
                for watcher in stand.watchers:  # at different moments
                    await asyncio.sleep(0.002)
                    watcher.version = None if watcher.version is None else ledger.version
            await asyncio.sleep(0.001)
        trouble.cancel()
        await asyncio.gather(*groups.values())
    assert Counter(length[group] for group in trained) == Counter(length.values())
    assert sorted(trained) == list(range(steps * per_batch)), "each of them once"
    assert all(served >= admitted for served, admitted in versions_used)

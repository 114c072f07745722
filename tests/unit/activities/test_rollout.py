"""rollout_group: what it stages, what it adopts, what it raises. The real engine runs in test_run.py."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from temporalio.testing import ActivityEnvironment

from roadstead.activities.rollout import RolloutGroup
from roadstead.config import parse
from roadstead.environments.prompts import PromptSet
from roadstead.inference.engine import BadRequest, EngineDown, EngineInfo, GenerateRequest, Generation
from roadstead.staleness import VersionSpan
from roadstead.storage import groups
from roadstead.storage.keys import RunKeys
from roadstead.workflows.messages import GroupOrder
from tests.support.memory_store import MemoryStore
from tests.support.tiny import DigitsEnvironment

KEYS = RunKeys("runs", "r")
ORDER = GroupOrder(attempt=1, version=3, reserved_at=1_790_000_000_000_000, position=5)


class FakeEngine:
    """Answers with tokens from two versions; fails for the members it is told to."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.failure = failure
        self.requests: list[GenerateRequest] = []
        self.cancelled = 0

    async def generate(self, req: GenerateRequest) -> Generation:
        self.requests.append(req)
        if self.failure and "-m1-" in req.request_id:
            raise self.failure
        try:
            await asyncio.sleep(0.05)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return Generation(
            token_ids=(11, 12, 13),
            logprobs=(-0.5, -0.25, -0.125),
            version_spans=(VersionSpan(3, 0, 2), VersionSpan(4, 2, 3)),
            finish_reason="stop",
        )

    async def info(self) -> EngineInfo:
        return EngineInfo("engine-0", "vllm test", 128)


class FakeWatcher:
    stage = "idle"

    def __init__(self) -> None:
        self.asked: list[int] = []

    async def at_least(self, version: int, timeout_s: float) -> None:
        self.asked.append(version)


class FakeCodec:
    def encode(self, prompt: str) -> tuple[int, ...]:
        return tuple(ord(c) % 50 for c in prompt)

    def decode(self, token_ids: Any) -> str:
        return "4a2"


def make(store: MemoryStore, engine: FakeEngine, watcher: FakeWatcher | None = None) -> RolloutGroup:
    config = parse(
        {
            "name": "r",
            "model": {"path": "m"},
            "data": {"prompts": "p.jsonl"},
            "training": {"steps": 1},
            "rollout": {"group_size": 3, "max_tokens": 8},
        },
        "test",
    )
    return RolloutGroup(
        config=config,
        store=store,
        keys=KEYS,
        engine=engine,  # type: ignore[arg-type]
        watcher=watcher or FakeWatcher(),  # type: ignore[arg-type]
        prompts=PromptSet([{"prompt": f"{i}+1="} for i in range(8)], "test"),
        environment=DigitsEnvironment(),
        codec=FakeCodec(),  # type: ignore[arg-type]
    )


async def run(rollout: RolloutGroup, order: GroupOrder = ORDER) -> Any:
    return await ActivityEnvironment().run(rollout.rollout_group, order)


async def test_what_is_staged_is_what_the_engine_said() -> None:
    store, watcher = MemoryStore(), FakeWatcher()
    report = await run(make(store, FakeEngine(), watcher))
    assert watcher.asked == [3], "generation waits for the version the group was admitted under"
    assert (report.oldest_version, report.newest_version, report.tokens, report.trajectories) == (3, 4, 9, 3)
    rows = groups.read(store, KEYS, "g00000005", 1, report.digest).to_pylist()
    assert [row["member"] for row in rows] == [0, 1, 2]
    for row in rows:
        assert row["response_token_ids"] == [11, 12, 13] and row["behavior_logprobs"] == [-0.5, -0.25, -0.125]
        assert row["version_spans"] == [
            {"version": 3, "start": 0, "end": 2},
            {"version": 4, "start": 2, "end": 3},
        ]
        assert (row["head_version"], row["tail_version"], row["v_traj"]) == (3, 4, 3)
        assert row["reward"] == pytest.approx(2 / 3) and row["staleness"] is None
    assert len({row["seed"] for row in rows}) == 3


async def test_seeds_depend_on_the_prompt_and_not_on_the_try() -> None:
    first, second = FakeEngine(), FakeEngine()
    await run(make(MemoryStore(), first))
    await run(make(MemoryStore(), second))
    assert [r.seed for r in first.requests] == [r.seed for r in second.requests]
    third = FakeEngine()
    await run(make(MemoryStore(), third), ORDER.model_copy(update={"position": 6}))
    assert not {r.seed for r in first.requests} & {r.seed for r in third.requests}


async def test_a_group_that_is_staged_already_is_adopted_and_not_generated_again() -> None:
    store, again = MemoryStore(), FakeEngine()
    first = await run(make(store, FakeEngine()))
    assert await run(make(store, again)) == first
    assert again.requests == []


@pytest.mark.parametrize("failure", [BadRequest("the prompt is too long"), EngineDown("it crashed")])
async def test_a_failed_member_raises_its_own_error_and_cancels_the_others(failure: Exception) -> None:
    store, engine = MemoryStore(), FakeEngine(failure)
    with pytest.raises(type(failure), match=str(failure)):
        await run(make(store, engine))
    assert engine.cancelled == 2 and store.objects == {}, "nothing is staged of half a group"

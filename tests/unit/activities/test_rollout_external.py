"""rollout_group on a prompt that brings its trajectories: staged and marked, no engine asked."""

from __future__ import annotations

from typing import Any

import pytest
from temporalio.testing import ActivityEnvironment

from roadstead.activities.rollout import RolloutGroup
from roadstead.config import parse
from roadstead.environments.prompts import PromptSet
from roadstead.environments.single_turn import SingleTurn
from roadstead.staleness import AgeStatistics
from roadstead.storage import groups
from roadstead.storage.keys import RunKeys
from roadstead.workflows.messages import GroupOrder
from tests.support.memory_store import MemoryStore
from tests.support.tiny import DigitsEnvironment
from tests.unit.activities.test_rollout import FakeCodec, FakeEngine, FakeFleet

KEYS = RunKeys("runs", "r")
TRAJECTORIES: list[dict[str, Any]] = [
    {"response_token_ids": [3, 4], "behavior_logprobs": [-0.5, -2.0], "reward": 0.25},
    {"response_token_ids": [5], "behavior_logprobs": [-1.0], "finish_reason": "length"},
]


async def test_its_rows_are_marked_judged_where_they_must_be_and_without_an_age() -> None:
    store, fleet = MemoryStore(), FakeFleet(FakeEngine())
    config = parse(
        {
            "name": "r",
            "model": {"path": "m"},
            "data": {"prompts": "p.jsonl", "train_on_external": True},
            "training": {"steps": 1},
            "rollout": {"group_size": 2, "max_tokens": 8},
        },
        "test",
    )
    rollout = RolloutGroup(
        config=config,
        store=store,
        keys=KEYS,
        fleet=fleet,  # type: ignore[arg-type]
        prompts=PromptSet([{"prompt": "1+1=", "trajectories": TRAJECTORIES}], "test"),
        environment=SingleTurn.of(DigitsEnvironment()),
        codec=FakeCodec(),  # type: ignore[arg-type]
    )
    order = GroupOrder(attempt=1, version=3, reserved_at=1_790_000_000_000_000, position=0)
    report = await ActivityEnvironment().run(rollout.rollout_group, order)
    assert fleet.asked == [] and fleet.engine.requests == []
    assert (report.oldest_version, report.newest_version, report.trajectories, report.tokens) == (3, 3, 2, 3)
    rows = groups.read(store, KEYS, "g00000000", 1, report.digest).to_pylist()
    assert [row["response_token_ids"] for row in rows] == [[3, 4], [5]]
    assert [row["behavior_logprobs"] for row in rows] == [[-0.5, -2.0], [-1.0]]
    assert [row["finish_reason"] for row in rows] == ["stop", "length"]
    assert [row["reward"] for row in rows] == [0.25, pytest.approx(2 / 3)], "the second is judged here"
    for row in rows:
        assert not row["from_live_policy"] and row["engine_id"] == "external" and row["v_traj"] == 3
    ages = AgeStatistics.of((5, row["head_version"], row["from_live_policy"]) for row in rows)
    assert ages.count == 0 and ages.maximum is None

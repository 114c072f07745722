"""Trained groups as prompts of another run: what comes back is what was trained."""

from __future__ import annotations

import json
from typing import Any

from roadstead.config import RolloutSection
from roadstead.environments.external import check_external, check_prompt, external_members
from roadstead.environments.prompts import PromptSet
from roadstead.storage import batches, export, steps
from roadstead.storage.keys import RunKeys
from tests.support.audit_run import GROUPS, MEMBERS, MOST_TOKENS, Row, SyntheticRun
from tests.support.memory_store import MemoryStore

KEYS = RunKeys("runs", "r")
CARRIED = ("response_token_ids", "loss_mask", "behavior_logprobs", "turns", "finish_reason", "reward")


class Codec:
    def decode(self, token_ids: Any) -> str:
        return "".join(chr(97 + token % 26) for token in token_ids)


def test_every_trained_row_comes_back_whole_and_one_group_without_a_reward_stays() -> None:
    def plant(step: int, rows: list[Row]) -> None:
        tokens = len(rows[0]["loss_mask"])
        rows[0].update(
            loss_mask=[i != 1 for i in range(tokens)],
            turns=[
                {"role": role, "start": start, "end": end}
                for role, start, end in (
                    ("assistant", 0, 1),
                    ("tool", 1, 2),
                    ("assistant", 2, tokens),
                )
            ],
        )
        rows[3 * MEMBERS].update(reward=None, reward_components=None)

    store = MemoryStore()
    SyntheticRun(store, KEYS, rows=plant).write(2)
    lines = [json.dumps(row) for record in steps.all_of(store, KEYS) for row in export.replayable(store, KEYS, record)]
    prompts = PromptSet([json.loads(line) for line in lines], "test")
    limits = RolloutSection(group_size=MEMBERS, max_tokens=MOST_TOKENS)
    assert check_external(prompts, limits, allowed=True) == len(prompts) == 2 * (GROUPS - 1)

    trained = {}
    for step in range(2):
        commit = batches.find(store, KEYS, step)
        assert commit is not None
        trained |= {(row["group_id"], row["member"]): row for row in batches.read(store, commit).to_pylist()}
    seen = 0
    for row in prompts.rows:
        members = external_members(row, Codec(), MEMBERS, 9)  # type: ignore[arg-type]
        assert members is not None
        for m, member in enumerate(members):
            source = trained[row["prompt_id"].removeprefix("r/"), m]
            assert member.score is not None
            got = {**member.columns, "reward": member.score.total}
            assert {name: got[name] for name in CARRIED} == {name: source[name] for name in CARRIED}
            assert member.score.components == dict(source["reward_components"])
            assert [turn.role for turn in member.transcript.turns] == [turn["role"] for turn in source["turns"]]
            check_prompt(row, source["prompt_token_ids"])
            assert (row["prompt"], row["source_prompt_id"]) == (source["prompt_text"], source["prompt_id"])
            seen += 1
    assert seen == 2 * (GROUPS - 1) * MEMBERS

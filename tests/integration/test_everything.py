"""S = 0 with everything switched on that could bend it: exact synchronous RL, on real parts.

Several turns, over-sampling of members and of groups, filters, time-outs that truncate, evaluation beside training,
two optimizer steps a batch, a reference policy. What is checked is what was stored: versions, ages, and that the
trainer computes the log-probabilities that the engine sampled with.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from roadstead.storage import batches, steps, train_rows
from tests.support.workplace import LIMIT_S, Workplace

pytestmark = pytest.mark.timeout(LIMIT_S + 60)

STEPS, BATCH, MEMBERS = 4, 4, 4


@pytest.fixture(scope="module")
def output(workplace: Workplace) -> str:
    prompts = str(workplace.folder / "prompts.jsonl")
    return workplace.run(
        "everything",
        data__environment="tests.support.tiny:EchoEnvironment",
        staleness__max_staleness=0,
        staleness__slots_per_buffer=BATCH + 1,
        rollout__ignore_eos=False,
        rollout__max_tokens=24,
        rollout__extra_members=1,
        rollout__on_timeout="truncate",
        rollout__group_timeout_s=60.0,
        rollout__stuck_timeout_s=60.0,
        filters={"zero_variance": True, "functions": ["tests.support.tiny:every_fifth"]},
        evaluation={"prompts": prompts, "every": 2, "group_size": 1, "max_tokens": 8},
        training__steps=STEPS,
        training__minibatches=2,
        training__clip_high=0.28,
        training__kl_coefficient=0.01,
        training__aggregation="sequence_mean",
    )


@pytest.fixture(scope="module")
def trained(workplace: Workplace, output: str) -> list[tuple[int, list[dict[str, Any]], list[dict[str, Any]]]]:
    """(step, rows of the batch, rows of the trainer)."""
    store, keys = workplace.store("everything")
    found = []
    for record in steps.all_of(store, keys):
        commit = batches.find(store, keys, record.step)
        assert commit is not None
        found.append(
            (record.step, batches.read(store, commit).to_pylist(), train_rows.read(store, keys, commit).to_pylist())
        )
    assert len(found) == STEPS, output
    return found


def test_every_token_is_of_the_version_that_it_trains(trained: Any) -> None:
    for step, rows, _ in trained:
        assert len(rows) == BATCH * MEMBERS and {row["member"] for row in rows} == set(range(MEMBERS))
        assert {row["staleness"] for row in rows} == {0}
        assert {span["version"] for row in rows for span in row["version_spans"]} == {step}


def test_engine_and_trainer_agree_on_every_token_that_carries_loss(trained: Any) -> None:
    for _, rows, theirs in trained:
        for row, other in zip(rows, theirs, strict=True):
            mask = np.array(row["loss_mask"])
            gap = np.array(row["behavior_logprobs"])[mask] - np.array(other["trainer_logprobs"])[mask]
            assert np.abs(gap).max() <= 1e-4, (row["group_id"], row["member"])


def test_there_were_several_turns_and_their_echo_carries_no_loss(trained: Any) -> None:
    turns = [turn for _, rows, _ in trained for row in rows for turn in row["turns"]]
    assert {turn["role"] for turn in turns} == {"assistant", "user"}
    for _, rows, _ in trained:
        for row in rows:
            for turn in row["turns"]:
                said = row["loss_mask"][turn["start"] : turn["end"]]
                assert set(said) == {turn["role"] == "assistant"}


def test_what_was_filtered_is_on_record_and_in_no_batch(workplace: Workplace, trained: Any) -> None:
    store, keys = workplace.store("everything")
    terminal = {group: state for record in steps.all_of(store, keys) for group, state in record.terminal.items()}
    inside = {row["group_id"] for _, rows, _ in trained for row in rows}
    assert {group for group, state in terminal.items() if state == "trained"} == inside
    filtered = {group for group, state in terminal.items() if state == "filtered"}
    assert filtered and not filtered & inside
    shown = workplace.roadstead("groups", "everything", "--state", "filtered").stdout
    assert all(group in shown for group in filtered) and "every_fifth" in shown

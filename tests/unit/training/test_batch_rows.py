"""What a row must be to be trained, and which of its tokens are."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from roadstead.storage.schema import table_from_rows
from roadstead.training.advantages import group_advantages
from roadstead.training.protocol import TrainerBadBatch
from tests.support.rows import group_rows
from tests.unit.training.bigrams import batch_of, rows_of


def refused(**sampling: Any) -> str:
    rows = rows_of([[1.0, -1.0]])
    rows[1]["sampling"] |= sampling
    with pytest.raises(TrainerBadBatch) as caught:
        batch_of(rows)
    return str(caught.value)


@pytest.mark.parametrize("top_p", [0.9, 0.0, None])
def test_a_cut_distribution_is_refused_by_row_value_and_remedy(top_p: float | None) -> None:
    text = refused(top_p=top_p)
    assert text.startswith(f"row 1 (g0 member 1): sampling.top_p is {top_p}, which biases every importance weight")
    assert "sample from the whole distribution (top_p 1.0) and lower the temperature" in text


def test_top_k_is_refused_alike() -> None:
    assert "row 1 (g0 member 1): sampling.top_k is 50, which biases" in refused(top_k=50)


@pytest.mark.parametrize("temperature", [0.0, -1.0, None])
def test_greedy_samples_are_refused(temperature: float | None) -> None:
    assert f"row 1 (g0 member 1): sampling.temperature is {temperature}; greedy" in refused(temperature=temperature)


def test_logprobs_from_before_the_temperature_are_refused() -> None:
    assert "sampling.logprobs_mode is 'raw' at temperature 0.5" in refused(logprobs_mode="raw", temperature=0.5)


@pytest.mark.parametrize(
    "sampling", [{"top_k": -1}, {"top_k": 0}, {"temperature": 0.3}, {"logprobs_mode": "raw", "temperature": 1.0}]
)
def test_what_is_corrected_exactly_is_trained(sampling: dict[str, Any]) -> None:
    rows = rows_of([[1.0, -1.0]])
    rows[1]["sampling"] |= sampling
    assert len(batch_of(rows).rows) == 2


# -- ages -----------------------------------------------------------------------------------------------------


def aged(**changes: Any) -> dict[str, Any]:
    """A row of step 5 whose tokens are of versions 2, 2, 3, 5."""
    return rows_of([[1.0]], step=5)[0] | {
        "response_token_ids": [1, 2, 3, 4],
        "loss_mask": [True, False, True, True],
        "behavior_logprobs": [-1.0] * 4,
        "version_spans": [
            {"version": 2, "start": 0, "end": 2},
            {"version": 3, "start": 2, "end": 3},
            {"version": 5, "start": 3, "end": 4},
        ],
        "head_version": 2,
        "tail_version": 5,
        "staleness": 3,
        **changes,
    }


@pytest.mark.parametrize(
    ("age", "carry"),
    [(None, [0, 2, 3]), (3, [0, 2, 3]), (2, [2, 3]), (1, [3]), (0, [3])],
)
def test_tokens_over_the_age_carry_no_loss(age: int | None, carry: list[int]) -> None:
    batch = batch_of([aged()]).without_older_than(age)
    row = batch.rows[0]
    assert np.flatnonzero(row.mask).tolist() == carry
    assert np.flatnonzero(row.over_age).tolist() == [i for i in (0, 2, 3) if i not in carry]
    assert row.measured.tolist() == [True, False, True, True], "the row's own columns are over all of them"
    assert batch.loss_tokens == len(carry)


def test_rows_from_elsewhere_have_no_age() -> None:
    batch = batch_of([aged(from_live_policy=False)]).without_older_than(0)
    assert batch.loss_tokens == 3 and not batch.rows[0].over_age.any()


def test_a_row_whose_tokens_are_all_too_old_is_no_row_of_the_loss() -> None:
    spans = [{"version": 4, "start": 0, "end": 4}]
    old = aged(version_spans=spans, head_version=4, tail_version=4, staleness=1)
    batch = batch_of([aged(member=0), old | {"member": 1}]).without_older_than(0)
    assert (batch.loss_tokens, batch.loss_rows) == (1, 1)
    assert [row.trainable for row in batch.rows] == [True, False]


# -- rewards --------------------------------------------------------------------------------------------------


def test_one_failed_reward_in_64_excludes_one_row_and_leaves_the_others_whole() -> None:
    """ms-swift #8123: one None made every advantage of the batch NaN."""
    rewards: list[float | None] = [float(i % 3) for i in range(64)]
    rewards[17] = None
    advantages = group_advantages(rewards, True)
    assert advantages[17] == 0.0 and all(math.isfinite(a) for a in advantages)
    others = [a for i, a in enumerate(advantages) if i != 17]
    assert others == group_advantages([r for r in rewards if r is not None], True)
    rows = [row | {"reward": reward} for row, reward in zip(rows_of([advantages]), rewards, strict=True)]
    batch = batch_of(rows)
    assert not batch.rows[17].mask.any()
    assert all(row.mask.any() for i, row in enumerate(batch.rows) if i != 17)
    assert batch.loss_tokens == sum(sum(row["loss_mask"]) for i, row in enumerate(rows) if i != 17)


def test_rewards_are_what_the_environment_gave() -> None:
    """NeMo-RL #3794: the reward that was recorded was the one that filtering had overwritten."""
    rewards: list[float | None] = [0.25, None, 1.0]
    given = copy.copy(rewards)
    advantages = group_advantages(rewards, True)
    rows = rows_of([advantages])
    for row, reward in zip(rows, rewards, strict=True):
        row["reward"] = reward
    table = table_from_rows(rows, batch=True)
    assert rewards == given
    assert [row.reward for row in batch_of(rows).rows] == given
    assert table["reward"].to_pylist() == given, "reading a batch changes nothing in it"


def test_an_empty_response_is_a_row_without_loss() -> None:
    """verl #5899, slime #2134: an empty tensor in, NaN out."""
    row = group_rows(members=1, tokens=0)[0]
    row |= {"step": 0, "slot": 0, "staleness": 0, "advantage": 1.0, "occupied_at": row["finished_at"]}
    row |= {"prompt_token_ids": [1, 2], "reward": 1.0, "version_spans": []}
    batch = batch_of([row])
    assert (batch.loss_tokens, batch.loss_rows, batch.rows[0].trainable) == (0, 0, False)
    assert batch.without_older_than(0).rows[0].ages.tolist() == []

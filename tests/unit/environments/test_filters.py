"""What the filters say of a group, and what there is to learn from one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roadstead.config import FilterSection
from roadstead.environments.calls import CallFailed
from roadstead.environments.filters import Filters, nothing_to_learn
from roadstead.training.advantages import group_advantages


def row(reward: float | None, length: int = 3, components: Any = (), mask: bool = True) -> dict[str, Any]:
    return {
        "reward": reward,
        "reward_components": list(components),
        "response_token_ids": [7] * length,
        "loss_mask": [mask] * length,
    }


def no_cats(rows: list[dict[str, Any]]) -> str | None:
    return "a cat" if any(r["reward"] == 9 for r in rows) else None


async def slow_but_fine(rows: list[dict[str, Any]]) -> None:
    return None


def broken(rows: list[dict[str, Any]]) -> str:
    raise KeyError("column")


async def judge(rows: list[dict[str, Any]], **section: Any) -> Any:
    return await Filters(FilterSection(**section), 1.0).judge(rows)


async def test_nothing_is_filtered_by_default() -> None:
    verdict = await judge([row(0.0), row(0.0)])
    assert (verdict.filtered, verdict.trainable, verdict.note) == (None, False, "reward constant 0")


async def test_groups_without_variance() -> None:
    assert (await judge([row(1.0), row(1.0)], zero_variance=True)).filtered == "zero_variance"
    assert (await judge([row(1.0), row(0.0)], zero_variance=True)).filtered is None
    assert (await judge([row(None), row(None)], zero_variance=True)).filtered == "zero_variance"


async def test_lengths() -> None:
    rows = [row(0.0, 2), row(1.0, 30)]
    assert (await judge(rows, min_tokens=3)).filtered == "min_tokens: a response of 2 tokens"
    assert (await judge(rows, max_tokens=29)).filtered == "max_tokens: a response of 30 tokens"
    verdict = await judge(rows, min_tokens=2, max_tokens=30)
    assert verdict.filtered is None and verdict.trainable


async def test_functions_by_import_path() -> None:
    functions = (f"{__name__}:slow_but_fine", f"{__name__}:no_cats")
    assert (await judge([row(9.0), row(1.0)], functions=functions)).filtered == "no_cats: a cat"
    assert (await judge([row(2.0), row(1.0)], functions=functions)).filtered is None


async def test_a_function_that_fails_is_named() -> None:
    with pytest.raises(CallFailed, match="filter broken: KeyError: 'column'"):
        await judge([row(1.0), row(0.0)], functions=(f"{__name__}:broken",))


def test_a_path_that_cannot_be_imported_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match=r"filters.functions: 'nowhere:f'"):
        Filters(FilterSection(functions=("nowhere:f",)), 1.0)


async def test_failed_rewards_say_which_failure_was_most_common() -> None:
    timeout, error = [("error: reward: no answer in 3 s", None)], [("error: step: OSError: full", None)]
    verdict = await judge([row(None, components=error), row(None, components=timeout), row(None, components=timeout)])
    assert verdict.note == "no reward: reward: no answer in 3 s"


@given(st.lists(st.sampled_from([None, 0.0, 0.25, 1.0]), min_size=1, max_size=6), st.booleans())
def test_a_group_is_trainable_exactly_when_some_advantage_is_not_zero(
    rewards: list[float | None], normalize: bool
) -> None:
    learn = nothing_to_learn([row(reward) for reward in rewards]) is None
    assert learn == any(a != 0 for a in group_advantages(rewards, normalize))


def test_tokens_without_loss_teach_nothing() -> None:
    assert nothing_to_learn([row(1.0, mask=False), row(0.0, mask=False)]) == "no token that carries loss"

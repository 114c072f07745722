"""What a trajectory is worth: components, weights, and what becomes of those that fail."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from roadstead.config import ConfigError, RewardSection, parse
from roadstead.environments.protocol import Reward, Transcript, Turn
from roadstead.environments.rewards import Score, load_environment, load_rewards, score
from roadstead.training.advantages import group_advantages
from tests.unit.environments import games

_SAID = Transcript((Turn("assistant", "no"), Turn("user", "again"), Turn("assistant", "four")), "stop")
_OWN = Reward(1.0, {"own": 1.0})
_HERE = "tests.unit.environments.games"


@pytest.fixture(autouse=True)
def _release_threads() -> Iterator[None]:
    games.release.clear()
    yield
    games.release.set()


async def _score(*functions: tuple[str, float], own: Any = _OWN, timeout_s: float = 5.0) -> Score:
    sections = [
        RewardSection(function=f"{_HERE}:{name}", weight=weight, timeout_s=timeout_s) for name, weight in functions
    ]

    def judge(transcript: Transcript) -> Any:
        if isinstance(own, Exception):
            raise own
        return own

    return await score(judge, timeout_s, load_rewards(sections), {"prompt": "p"}, _SAID)


async def test_the_total_is_the_environments_own_plus_the_weighted_sum() -> None:
    assert await _score(("length", 0.25), ("slow_half", -2.0)) == Score(
        1.0 + 0.25 * 4 - 2.0 * 0.5, {"own": 1.0, "length": 4.0, "slow_half": 0.5}
    )


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("not_a_number", "not_a_number: returned nan, not a finite number"),
        ("infinite", "infinite: returned inf, not a finite number"),
        ("words", "words: returned str, not a number"),
        ("divides", "divides: ZeroDivisionError: division by zero"),
        ("leaves", "leaves: SystemExit: 3"),
    ],
)
async def test_a_component_that_fails_takes_the_total_and_leaves_its_reason(name: str, reason: str) -> None:
    result = await _score((name, 1.0), ("length", 1.0))
    assert result == Score(None, {"own": 1.0, name: None, f"error: {reason}": None, "length": 4.0})


@pytest.mark.parametrize("name", ["never", "hangs"])
async def test_a_reward_past_its_deadline_fails_and_holds_nothing_up(name: str) -> None:
    began = time.monotonic()
    result = await _score((name, 1.0), timeout_s=0.1)
    assert result.total is None and f"error: {name}: no answer in 0.1 s" in result.components
    assert time.monotonic() - began < 5


async def test_a_component_of_weight_zero_is_recorded_and_excludes_nothing() -> None:
    result = await _score(("length", 0.0), ("divides", 0.0))
    assert result.total == 1.0 and result.components["length"] == 4.0 and result.components["divides"] is None


@pytest.mark.parametrize(
    "own",
    [
        Reward(float("nan"), {}),
        Reward(1.0, {"part": float("inf")}),
        None,
        10**400,
        KeyError("answer"),
    ],
)
async def test_the_environments_own_reward_is_held_to_the_same_rules(own: Any) -> None:
    result = await _score(("length", 1.0), own=own)
    assert result.total is None and result.components["length"] == 4.0
    assert any(name.startswith("error: reward") for name in result.components)


async def test_a_plain_number_is_a_reward() -> None:
    assert await _score(own=True) == Score(1.0, {})


async def test_a_sum_that_overflows_is_refused() -> None:
    assert (await _score(("length", 1e308))).total is None


async def test_one_failed_reward_in_64_leaves_the_advantages_of_the_others_alone() -> None:
    """frameworks.md 4d, number 68: one None reward made all advantages NaN."""
    rewards = [(await _score(("slow_half", float(i)))).total for i in range(63)]
    rewards.insert(5, (await _score(("not_a_number", 1.0))).total)
    advantages = group_advantages(rewards, normalize=True)
    assert advantages[5] == 0.0
    assert advantages[:5] + advantages[6:] == group_advantages(rewards[:5] + rewards[6:], normalize=True)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("roadstead.environments.arithmetic:ArithmeticEnvironment", "arithmetic"),
        ("tests.support.tiny:DigitsEnvironment", "digits"),
        (f"{_HERE}:factory", "made"),
        (f"{_HERE}:length", "length"),
        (f"{_HERE}:Talker", "talker"),
        ("roadstead.environments.single_turn:NoReward", "single_turn"),
    ],
)
def test_environments_are_found_by_import_path(path: str, name: str) -> None:
    assert load_environment(path).name == name


async def test_a_reward_of_row_response_and_reason_is_adapted() -> None:
    environment = load_environment("roadstead.environments.arithmetic:ArithmeticEnvironment")
    row = {"prompt": "17+5=", "answer": "22"}
    episode: Any = environment.reset(row, 0)
    assert episode.start == "17+5=" and episode.step(None) is None
    for reason, worth in (("stop", 1.0), ("length", 0.0)):
        said = Transcript((Turn("assistant", "22"),), reason)
        assert (await score(episode.reward, 5.0, [], row, said)).total == worth


@pytest.mark.parametrize(
    "path",
    [
        "no.such.module:X",
        f"{_HERE}:Missing",
        _HERE,
        f"{_HERE}:NEITHER",
        "",
    ],
)
def test_a_path_that_cant_be_used_is_refused_by_name(path: str) -> None:
    with pytest.raises(ValueError, match=r"data\.environment"):
        load_environment(path)


def test_rewards_are_refused_before_they_are_needed() -> None:
    with pytest.raises(ValueError, match=r"data\.rewards: 'tests.unit.environments.games:NEITHER' is int"):
        load_rewards([RewardSection(function=f"{_HERE}:NEITHER")])
    values = {"name": "r", "model": {"path": "m"}, "training": {"steps": 1}}
    twice = [{"function": "a:length"}, {"function": "b:length"}]
    with pytest.raises(ConfigError, match="two functions are called 'length'"):
        parse({**values, "data": {"prompts": "p.jsonl", "rewards": twice}}, "test")
    with pytest.raises(ConfigError, match="weight"):
        parse({**values, "data": {"prompts": "p.jsonl", "rewards": [{"function": "a:b", "weight": ".nan"}]}}, "test")

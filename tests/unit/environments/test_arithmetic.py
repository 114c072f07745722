"""The demo's task: what a response is worth, and which prompts there are."""

from __future__ import annotations

import pytest

from roadstead.environments.arithmetic import ArithmeticEnvironment, make_prompts, worked_response
from roadstead.environments.rewards import Reward, load_environment

_ROW = {"prompt_id": "add-17-5", "prompt": "17+5=", "answer": "22"}
_RIGHT = Reward(1.0, {"correct": 1.0, "format": 1.0})
_WRONG = Reward(0.0, {"correct": 0.0, "format": 1.0})
_MALFORMED = Reward(0.0, {"correct": 0.0, "format": 0.0})


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("22", _RIGHT),
        ("7+5=12;22", _RIGHT),
        ("7+5=13;22", _RIGHT),  # the working is the model's own affair
        (" 22\n", _RIGHT),
        ("21", _WRONG),
        ("7+5=12;21", _WRONG),
        ("022", _WRONG),
        ("2", _WRONG),
        ("222", _WRONG),
        ("", _MALFORMED),
        ("   ", _MALFORMED),
        ("2 2", _MALFORMED),
        ("22;", _MALFORMED),
        (";22", _MALFORMED),
        ("7+5=12;7+5=12;22", _MALFORMED),
        ("-22", _MALFORMED),
        ("22.0", _MALFORMED),
        ("it is 22", _MALFORMED),
        ("٢٢", _MALFORMED),  # digits, but not ours
        ("²²", _MALFORMED),
        ("22<eos>", _MALFORMED),
    ],
)
def test_finished_response(response: str, expected: Reward) -> None:
    assert ArithmeticEnvironment().reward(_ROW, response, "stop") == expected


@pytest.mark.parametrize("response", ["22", "7+5=12;22", "7+5=12;", ""])
@pytest.mark.parametrize("finish_reason", ["length", "abort", ""])
def test_cut_off_response_is_worth_nothing(response: str, finish_reason: str) -> None:
    assert ArithmeticEnvironment().reward(_ROW, response, finish_reason) == _MALFORMED


def test_row_without_answer_is_an_error() -> None:
    with pytest.raises(KeyError, match="answer"):
        ArithmeticEnvironment().reward({"prompt": "17+5="}, "22", "stop")


def test_environment_is_found_by_its_import_path() -> None:
    assert load_environment("roadstead.environments.arithmetic:ArithmeticEnvironment").name == "arithmetic"


def test_prompts_are_distinct_and_answered() -> None:
    rows = make_prompts(1024, seed=3)
    assert len(rows) == len({row["prompt"] for row in rows}) == len({row["prompt_id"] for row in rows}) == 1024
    environment = ArithmeticEnvironment()
    for row in rows:
        first, second = (int(operand) for operand in row["prompt"].removesuffix("=").split("+"))
        assert row["answer"] == str(first + second)
        assert environment.reward(row, worked_response(first, second, first + second), "stop") == _RIGHT


def test_prompts_depend_on_the_seed_alone() -> None:
    assert make_prompts(64, seed=1) == make_prompts(64, seed=1)
    assert make_prompts(64, seed=1) != make_prompts(64, seed=2)
    assert make_prompts(2, seed=0) == make_prompts(2, seed=0)


def test_a_longer_list_has_every_prompt_once() -> None:
    everything = make_prompts(1125, seed=0)
    assert {row["prompt"] for row in make_prompts(1125, seed=1)} == {row["prompt"] for row in everything}


@pytest.mark.parametrize("count", [-1, 1126])
def test_impossible_count_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match="1125"):
        make_prompts(count, seed=0)

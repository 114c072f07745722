"""The tool-use example's answers and prompts, for a chat model and for the demo's."""

from __future__ import annotations

import random
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import get_args

import pytest

from examples.arithmetic.tokenizer import EOS, VOCABULARY, encode
from examples.calculator import short
from examples.calculator.environment import environment, judge, make_prompts
from examples.calculator.warmup import Teacher, _episode
from examples.prepare import TASKS
from roadstead.cli.demo import Example
from roadstead.config import load
from roadstead.environments.calculator import calculate
from roadstead.environments.protocol import Response, Transcript, Turn
from roadstead.environments.rewards import load_environment
from roadstead.environments.tool_calls import Outcome, Status

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.mark.parametrize(
    ("answer", "reason", "worth"),
    [
        ("It is 1234.", "stop", 1.0),
        ("99*99 gives 1,234", "stop", 1.0),
        ("1234", "length", 0.0),
        ("1234", "max_turns", 0.0),
        ("1234 or 1235", "stop", 0.0),
        ("-1234", "stop", 0.0),
        ("12345", "stop", 0.0),
        ("no idea", "stop", 0.0),
        ("", "stop", 0.0),
    ],
)
def test_the_last_number_is_the_answer(answer: str, reason: str, worth: float) -> None:
    assert judge({"answer": "1234"}, Transcript((Turn("assistant", answer),), reason)).total == worth


async def test_a_prompt_is_solved_by_one_call() -> None:
    row = make_prompts(5, seed=3)[4]
    episode = environment().reset(row, 0)
    expression = row["prompt"].removeprefix("What is ").removesuffix("?")
    said = f'<tool_call>{{"name": "calculator", "arguments": {{"expression": "{expression}"}}}}</tool_call>'
    observation = await episode.step(Response(said, (1,)))
    assert observation is not None and observation.text == row["answer"] == calculate(expression)


async def _play(row: dict[str, str], turns: list[str]) -> tuple[list[str], float, dict[str, float]]:
    """What the short format's environment says to `turns`, and what they are worth if the last one ends the episode."""
    episode = short.environment().reset(row, 0)
    heard = [said.text for turn in turns if (said := await episode.step(Response(turn, (1,)))) is not None]
    finish = "stop" if len(heard) < len(turns) else "max_turns"
    reward = await episode.reward(Transcript(tuple(Turn("assistant", turn) for turn in turns), finish))
    return heard, reward.total, reward.components


_ROW = {"prompt": "4831+2956=", "answer": "7787"}


@pytest.mark.parametrize(
    ("turns", "heard", "worth", "components"),
    [
        (["<4831+2956>", "7787"], ["7787;"], 1.0, {"tool_calls": 1.0}),
        (["<4831+2956>", "7786"], ["7787;"], 0.0, {"tool_calls": 1.0}),
        (["<4831+2957>", "7788"], ["7788;"], 0.0, {"tool_calls": 1.0}),
        (["<4831+*2956>", "<4831+2956>", "7787"], ["error;", "7787;"], 1.0, {"tool_calls": 2.0, "tool_error": 1.0}),
        (["<4831+2956", "7787"], ["error;"], 1.0, {"tool_calls": 1.0, "tool_malformed": 1.0}),
        (["<4831+2956>", "<4831+2956>", "<4831+2956>"], ["7787;"] * 3, 0.0, {"tool_calls": 3.0}),
        (["<4831+2956><1+1>", "7787"], ["7787;2;"], 1.0, {"tool_calls": 2.0}),
        (["7787"], [], 1.0, {"tool_calls": 0.0}),
    ],
    ids=range(8),
)
async def test_the_short_format_calls_fails_and_answers(
    turns: list[str], heard: list[str], worth: float, components: dict[str, float]
) -> None:
    assert await _play(_ROW, turns) == (heard, worth, {"correct": worth, **components})


async def test_the_demos_prompts_are_of_one_length_and_solved_by_one_call() -> None:
    rows = short.make_prompts(300, 1)
    assert rows == short.make_prompts(300, 1) != short.make_prompts(300, 2)
    for row in rows:
        heard, worth, _ = await _play(row, [f"<{row['prompt'].removesuffix('=')}>", row["answer"]])
        assert (len(row["prompt"]), heard, worth) == (10, [f"{row['answer']};"], 1.0)


def test_all_that_the_demos_environment_says_is_in_the_vocabulary() -> None:
    for status in get_args(Status):
        encode(short.ShortFormat().answer([Outcome(status, "7787" if status == "ok" else "Ünknown?!")]).text)


async def test_the_demos_warm_up_imitates_episodes_as_they_are_played() -> None:
    """Turns of the model and their ends are learned; what the environment would have said is read only."""
    texts = {index: text for text, index in VOCABULARY.items()}
    components: set[str] = set()
    for seed in range(300):
        tokens, learned = _episode(random.Random(seed), Teacher(calls=0.8, slips=0.6))
        runs = groupby(zip(tokens, learned, strict=True), key=itemgetter(1))
        prompt, *said = ["".join(texts[token] for token, _ in run) for _, run in runs]
        turns, replies = said[::2], said[1::2]
        assert all(turn.endswith(texts[EOS]) for turn in turns) and 1 <= len(turns) <= short.TURNS
        row = {"prompt": prompt, "answer": calculate(prompt.removesuffix("="))}
        heard, _, counted = await _play(row, [turn.removesuffix(texts[EOS]) for turn in turns])
        assert heard == replies
        components |= counted.keys()
    assert components == {"correct", "tool_calls", "tool_error", "tool_malformed"}


@pytest.mark.parametrize("name", ["arithmetic", "calculator", "guessing"])
def test_an_examples_configuration_can_be_run(name: str) -> None:
    assert load_environment(load(EXAMPLES / name / "run.yaml").data.environment).name == name


def test_the_demo_offers_every_example_that_has_a_model() -> None:
    assert {example.value for example in Example} == TASKS.keys()


def test_the_chat_models_configuration_can_be_run() -> None:
    config = load(EXAMPLES / "calculator" / "chat.yaml")
    assert config.data.chat_template and load_environment(config.data.environment).name == "calculator"

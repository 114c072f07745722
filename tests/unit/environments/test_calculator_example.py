"""The tool-use example's answers and prompts."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.calculator.environment import environment, judge, make_prompts
from roadstead.config import load
from roadstead.environments.calculator import calculate
from roadstead.environments.protocol import Response, Transcript, Turn
from roadstead.environments.rewards import load_environment

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


@pytest.mark.parametrize("name", ["arithmetic", "calculator", "guessing"])
def test_an_examples_configuration_can_be_run(name: str) -> None:
    assert load_environment(load(EXAMPLES / name / "run.yaml").data.environment).name == name

"""Arithmetic with a calculator at hand, for a chat model; short.py is for the demo's.

Owns: what a final answer is worth, and the prompts. Never touches: tokens, models, files; the tool is Roadstead's.
Invariant: a reward depends on the row and the model's last turn alone.
A crash leaves: nothing, it is pure.
"""

from __future__ import annotations

import random
import re

from roadstead.environments.calculator import calculate
from roadstead.environments.protocol import Reward, Row, Transcript
from roadstead.environments.tools import CALCULATOR, ToolUse

_NUMBER = re.compile(r"-?[0-9]+")


def environment() -> ToolUse:
    return ToolUse("calculator", (CALCULATOR,), judge)


def judge(row: Row, transcript: Transcript) -> Reward:
    """1.0 if the last number of a finished answer is `row["answer"]`; commas between digits are ignored."""
    numbers = _NUMBER.findall(transcript.response.replace(",", "")) if transcript.finish_reason == "stop" else []
    correct = bool(numbers) and numbers[-1] == row["answer"]
    return Reward(float(correct), {"correct": float(correct)})


def make_prompts(count: int, seed: int) -> list[dict[str, str]]:
    """`count` rows of `prompt_id`, `prompt` and `answer`, which `seed` decides."""
    rng = random.Random(seed)
    rows = []
    for i in range(count):
        expression = f"{rng.randint(100, 9999)}*{rng.randint(100, 9999)}-{rng.randint(100, 999_999)}"
        rows.append({"prompt_id": f"calc-{i}", "prompt": f"What is {expression}?", "answer": calculate(expression)})
    return rows

"""Addition of small numbers: the task of the demo.

Owns: which prompts exist, which responses are well formed, what a response is worth.
Never touches: tokens, models, files. The example's warm-up takes operands and response forms from here.
Invariant: a reward depends on the row and the response alone; the same count and seed give the same prompts.
A crash leaves: nothing, it is pure.

A response is the sum alone ("42") or the sum after the units' sum ("7+5=12;42").
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import Any

from roadstead.environments.rewards import Reward

FIRST_OPERANDS = range(10, 85)
SECOND_OPERANDS = range(1, 16)

_RESPONSE = re.compile(r"(?:[0-9]+\+[0-9]+=[0-9]+;)?([0-9]+)")


class ArithmeticEnvironment:
    """Single turn: `row["prompt"]` is a sum such as "17+5=", `row["answer"]` its value in digits, "22"."""

    name = "arithmetic"

    def reward(self, row: Mapping[str, Any], response: str, finish_reason: str) -> Reward:
        """Total: 1.0 if a well-formed response ends in the right answer, 0.0 for anything else.

        Form alone earns nothing: in a group without a right answer, it would be all there is to learn from.

        response: text without special tokens; white space around it is ignored, inside it is not.
        finish_reason: "stop" if the model ended by itself. Anything else, such as "length", is worth 0: a
        right number with digits still to come is no answer, and ending is a part of what is learned.
        Components `correct` and `format` are 0.0 or 1.0. Raises KeyError if the row has no `answer`.
        """
        answer = str(row["answer"])
        match = _RESPONSE.fullmatch(response.strip()) if finish_reason == "stop" else None
        well_formed = match is not None
        correct = match is not None and match.group(1) == answer
        return Reward(float(correct), {"correct": float(correct), "format": float(well_formed)})


def worked_response(first: int, second: int, answer: int) -> str:
    """`answer` after the sum of the operands' units: (17, 5, 22) gives "7+5=12;22"."""
    first_units, second_units = first % 10, second % 10
    return f"{first_units}+{second_units}={first_units + second_units};{answer}"


def make_prompts(count: int, seed: int) -> list[dict[str, str]]:
    """`count` distinct rows of `prompt_id`, `prompt` and `answer`, in an order that `seed` decides.

    A prompt's id names its operands, so it is the same under every seed.
    Raises ValueError if `count` is negative or more than the task has prompts (1125).
    """
    pairs = [(first, second) for first in FIRST_OPERANDS for second in SECOND_OPERANDS]
    if not 0 <= count <= len(pairs):
        raise ValueError(f"count is {count}; the task has {len(pairs)} distinct prompts, ask for 0 to {len(pairs)}")
    return [
        {"prompt_id": f"add-{first}-{second}", "prompt": f"{first}+{second}=", "answer": str(first + second)}
        for first, second in random.Random(seed).sample(pairs, count)
    ]

"""The calculator for the demo's tiny model, which knows characters only: `<4831+2956>` is answered by `7787;`.

Owns: the short format of calls and results, and the demo's prompts. Never touches: models, files.
Invariant: every character that the environment says is in the tokenizer's vocabulary, and a sum has as many digits as
its operands, so that all prompts, calls and results are of one length.
A crash leaves: nothing, it is pure.

It shows how to give `ToolUse` a format of your own.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from examples.calculator.environment import judge
from roadstead.environments.protocol import Observation
from roadstead.environments.tools import CALCULATOR, Call, Outcome, Tool, ToolUse

OPERANDS = range(1000, 5000)
"""Far more sums than the model could learn to do in its head, in warm-up and run together."""

TURNS = 3
"""A call, another one if that failed, an answer."""


class ShortFormat:
    """One tool, so a call needs no name; what went wrong with one is `error;`, whatever it was."""

    def instructions(self, tools: Sequence[Tool]) -> str:
        return ""

    def parse(self, text: str) -> list[Call]:
        calls = []
        for piece in text.split("<")[1:]:
            expression, closed, _ = piece.partition(">")
            calls.append(Call(CALCULATOR.name, {"expression": expression}, None if closed else "< without >"))
        return calls

    def answer(self, outcomes: Sequence[Outcome]) -> Observation:
        return Observation("".join(f"{o.text if o.status == 'ok' else 'error'};" for o in outcomes), role="tool")


def environment() -> ToolUse:
    return ToolUse("calculator", (CALCULATOR,), judge, ShortFormat())


def make_prompts(count: int, seed: int) -> list[dict[str, str]]:
    """`count` rows of `prompt_id`, `prompt` and `answer`, which `seed` decides."""
    rng = random.Random(seed)
    rows = []
    for i in range(count):
        first, second = rng.choice(OPERANDS), rng.choice(OPERANDS)
        rows.append({"prompt_id": f"sum-{i}", "prompt": f"{first}+{second}=", "answer": str(first + second)})
    return rows

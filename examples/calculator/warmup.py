"""Supervised warm-up: from random weights to a model that knows what a call looks like, and seldom gets one right.

Owns: the episodes that are imitated. Never touches: files, the global random state.
Invariant: model weights after the warm-up depend on the weights before and the seed alone (one thread).
A crash leaves: a half-trained model in memory, nothing else.

Two phases, as in the arithmetic's. First the calculator is mostly called, called well, and its result repeated; now
and then the sum is done in the head, rightly, but the sums are too large for the model to learn that. Then, briefly,
most answers come from the head, and calls and answers are careless.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

from examples.arithmetic.tokenizer import EOS, encode
from examples.arithmetic.warmup import CAREFUL_STEPS, Example, fit
from examples.calculator.short import OPERANDS, TURNS
from roadstead.environments.calculator import CalculationError, calculate


class Teacher(NamedTuple):
    """Probabilities of what a turn does."""

    calls: float
    """It calls the calculator, while there is no result; else it answers."""
    slips: float
    """A call or a repeated result has a slip in it."""


CAREFUL = Teacher(0.8, 0.1)  # with slips in calls, or the model never sees how to call again after an error
CARELESS = Teacher(0.45, 0.45)


def warm_up(model: Any, seed: int, progress: Callable[[float, str], None]) -> None:
    """Train `model` in place; see `fit`."""

    def example(rng: random.Random, step: int) -> Example:
        return _episode(rng, CAREFUL if step < CAREFUL_STEPS else CARELESS)

    fit(model, seed, example, progress)


def _episode(rng: random.Random, teacher: Teacher) -> Example:
    """One episode's tokens, with the model's own marked."""
    expression, total = _sum(rng)
    tokens = encode(f"{expression}=")
    learned = [False] * len(tokens)
    result: str | None = None
    for turn in range(TURNS):
        calling = result is None and turn + 1 < TURNS and rng.random() < teacher.calls
        slipping = rng.random() < teacher.slips
        if calling:
            said = _slip_call(rng, f"<{expression}>") if slipping else f"<{expression}>"
        elif result is not None:
            said = _slip_digit(rng, result) if slipping else result
        else:
            said = total
        ids = [*encode(said), EOS]
        tokens += ids
        learned += [True] * len(ids)
        if not calling:
            break
        result = _result(said)
        heard = encode(f"{result or 'error'};")
        tokens += heard
        learned += [False] * len(heard)
    return tokens, learned


def _sum(rng: random.Random) -> tuple[str, str]:
    first, second = rng.choice(OPERANDS), rng.choice(OPERANDS)
    return f"{first}+{second}", str(first + second)


def _slip_call(rng: random.Random, call: str) -> str:
    """A wrong digit, no closing mark, or something that is no expression."""
    kind = rng.randrange(3)
    if kind == 0:
        return _slip_digit(rng, call)
    return call.removesuffix(">") if kind == 1 else call.replace("+", "+*")


def _slip_digit(rng: random.Random, text: str) -> str:
    """Another digit in the place of one, but for a first one: no number begins with 0."""
    places = [i for i in range(1, len(text)) if text[i].isdigit() and text[i - 1].isdigit()]
    place = rng.choice(places)
    return f"{text[:place]}{rng.choice([d for d in '0123456789' if d != text[place]])}{text[place + 1 :]}"


def _result(call: str) -> str | None:
    """What the calculator says, or None."""
    try:
        return calculate(call[1:-1]) if call.endswith(">") else None
    except CalculationError:
        return None

"""Supervised warm-up: from random weights to a model that can add but is careless.

Owns: the demonstrations, and the optimizer steps over these and other tasks' examples. Never touches: files, the
global random state.
Invariant: model weights after the warm-up depend on the weights before and the seed alone (one thread).
A crash leaves: a half-trained model in memory, nothing else.

Two phases. First every demonstration is right, until the model has mostly learned to add. Then, briefly, most
are wrong by a little, and more of the short ones than of the worked ones. What comes out still ranks the
right answer first, but samples it only now and then: a policy with something to learn from its own samples,
and with a reason to prefer working over guessing. Right answers alone would leave nothing for RL to show.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from examples.arithmetic.tokenizer import EOS, PAD, encode
from roadstead.environments.arithmetic import FIRST_OPERANDS, SECOND_OPERANDS, worked_response

CAREFUL_STEPS = 400
CARELESS_STEPS = 50
BATCH = 32
CAREFUL_LEARNING_RATE = 4e-3
CARELESS_LEARNING_RATE = 8e-4

_IGNORE = -100  # cross_entropy's own mark for "no target"
_SLIPS = (-10, -2, -1, 1, 2, 10)
"""What a careless answer is off by: a digit misread or a carry forgotten."""


class Teacher(NamedTuple):
    """Probabilities that a demonstration is right, by its form; half of all demonstrations are worked."""

    right_short: float
    right_worked: float


CAREFUL = Teacher(1.0, 1.0)
CARELESS = Teacher(0.2, 0.5)


Example: TypeAlias = tuple[list[int], list[bool]]
"""Token ids, and which of them are to be learned."""


def warm_up(model: Any, seed: int, progress: Callable[[float, str], None]) -> None:
    """Train `model` in place; see `fit`."""

    def example(rng: random.Random, step: int) -> Example:
        prompt, response = _demonstration(rng, CAREFUL if step < CAREFUL_STEPS else CARELESS)
        return [*encode(prompt), *encode(response), EOS], [False] * len(prompt) + [True] * (len(response) + 1)

    fit(model, seed, example, progress)


def fit(
    model: Any, seed: int, example: Callable[[random.Random, int], Example], progress: Callable[[float, str], None]
) -> None:
    """Imitate what `example` gives at each of CAREFUL_STEPS, then CARELESS_STEPS; in place.

    progress: called with the fraction done (0 to 1) and a text, every 20 steps.
    """
    import torch

    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.01, fused=True)
    model.train()
    total = CAREFUL_STEPS + CARELESS_STEPS
    for step in range(total):
        for group in optimizer.param_groups:
            group["lr"] = _learning_rate(step)
        tokens, targets = (torch.tensor(rows) for rows in _batch([example(rng, step) for _ in range(BATCH)]))
        logits = model(input_ids=tokens, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=_IGNORE)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 20 == 0:
            progress((step + 1) / total, f"warm-up step {step + 1} of {total}, loss {loss.item():.2f}")


def _learning_rate(step: int) -> float:
    if step >= CAREFUL_STEPS:
        return CARELESS_LEARNING_RATE
    ramp = min(1.0, (step + 1) / 20)
    cosine = 0.5 * (1.0 + math.cos(math.pi * step / CAREFUL_STEPS))
    return CAREFUL_LEARNING_RATE * ramp * (0.15 + 0.85 * cosine)


def _demonstration(rng: random.Random, teacher: Teacher) -> tuple[str, str]:
    """A prompt and a response to imitate."""
    first, second = rng.choice(FIRST_OPERANDS), rng.choice(SECOND_OPERANDS)
    worked = rng.random() < 0.5
    answer = first + second
    if rng.random() >= (teacher.right_worked if worked else teacher.right_short):
        answer += rng.choice(_SLIPS)
    return f"{first}+{second}=", worked_response(first, second, answer) if worked else str(answer)


def _batch(examples: list[Example]) -> tuple[list[list[int]], list[list[int]]]:
    """Token ids and targets, both [examples, longest]; a target is the next token, if to be learned, or _IGNORE."""
    tokens = [ids for ids, _ in examples]
    targets = [
        [token if learn else _IGNORE for token, learn in zip(ids[1:], learned[1:], strict=True)] + [_IGNORE]
        for ids, learned in examples
    ]
    longest = max(map(len, tokens))
    # Padding on the right needs no attention mask: attention is causal, and no target is there.
    return (
        [row + [PAD] * (longest - len(row)) for row in tokens],
        [row + [_IGNORE] * (longest - len(row)) for row in targets],
    )

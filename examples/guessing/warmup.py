"""Supervised warm-up: from random weights to a model that knows the game's form but mostly ignores the hints.

Owns: the games that are imitated. Never touches: files, the global random state.
Invariant: model weights after the warm-up depend on the weights before and the seed alone (one thread).
A crash leaves: a half-trained model in memory, nothing else.

First the games are mostly played well, by halves, so that the model learns what hints mean; then, briefly, mostly at
random. What comes out still ranks the good guess first in many places, and seldom takes it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from examples.arithmetic.tokenizer import EOS, encode
from examples.arithmetic.warmup import CAREFUL_STEPS, Example, fit
from examples.guessing.environment import GUESSES, HIGHEST, LOWEST, PROMPT, hint

CAREFUL, CARELESS = 0.8, 0.3
"""Probability that a guess halves what the hints so far allow; else it is any number."""


def warm_up(model: Any, seed: int, progress: Callable[[float, str], None]) -> None:
    """Train `model` in place; see `fit`."""

    def game(rng: random.Random, step: int) -> Example:
        return _game(rng, CAREFUL if step < CAREFUL_STEPS else CARELESS)

    fit(model, seed, game, progress)


def _game(rng: random.Random, heed: float) -> Example:
    """One game's tokens, with the model's own marked."""
    secret = rng.randint(LOWEST, HIGHEST)
    low, high = LOWEST, HIGHEST
    tokens = encode(PROMPT)
    learned = [False] * len(tokens)
    for turn in range(GUESSES):
        guess = (low + high) // 2 if rng.random() < heed else rng.randint(LOWEST, HIGHEST)
        said = [*encode(str(guess)), EOS]
        tokens += said
        learned += [True] * len(said)
        if guess == secret or turn + 1 == GUESSES:
            break
        if guess < secret:
            low = max(low, guess + 1)
        else:
            high = min(high, guess - 1)
        heard = encode(hint(guess, secret))
        tokens += heard
        learned += [False] * len(heard)
    return tokens, learned

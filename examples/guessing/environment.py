"""Number guessing: the environment keeps a number, the model guesses, the environment says higher or lower.

Owns: the game's rules and its prompts. Never touches: tokens, models, files.
Invariant: an episode depends on its row and the model's guesses alone.
A crash leaves: nothing, it is pure.
"""

from __future__ import annotations

import random
from typing import Any

from roadstead.environments.protocol import Response, Reward, Row, Transcript

LOWEST, HIGHEST = 1, 15
GUESSES = 4
"""A search by halves finds any of 15 numbers in 4 guesses; guessing at random finds a quarter of them."""

PROMPT = f"{LOWEST}-{HIGHEST}:"


class GuessingEnvironment:
    """`row["secret"]` is the number. Set `rollout.max_turns` to GUESSES: more turns would make the game easier."""

    name = "guessing"

    def reset(self, row: Row, seed: int) -> GuessingEpisode:
        return GuessingEpisode(int(row["secret"]))


class GuessingEpisode:
    start = PROMPT

    def __init__(self, secret: int) -> None:
        self._secret = secret
        self._guesses: list[int | None] = []

    def step(self, response: Response) -> str | None:
        guess = _number(response.text)
        self._guesses.append(guess)
        return None if guess == self._secret else hint(guess, self._secret)

    def reward(self, transcript: Transcript) -> Reward:
        """1.0 if the number was found, else 0.0. `guesses` and `numbers` (the share that were numbers) are recorded."""
        found = self._secret in self._guesses
        numbers = sum(guess is not None for guess in self._guesses)
        return Reward(
            float(found),
            {
                "found": float(found),
                "guesses": float(len(self._guesses)),
                "numbers": numbers / max(1, len(self._guesses)),
            },
        )


def hint(guess: int | None, secret: int) -> str:
    """What a wrong guess is answered with."""
    if guess is None:
        return "no number;"
    return "higher;" if secret > guess else "lower;"


def make_prompts(count: int, seed: int) -> list[dict[str, Any]]:
    """`count` rows of `prompt_id`, `prompt` and `secret`; the same prompt, numbers that `seed` decides."""
    rng = random.Random(seed)
    return [{"prompt_id": f"guess-{i}", "prompt": PROMPT, "secret": rng.randint(LOWEST, HIGHEST)} for i in range(count)]


def _number(text: str) -> int | None:
    text = text.strip()
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(HIGHEST))):
        return None
    return int(text) if LOWEST <= int(text) <= HIGHEST else None

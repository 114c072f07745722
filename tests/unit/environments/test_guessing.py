"""The multi-turn example's game."""

from __future__ import annotations

import pytest

from examples.arithmetic.tokenizer import EOS, VOCABULARY
from examples.guessing.environment import GUESSES, HIGHEST, LOWEST, GuessingEnvironment, make_prompts
from examples.guessing.warmup import _game
from roadstead.environments.protocol import Response, Transcript


def _play(secret: int, guesses: list[str]) -> tuple[list[str | None], dict[str, float]]:
    episode = GuessingEnvironment().reset({"secret": secret}, 0)
    said = [episode.step(Response(guess, (1,))) for guess in guesses]
    return said, episode.reward(Transcript((), "stop")).components


def test_hints_lead_to_the_number_and_end_there() -> None:
    said, components = _play(11, ["8", "12", " 10 ", "11"])
    assert said == ["higher;", "lower;", "higher;", None]
    assert components == {"found": 1.0, "guesses": 4.0, "numbers": 1.0}


@pytest.mark.parametrize("guess", ["", "x", "0", "16", "-3", "8.0", "007", "8 9", "\u0668", "9" * 5000])
def test_what_is_no_guess_is_told_so_and_costs_a_turn(guess: str) -> None:
    said, components = _play(7, [guess, "8"])
    assert said == ["no number;", "lower;"] and components == {"found": 0.0, "guesses": 2.0, "numbers": 0.5}


@pytest.mark.parametrize("secret", range(LOWEST, HIGHEST + 1))
def test_halving_finds_every_number(secret: int) -> None:
    low, high = LOWEST, HIGHEST
    episode = GuessingEnvironment().reset({"secret": secret}, 0)
    for _ in range(GUESSES):
        guess = (low + high) // 2
        said = episode.step(Response(str(guess), (1,)))
        low, high = (guess + 1, high) if said == "higher;" else (low, guess - 1)
    assert episode.reward(Transcript((), "max_turns")).total == 1.0


def test_prompts_depend_on_the_seed_alone() -> None:
    assert make_prompts(64, 1) == make_prompts(64, 1) != make_prompts(64, 2)
    assert {row["secret"] for row in make_prompts(500, 0)} == set(range(LOWEST, HIGHEST + 1))


def test_the_warm_up_imitates_the_game_as_it_is_played() -> None:
    """What is learned are the guesses and their ends; hints are read only, as in a run."""
    import random

    texts = {index: text for text, index in VOCABULARY.items()}
    for seed in range(30):
        tokens, learned = _game(random.Random(seed), 0.5)
        turns = "".join(texts[t] if keep else "|" for t, keep in zip(tokens, learned, strict=True)).split("|")
        guesses = [turn for turn in turns if turn]
        assert 1 <= len(guesses) <= GUESSES and all(guess.endswith(texts[EOS]) for guess in guesses)
        assert all(LOWEST <= int(guess.removesuffix(texts[EOS])) <= HIGHEST for guess in guesses)

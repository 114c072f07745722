"""What the runs of some features are about: prompts that teach nothing, and prompts that can't begin.

Owns: which prompts those are. Never touches: the checks, which apply the run's own filters again and look at what was
stored. Invariant: a function of the prompt's id alone, so that a retry, or another attempt, meets the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from roadstead.environments.protocol import Episode, Reward, Row, Transcript
from roadstead.environments.single_turn import SingleTurn

HELD_OUT = ("e0", "e1", "e2")
"""Prompts of evaluations; training has p0 to p39."""


def _number(row: Row) -> int:
    return int(row["prompt_id"][1:])


def _digits(row: Row, said: Transcript) -> Reward:
    """The share of digits, so that advantages are not all 0; of every seventh prompt all members get the same."""
    share = sum(c.isdigit() for c in said.response) / max(1, len(said.response))
    return Reward(0.5 if _number(row) % 7 == 3 else share, {"digits": share})


class FlatEnvironment(SingleTurn):
    """Single turn; six of forty prompts have constant rewards."""

    def __init__(self) -> None:
        super().__init__("flat", _digits)


class BrokenEnvironment(SingleTurn):
    """And three of forty can't begin: p11, p24 and p37."""

    def __init__(self) -> None:
        super().__init__("broken", _digits)

    def reset(self, row: Row, seed: int) -> Episode:
        if _number(row) % 13 == 11:
            raise RuntimeError(f"{row['prompt_id']} can't begin")
        return super().reset(row, seed)


def every_fifth(rows: Sequence[dict[str, Any]]) -> str | None:
    """A filter."""
    return "a multiple of five" if _number(rows[0]) % 5 == 0 else None

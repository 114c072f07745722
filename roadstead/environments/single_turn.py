"""Single turn: a prompt, a response, a reward.

Owns: the adapter from a reward to an environment. Never touches: tokens, deadlines.
Invariant: the prompt is the row's `prompt`, and the first response ends the episode.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from roadstead.environments.protocol import Response, Reward, Row, Transcript

Judge: TypeAlias = Callable[[Row, Transcript], Reward | float | Awaitable[Reward | float]]
"""A reward function: sync or async, of the prompt's row and the finished transcript."""


class ResponseReward(Protocol):
    """An object that judges one response; enough for a single-turn environment."""

    name: str

    def reward(self, row: Row, response: str, finish_reason: str) -> Reward:
        """response: without special tokens; finish_reason: stop | length."""
        ...


@dataclass(frozen=True)
class SingleTurn:
    """An environment whose episodes are one response long."""

    name: str
    judge: Judge

    @classmethod
    def of(cls, rewarder: ResponseReward) -> SingleTurn:
        return cls(rewarder.name, lambda row, said: rewarder.reward(row, said.response, said.finish_reason))

    def reset(self, row: Row, seed: int) -> _Response:
        return _Response(row, self.judge)


class NoReward(SingleTurn):
    """Single turn without a reward of its own: `data.rewards` says what a response is worth."""

    def __init__(self) -> None:
        super().__init__("single_turn", lambda row, said: 0.0)


@dataclass(frozen=True)
class _Response:
    row: Row
    judge: Judge

    @property
    def start(self) -> str:
        prompt: str = self.row["prompt"]
        return prompt

    def step(self, response: Response) -> None:
        return None

    def reward(self, transcript: Transcript) -> Reward | float | Awaitable[Reward | float]:
        return self.judge(self.row, transcript)

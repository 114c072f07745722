"""What a finished trajectory is worth.

Owns: the sum of reward components, and what becomes of one that fails. Never touches: tokens, engines, the store.
Invariant: a score's total is a finite number or missing, never NaN; a component that failed is missing, with its
reason, and takes the total with it.
A crash leaves: nothing; a reward is a function of the dataset row and the transcript, and is computed again.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from roadstead.config import RewardSection
from roadstead.environments.calls import CallFailed, bounded
from roadstead.environments.loading import load_environment, load_judge
from roadstead.environments.protocol import Reward, Row, Transcript
from roadstead.environments.single_turn import Judge

__all__ = ["Reward", "RewardFunction", "Score", "failed", "load_environment", "load_rewards", "score"]


@dataclass(frozen=True)
class RewardFunction:
    """One weighted component of the reward, beside the environment's own."""

    name: str
    judge: Judge
    weight: float
    """0: recorded only, and its failure excludes nothing."""
    timeout_s: float


def load_rewards(sections: Sequence[RewardSection]) -> list[RewardFunction]:
    """The functions of `data.rewards`. Raises ValueError that names the path and what failed."""
    return [RewardFunction(s.name, load_judge(s.function), s.weight, s.timeout_s) for s in sections]


@dataclass(frozen=True)
class Score:
    total: float | None
    """None: some part failed; the trajectory is left out of advantages and loss."""
    components: dict[str, float | None]
    """Each component before its weight; None: it failed. A failure adds a key `error: <what>: <why>`, so that the
    reasons of a run can be counted from its batches."""


def failed(reason: str) -> Score:
    """The score of a trajectory that can't be judged."""
    return Score(None, {f"error: {reason}": None})


async def score(
    own: Callable[[Transcript], Any],
    timeout_s: float,
    functions: Sequence[RewardFunction],
    row: Row,
    transcript: Transcript,
) -> Score:
    """`own` (the episode's reward, within timeout_s) plus the weighted sum of `functions`, all run at once.

    Never raises for what they do: an exception, a missed deadline, a value that is no finite number is a failure.
    """

    async def judge(function: RewardFunction) -> float | str:
        try:
            value = await bounded(function.name, function.timeout_s, function.judge, row, transcript)
            return _number(function.name, value)
        except CallFailed as error:
            return str(error)

    async def judge_own() -> Reward | str:
        try:
            return _reward(await bounded("reward", timeout_s, own, transcript))
        except CallFailed as error:
            return str(error)

    first, others = await asyncio.gather(judge_own(), asyncio.gather(*map(judge, functions)))
    components: dict[str, float | None] = {}
    total: float | None = None
    if isinstance(first, str):
        components[f"error: {first}"] = None
    else:
        components.update(first.components)
        total = first.total
    for function, value in zip(functions, others, strict=True):
        components[function.name] = None if isinstance(value, str) else value
        if isinstance(value, str):
            components[f"error: {value}"] = None
            total = None if function.weight else total
        elif total is not None:
            total += function.weight * value
    if total is not None and not math.isfinite(total):
        components[f"error: the weighted sum is {total}"] = None
        total = None
    return Score(total, components)


def _reward(value: Any) -> Reward:
    if not isinstance(value, Reward):
        return Reward(_number("reward", value))
    return Reward(
        _number("reward", value.total),
        {str(name): _number(f"reward: {name}", part) for name, part in value.components.items()},
    )


def _number(what: str, value: Any) -> float:
    """Raises CallFailed for what is no finite number: NaN would turn a whole group's advantages into NaN."""
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise CallFailed(f"{what}: returned {type(value).__name__}, not a number") from None
    if not math.isfinite(number):
        raise CallFailed(f"{what}: returned {number}, not a finite number")
    return number

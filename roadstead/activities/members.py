"""The members of a group, played and judged: what rollouts and evaluations have in common.

Owns: how episodes of one row begin, and the columns that are a member's own. Never touches: the store, the ledger,
which engine and which seeds are used.
Invariant: all members begin with the same prompt; what an environment's steps, its tools and rewards do wrong is data
of the member that it happened to.
A crash leaves: nothing.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import json
import time
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from roadstead.activities.trajectory import play
from roadstead.config import RolloutSection
from roadstead.environments.calls import bounded
from roadstead.environments.protocol import Environment, Episode, Message, Row, Transcript
from roadstead.environments.rewards import RewardFunction, Score, failed, score
from roadstead.environments.text import TextCodec
from roadstead.inference.engine import Engine

T = TypeVar("T")


@dataclass(frozen=True)
class Players:
    """Plays rows of one environment. Used by many groups at once."""

    environment: Environment
    codec: TextCodec
    rewards: Sequence[RewardFunction]
    limits: RolloutSection

    async def begin(self, row: Row, seed: int, members: int) -> tuple[list[Episode], tuple[int, ...]]:
        """An episode a member, all of one seed, and the ids of their prompt. Each gets a row of its own, so that none
        can change another's. Raises CallFailed; ValueError when the prompts differ."""
        timeout_s = self.limits.environment_timeout_s
        episodes: list[Episode] = await together(
            bounded("reset", timeout_s, self.environment.reset, copy.deepcopy(dict(row)), seed) for _ in range(members)
        )
        first, *others = (self.codec.encode(episode.start) for episode in episodes)
        if any(tokens != first for tokens in others):
            raise ValueError(
                f"{self.environment.name}: the members of a group begin with different prompts, so their rewards "
                "can't be compared; let `reset` depend on row and seed alone"
            )
        return episodes, first

    async def member(
        self,
        engine: Engine,
        row: Row,
        episode: Episode,
        prompt: tuple[int, ...],
        request_id: str,
        seed: int,
        cut_at: float | None = None,
    ) -> dict[str, Any]:
        """One trajectory's own columns of the batch schema. cut_at and errors: those of `play`."""
        played = await play(engine, self.codec, episode, prompt, self.limits, request_id, seed, cut_at)
        if played.failure is None:
            result = await self.judge(row, episode, played.transcript)
        else:
            result = failed(played.failure)
        return {
            **played.trajectory.columns(),
            **judged(result),
            "response_text": self.codec.decode(played.trajectory.token_ids),
            "finish_reason": played.transcript.finish_reason,
            "seed": seed,
        }

    async def judge(self, row: Row, episode: Episode, transcript: Transcript) -> Score:
        timeout_s = self.limits.environment_timeout_s
        return await score(episode.reward, timeout_s, self.rewards, copy.deepcopy(dict(row)), transcript)


async def together(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All at once; the first failure cancels the others, in the engine too, and is raised as it is."""
    all_of_them = list(calls)
    return await first_of(len(all_of_them), all_of_them)


async def first_of(wanted: int, calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The first `wanted` results to come, in the order of `calls`; the other calls are cancelled, in the engine too.

    A failure before that cancels all and is raised as it is: whether a retry helps is decided by its own type.
    """
    tasks: list[asyncio.Future[T]] = [asyncio.ensure_future(call) for call in calls]
    finished: list[asyncio.Future[T]] = []
    try:
        while len(finished) < wanted:
            done, _ = await asyncio.wait(set(tasks) - set(finished), return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=lambda task: tasks.index(task)):
                task.result()
                finished.append(task)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return [task.result() for task in sorted(finished[:wanted], key=lambda task: tasks.index(task))]


def judged(result: Score) -> dict[str, Any]:
    """The columns of a reward."""
    return {"reward": result.total, "reward_components": list(result.components.items())}


def seed_of(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")


def as_text(start: str | Sequence[Message]) -> str:
    """Messages as JSON: who said what can be read back."""
    return start if isinstance(start, str) else json.dumps([dict(message) for message in start], ensure_ascii=False)


def sampling(limits: RolloutSection) -> dict[str, Any]:
    """The column of that name."""
    return {
        "temperature": limits.temperature,
        "top_p": limits.top_p,
        "top_k": -1,
        "max_tokens": limits.max_tokens,
        "logprobs_mode": "processed",
    }


def microseconds() -> int:
    """UTC, since the epoch."""
    return time.time_ns() // 1000

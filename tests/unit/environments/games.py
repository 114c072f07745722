"""Environments and reward functions that tests find by import path or play against a scripted engine."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

from roadstead.environments.protocol import Observation, Response, Reward, Row, Transcript
from roadstead.environments.single_turn import SingleTurn

release = threading.Event()
"""Set at the end of a test that hung a thread on it."""


def length(row: Row, transcript: Transcript) -> float:
    return float(len(transcript.response))


async def slow_half(row: Row, transcript: Transcript) -> float:
    await asyncio.sleep(0.001)
    return 0.5


def not_a_number(row: Row, transcript: Transcript) -> float:
    return float("nan")


def infinite(row: Row, transcript: Transcript) -> float:
    return float("inf")


def words(row: Row, transcript: Transcript) -> Any:
    return "1.0"


def divides(row: Row, transcript: Transcript) -> float:
    return 1 / 0


def leaves(row: Row, transcript: Transcript) -> float:
    raise SystemExit(3)


async def never(row: Row, transcript: Transcript) -> float:
    await asyncio.sleep(3600)
    return 1.0


def hangs(row: Row, transcript: Transcript) -> float:
    release.wait(30)
    return 1.0


def spoils(row: Row, transcript: Transcript) -> float:
    row.clear()  # type: ignore[attr-defined]
    return 1.0


def factory() -> SingleTurn:
    return SingleTurn("made", length)


NEITHER = 3


class Talker:
    """Says what it is told to, one entry a turn; an exception is raised, a number slept. Ends after the last."""

    name = "talker"

    def __init__(self, *says: Any, begin: Callable[[int], Any] = lambda count: "begin") -> None:
        self.says, self.begin, self.episodes = says, begin, list["TalkerEpisode"]()
        self.seeds: list[int] = []

    async def reset(self, row: Row, seed: int) -> TalkerEpisode:
        self.seeds.append(seed)
        self.episodes.append(TalkerEpisode(self.says, self.begin(len(self.episodes))))
        return self.episodes[-1]


class TalkerEpisode:
    def __init__(self, says: tuple[Any, ...], start: Any) -> None:
        self.start, self.says = start, list(says)
        self.heard: list[Response] = []

    def step(self, response: Response) -> Observation | str | None:
        self.heard.append(response)
        said = self.says.pop(0) if self.says else None
        if isinstance(said, Exception):
            raise said
        if isinstance(said, float):
            time.sleep(said)
            return None
        return said  # type: ignore[no-any-return]

    def reward(self, transcript: Transcript) -> Reward:
        return Reward(float(len(self.heard)), {"heard": float(len(self.heard))})

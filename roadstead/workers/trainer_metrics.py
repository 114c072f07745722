"""What the trainer is doing, looked at from beside it: a companion of the train worker.

Owns: the metrics made from the trainer's `status`. Never touches: the trainer.
Invariant: every second is in exactly one phase; a phase that nobody knows is `other`, a trainer that does not answer
is `down`.
A crash leaves: nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Sequence
from pathlib import Path

from roadstead.config import RunConfig
from roadstead.metrics import catalogue
from roadstead.metrics.registry import Metrics
from roadstead.training.client import TrainerClient
from roadstead.training.protocol import Status, TrainerUnavailable

_LOOK_S = 1.0
_ANSWER_S = 5.0
"""Imports at its start hold the trainer's interpreter for a second or two."""


class TrainerNumbers:
    """From one status after the other to values of metrics."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._phase, self._looked = "down", -1.0

    def look(self, status: Status | None, now: float) -> None:
        """status: None when nobody answered. now: Unix seconds, the clock of the status's own `since`."""
        since = now if status is None else min(now, status["since"])
        phase = "down" if status is None else _phase(status["phase"])
        self._spend(phase, since, now)
        metrics = self._metrics
        metrics.set(catalogue.TRAINER_UP, status is not None and status["version"] is not None)
        if status is None:
            return
        version, boot_s = status["version"], status["boot_seconds"]
        metrics.set(catalogue.TRAINER_VERSION, float("nan") if version is None else version)
        metrics.set(catalogue.TRAINER_INCARNATION, status["incarnation"])
        metrics.set(catalogue.TRAINER_SINCE, now - since)
        if boot_s is not None:
            metrics.set(catalogue.TRAINER_BOOT, boot_s)

    def _spend(self, phase: str, since: float, now: float) -> None:
        """The time since the last look: what was before `since` belongs to the phase that was seen then."""
        if self._looked >= 0:
            began = min(max(since, self._looked), now)
            self._metrics.add(catalogue.TRAINER_PHASE, max(0.0, began - self._looked), phase=self._phase)
            self._metrics.add(catalogue.TRAINER_PHASE, now - began, phase=phase)
        self._phase, self._looked = phase, now


def _phase(text: str) -> str:
    """`replay of step 3 ...` is replay, `boot: ...` is boot."""
    word = text.split(" ")[0].rstrip(":")
    return word if word in catalogue.TRAINER_PHASE.labels["phase"] else "other"


def watches(config: RunConfig, socket: Path, metrics: Metrics) -> Sequence[Awaitable[None]]:
    """What runs beside the train worker: nothing when nobody asks for metrics. socket: the trainer's."""
    return [_watch(socket, metrics)] if config.metrics.enabled else []


async def _watch(socket: Path, metrics: Metrics) -> None:
    trainer, numbers = TrainerClient(socket, hang_s=_ANSWER_S), TrainerNumbers(metrics)
    while True:
        try:
            status = await trainer.status()
        except (TrainerUnavailable, OSError, ValueError):  # down, or cut off in the middle of its answer
            status = None
        numbers.look(status, time.time())
        await asyncio.sleep(_LOOK_S)

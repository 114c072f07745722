"""The engines as the rollout worker sees them, and where their own metrics are: a companion of the rollout worker.

Owns: the gauges of the fleet, the times of its weight watchers, a scrape target for each engine. Never touches: the
engines.
Invariant: everything is read from what the fleet knows anyway; no engine is asked for anything.
A crash leaves: the engines' target files, which stay right: the engines run on.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from roadstead.config import RunConfig
from roadstead.inference.fleet import Fleet
from roadstead.metrics import catalogue
from roadstead.metrics.registry import Metrics
from roadstead.metrics.server import VLLM, target
from roadstead.workers.local import EnginePlace

_LOOK_S = 1.0
_FIRST, _LAST = "poll", "read back"
"""Stages of the weight watcher that a reload begins and ends with."""


class ReloadTimes:
    """Told by one engine's weight watcher how long each stage took."""

    def __init__(self, metrics: Metrics, engine: str) -> None:
        self._metrics, self._engine, self._spent = metrics, engine, 0.0
        metrics.begin(catalogue.RELOAD_STAGE_SECONDS, engine=engine)
        metrics.begin(catalogue.RELOAD_SECONDS, engine=engine)
        metrics.set(catalogue.RELOAD_TIMESTAMP, 0, engine=engine)

    def __call__(self, stage: str, seconds: float) -> None:
        if stage not in catalogue.RELOAD_STAGE_SECONDS.labels["stage"]:
            return  # a stage that is no part of a reload
        self._metrics.observe(catalogue.RELOAD_STAGE_SECONDS, seconds, engine=self._engine, stage=stage)
        self._spent = seconds if stage == _FIRST else self._spent + seconds
        if stage == _LAST:
            self._metrics.observe(catalogue.RELOAD_SECONDS, self._spent, engine=self._engine)
            self._metrics.set(catalogue.RELOAD_TIMESTAMP, time.time(), engine=self._engine)


def show(fleet: Fleet, metrics: Metrics) -> None:
    for engine, groups in fleet.in_flight.items():
        metrics.set(catalogue.ENGINE_IN_FLIGHT, groups, engine=engine)
    for engine, version in fleet.versions.items():
        metrics.set(catalogue.ENGINE_VERSION, float("nan") if version is None else version, engine=engine)
        metrics.set(catalogue.ENGINE_UP, engine not in fleet.ejected, engine=engine)
    metrics.set(catalogue.FLEET_WAITING, fleet.waiting)


def watches(
    config: RunConfig, fleet: Fleet, places: Sequence[EnginePlace], folder: Path, metrics: Metrics
) -> Sequence[Awaitable[None]]:
    """What runs beside the rollout worker: nothing when nobody asks for metrics."""
    return [_watch(config.name, fleet, places, folder, metrics)] if config.metrics.enabled else []


async def _watch(run: str, fleet: Fleet, places: Sequence[EnginePlace], folder: Path, metrics: Metrics) -> None:
    with contextlib.ExitStack() as stack:
        for place in places:
            labels = {"run": run, "role": "engine", "engine": place.engine_id}
            stack.enter_context(target(folder, place.engine_id, urlsplit(place.url).netloc, VLLM, labels))
        while True:
            show(fleet, metrics)
            await asyncio.sleep(_LOOK_S)

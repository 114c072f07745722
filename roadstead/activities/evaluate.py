"""evaluate_group: samples prompts from exactly one version and stages them, beside the batch log.

Owns: the order of generating, checking and staging. Never touches: the ledger, groups, batches, what an engine serves.
Invariant: what is staged was sampled by the evaluated version, every token of it, by the engine's own word; anything
else is refused and generated again. The seed of a sample is a function of the run's seed, the prompt and the member, so
versions are compared on equal draws.
A crash leaves: prompts staged so far, which the next execution finds before it generates anything.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from temporalio import activity

from roadstead.activities.members import Players, as_text, microseconds, sampling, seed_of, together
from roadstead.activities.working import beating
from roadstead.environments.calls import CallFailed
from roadstead.environments.prompts import DatasetError, PromptSet
from roadstead.inference.engine import Engine, EngineError
from roadstead.inference.evaluation_hold import VersionPassed
from roadstead.storage import evals
from roadstead.storage.evals import EvaluationSettings
from roadstead.storage.keys import RunKeys
from roadstead.storage.objects import ObjectStore
from roadstead.workflows.evaluation_messages import EvaluationGroupOrder
from roadstead.workflows.messages import EvaluationOrder


class WrongVersion(RuntimeError):
    """A sample has tokens of another version: the engine's weights moved under it."""


class Engines(Protocol):
    """The fleet, as an evaluation sees it."""

    @property
    def stage(self) -> str: ...

    def lease_exactly(self, version: int, timeout_s: float) -> AbstractAsyncContextManager[Engine]:
        """An engine that reports exactly `version`. Raises VersionPassed, EngineStalled."""
        ...


class Evaluate:
    def __init__(
        self,
        store: ObjectStore,
        keys: RunKeys,
        engines: Engines,
        prompts: PromptSet,
        players: Players,
        settings: EvaluationSettings,
    ) -> None:
        self._store, self._keys, self._engines = store, keys, engines
        self._prompts, self._players, self._settings = prompts, players, settings

    @activity.defn
    async def open_evaluation(self, order: EvaluationOrder) -> bool:
        """Wait until an engine serves the version. False: its evaluation is on record, there is nothing to do."""
        if order.prompts != len(self._prompts):
            raise DatasetError(
                f"evaluation.prompts: this machine's file has {len(self._prompts)} rows, the run was begun with "
                f"{order.prompts}; give it the same file"
            )
        async with beating(lambda: self._engines.stage):
            if await asyncio.to_thread(evals.is_closed, self._store, self._keys, order.version):
                return False
            async with self._engines.lease_exactly(order.version, order.timeout_s):
                return True

    @activity.defn
    async def evaluate_group(self, order: EvaluationGroupOrder) -> None:
        """Every prompt is tried before a failure of one of them is raised; a retry generates what is missing."""
        failure: Exception | None = None
        async with beating(lambda: self._engines.stage):
            for position in range(order.first, order.first + order.count):
                try:
                    await self._evaluate(order.evaluation, position)
                except VersionPassed:
                    raise
                except (EngineError, CallFailed, WrongVersion, ValueError) as error:
                    failure = failure or error
        if failure is not None:
            raise failure

    async def _evaluate(self, order: EvaluationOrder, position: int) -> None:
        there = await asyncio.to_thread(
            evals.is_staged, self._store, self._keys, self._settings, order.version, position
        )
        if there:
            return
        async with self._engines.lease_exactly(order.version, order.timeout_s) as engine:
            rows = await self._generate(engine, order, position)
        _check_versions(rows, order.version)
        await asyncio.to_thread(evals.stage, self._store, self._keys, self._settings, evals.table_from_rows(rows))

    async def _generate(self, engine: Engine, order: EvaluationOrder, position: int) -> list[dict[str, Any]]:
        settings, started = self._settings, microseconds()
        row = self._prompts.at(position, settings.seed)
        name = f"{settings.seed}/evaluation/{position}"
        episodes, tokens = await self._players.begin(row, seed_of(name), settings.group_size)
        request = f"e{order.version}-p{position}"
        members = await together(
            self._players.member(
                *(engine, row, episode, tokens),
                f"{request}-m{member}-{activity.info().attempt}",
                seed_of(f"{name}/{member}"),
            )
            for member, episode in enumerate(episodes)
        )
        info = await engine.info()
        shared = {
            "run_id": self._keys.run_id,
            "attempt": order.attempt,
            "version": order.version,
            "position": position,
            "prompt_id": str(row["prompt_id"]),
            "prompt_text": as_text(episodes[0].start),
            "prompt_token_ids": list(tokens),
            "engine_id": info.engine_id,
            "engine_build": info.build,
            "sampling": sampling(self._players.limits),
            "environment": self._players.environment.name,
            "started_at": started,
            "finished_at": microseconds(),
        }
        return [
            {**{name: columns[name] for name in columns if name in evals.EVAL_SCHEMA.names}, **shared, "member": member}
            for member, columns in enumerate(members)
        ]


def _check_versions(rows: Sequence[Mapping[str, Any]], version: int) -> None:
    for row in rows:
        seen = {span["version"] for name in ("version_spans", "kv_version_spans") for span in row.get(name) or ()}
        if seen != {version}:
            raise WrongVersion(
                f"prompt {row['prompt_id']}, member {row['member']}: sampled by versions {sorted(seen)}, expected "
                f"{version} alone; refused"
            )

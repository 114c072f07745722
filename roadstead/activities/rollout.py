"""rollout_group: generates one group, judges it, stages it on S3.

Owns: the order of these three, the group's time-out, and the columns that its members share. Never touches: the
ledger, batches, the weights an engine serves.
Invariant: no token is older than the version the group was admitted under: generation starts when an engine itself
reports that version or a newer one, and all members of the group use that engine. What is staged carries the engine's
own spans, and what the filters say of it.
A crash leaves: nothing, or the staged group, which the next execution finds before it generates anything.
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

from temporalio import activity
from temporalio.exceptions import ApplicationError

from roadstead.activities.members import Players, as_text, first_of, judged, microseconds, sampling, seed_of
from roadstead.activities.trajectory import NothingGenerated
from roadstead.activities.working import beating
from roadstead.config import RunConfig
from roadstead.environments.external import ExternalMember, check_prompt, external_members
from roadstead.environments.filters import Filters
from roadstead.environments.prompts import PromptSet
from roadstead.environments.protocol import Environment, Episode, Row
from roadstead.environments.rewards import load_rewards
from roadstead.environments.text import TextCodec
from roadstead.inference.engine import Engine, EngineInfo
from roadstead.inference.fleet import Fleet
from roadstead.storage import groups
from roadstead.storage.keys import RunKeys
from roadstead.storage.objects import ObjectStore
from roadstead.storage.references import StagedGroup, group_id
from roadstead.workflows.messages import DISCARDED, GroupOrder

# When no engine reaches the admitted version for so long they are stuck, not slow: fail, and say where.
_ENGINE_WAIT_S = 300.0
_OVERDUE = "GroupOverdue"
_EXTERNAL = EngineInfo("external", "", 0)
"""Stands for the engine in rows that none of ours generated."""


class RolloutGroup:
    def __init__(
        self,
        config: RunConfig,
        store: ObjectStore,
        keys: RunKeys,
        fleet: Fleet,
        prompts: PromptSet,
        environment: Environment,
        codec: TextCodec,
    ) -> None:
        self._config, self._store, self._keys = config, store, keys
        self._fleet, self._prompts = fleet, prompts
        limits = config.rollout
        # Without partial rollouts an update waits for the turns in flight, which may take a group's whole time.
        self._engine_wait_s = _ENGINE_WAIT_S + (0.0 if limits.partial_rollout else limits.group_timeout_s)
        self._players = Players(environment, codec, load_rewards(config.data.rewards), config.rollout)
        self._filters = Filters(config.filters, config.rollout.environment_timeout_s)

    @activity.defn
    async def rollout_group(self, order: GroupOrder) -> StagedGroup:
        group = group_id(order.position)
        async with beating(lambda: self._fleet.stage):
            staged = await asyncio.to_thread(groups.find, self._store, self._keys, group, order.attempt)
            if staged is None:
                rows = await self._rows(order, group)
                verdict = dataclasses.asdict(await self._filters.judge(rows))
                verdict["aborted_members"] = self._config.rollout.extra_members if rows[0]["from_live_policy"] else 0
                staged = await asyncio.to_thread(groups.stage, self._store, self._keys, rows, **verdict)
        return staged

    async def _rows(self, order: GroupOrder, group: str) -> list[dict[str, Any]]:
        row, limits = self._prompts.at(order.position, self._config.seed), self._config.rollout
        given = external_members(row, self._players.codec, limits.group_size, order.version)
        if given is not None:
            return await self._from_elsewhere(order, row, given)
        due = asyncio.get_running_loop().time() + limits.group_timeout_s
        truncate = limits.on_timeout == "truncate"
        try:
            async with (
                asyncio.timeout_at(None if truncate else due),
                self._fleet.lease(order.version, self._engine_wait_s) as engine,
            ):
                return await self._generate(engine, order, row, due if truncate else None)
        except (TimeoutError, NothingGenerated) as error:
            raise self._overdue(group) from error

    async def _generate(
        self, engine: Engine, order: GroupOrder, row: Row, cut_at: float | None
    ) -> list[dict[str, Any]]:
        started, limits, name = microseconds(), self._config.rollout, self._seed_name(order)
        group, attempt = group_id(order.position), activity.info().attempt
        episodes, prompt = await self._players.begin(row, seed_of(name), limits.group_size + limits.extra_members)
        members = await first_of(
            limits.group_size,
            (
                self._players.member(
                    engine, row, episode, prompt, f"{group}-m{m}-{attempt}", seed_of(f"{name}/{m}"), cut_at
                )
                for m, episode in enumerate(episodes)
            ),
        )
        return self._columns(order, row, episodes[0], prompt, started, await engine.info(), members)

    async def _from_elsewhere(self, order: GroupOrder, row: Row, given: list[ExternalMember]) -> list[dict[str, Any]]:
        """The trajectories that the row brings; those without a reward get the environment's."""
        started = microseconds()
        episodes, prompt = await self._players.begin(row, seed_of(self._seed_name(order)), len(given))
        check_prompt(row, prompt)
        members = []
        for episode, external in zip(episodes, given, strict=True):
            result = external.score or await self._players.judge(row, episode, external.transcript)
            members.append({**external.columns, **judged(result), "seed": 0})
        return self._columns(order, row, episodes[0], prompt, started, _EXTERNAL, members)

    def _seed_name(self, order: GroupOrder) -> str:
        """What all seeds of a group are made of: a retry draws the same."""
        return f"{self._config.seed}/{order.position}"

    def _overdue(self, group: str) -> ApplicationError:
        limits = self._config.rollout
        discard = limits.on_timeout == "discard"
        return ApplicationError(
            f"{group}: not generated within rollout.group_timeout_s {limits.group_timeout_s:g} "
            f"(on_timeout: {limits.on_timeout}); {self._fleet.stage}",
            type=DISCARDED if discard else _OVERDUE,
            non_retryable=discard,
        )

    def _columns(
        self,
        order: GroupOrder,
        row: Row,
        episode: Episode,
        prompt: tuple[int, ...],
        started: int,
        engine: EngineInfo,
        members: list[dict[str, Any]],
    ) -> list[dict[str, Any]]:
        """The group's rows: what its members share, and each one's own."""
        shared = {
            "run_id": self._keys.run_id,
            "attempt": order.attempt,
            "group_id": group_id(order.position),
            "prompt_id": str(row["prompt_id"]),
            "prompt_text": as_text(episode.start),
            "prompt_token_ids": list(prompt),
            # Of any token, but environment tokens carry the version of a model token: it is the oldest that sampled.
            "v_traj": min(span["version"] for columns in members for span in columns["version_spans"]),
            "engine_id": engine.engine_id,
            "engine_build": engine.build,
            "sampling": sampling(self._config.rollout),
            "environment": self._players.environment.name,
            "from_live_policy": engine is not _EXTERNAL,
            "reserved_at": order.reserved_at,
            "started_at": started,
            "finished_at": microseconds(),
        }
        return [{**shared, "member": member, **columns} for member, columns in enumerate(members)]

"""rollout_group: generates one group, rewards it, stages it on S3.

Owns: the order of these three, and the group's rows. Never touches: the ledger, batches, the weights an engine serves.
Invariant: no token is older than the version the group was admitted under: generation starts when the engine
itself reports that version or a newer one. What is staged carries the engine's own spans. What an environment's
steps, its tools and rewards do wrong is data of the member that it happened to, never the end of the group.
A crash leaves: nothing, or the staged group, which the next execution finds before it generates anything.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import json
import time
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from temporalio import activity

from roadstead.activities.trajectory import play
from roadstead.activities.working import beating
from roadstead.config import RunConfig
from roadstead.environments.calls import bounded
from roadstead.environments.prompts import PromptSet
from roadstead.environments.protocol import Environment, Episode, Message, Row
from roadstead.environments.rewards import failed, load_rewards, score
from roadstead.environments.text import TextCodec
from roadstead.inference.engine import Engine
from roadstead.inference.watcher import WeightWatcher
from roadstead.storage import groups
from roadstead.storage.keys import RunKeys
from roadstead.storage.objects import ObjectStore
from roadstead.storage.references import StagedGroup, group_id
from roadstead.workflows.messages import GroupOrder

T = TypeVar("T")

# An engine that does not reach the admitted version for so long is stuck, not slow: fail, and say where.
_ENGINE_WAIT_S = 300.0


class RolloutGroup:
    def __init__(
        self,
        config: RunConfig,
        store: ObjectStore,
        keys: RunKeys,
        engine: Engine,
        watcher: WeightWatcher,
        prompts: PromptSet,
        environment: Environment,
        codec: TextCodec,
    ) -> None:
        self._config, self._store, self._keys = config, store, keys
        self._engine, self._watcher = engine, watcher
        self._prompts, self._environment, self._codec = prompts, environment, codec
        self._rewards = load_rewards(config.data.rewards)

    @activity.defn
    async def rollout_group(self, order: GroupOrder) -> StagedGroup:
        group = group_id(order.position)
        async with beating(lambda: self._watcher.stage):
            staged = await asyncio.to_thread(groups.find, self._store, self._keys, group, order.attempt)
            if staged is None:
                await self._watcher.at_least(order.version, _ENGINE_WAIT_S)
                rows = await self._generate(order, group)
                staged = await asyncio.to_thread(groups.stage, self._store, self._keys, rows)
        return staged

    async def _generate(self, order: GroupOrder, group: str) -> list[dict[str, Any]]:
        row = self._prompts.at(order.position, self._config.seed)
        started, seeds = _microseconds(), self._seeds(order.position)
        episodes = await self._reset(row, order.position)
        tokens = self._prompt(episodes)
        members = await self._all(
            self._member(row, episode, tokens, f"{group}-m{member}-{activity.info().attempt}", seed)
            for member, (episode, seed) in enumerate(zip(episodes, seeds, strict=True))
        )
        info = await self._engine.info()
        r = self._config.rollout
        shared = {
            "run_id": self._keys.run_id,
            "attempt": order.attempt,
            "group_id": group,
            "prompt_id": str(row["prompt_id"]),
            "prompt_text": _as_text(episodes[0].start),
            "prompt_token_ids": list(tokens),
            # Of any token, but environment tokens carry the version of a model token: it is the oldest that sampled.
            "v_traj": min(span["version"] for columns in members for span in columns["version_spans"]),
            "engine_id": info.engine_id,
            "engine_build": info.build,
            "sampling": {
                "temperature": r.temperature,
                "top_p": 1.0,
                "top_k": -1,
                "max_tokens": r.max_tokens,
                "logprobs_mode": "processed",
            },
            "environment": self._environment.name,
            "from_live_policy": True,
            "reserved_at": order.reserved_at,
            "started_at": started,
            "finished_at": _microseconds(),
        }
        return [
            {**shared, "member": member, "seed": seed, **columns}
            for member, (seed, columns) in enumerate(zip(seeds, members, strict=True))
        ]

    async def _reset(self, row: Row, position: int) -> list[Episode]:
        """An episode a member, all of one seed. Each gets a row of its own, so that none can change another's."""
        seed = _seed(f"{self._config.seed}/{position}")
        timeout_s = self._config.rollout.environment_timeout_s
        episodes: list[Episode] = await self._all(
            bounded("reset", timeout_s, self._environment.reset, copy.deepcopy(dict(row)), seed)
            for _ in range(self._config.rollout.group_size)
        )
        return episodes

    def _prompt(self, episodes: list[Episode]) -> tuple[int, ...]:
        first, *others = (self._codec.encode(episode.start) for episode in episodes)
        if any(tokens != first for tokens in others):
            raise ValueError(
                f"{self._environment.name}: the members of a group begin with different prompts, so their rewards "
                "can't be compared; let `reset` depend on row and seed alone"
            )
        return first

    async def _member(
        self, row: Row, episode: Episode, prompt: tuple[int, ...], request_id: str, seed: int
    ) -> dict[str, Any]:
        limits = self._config.rollout
        played = await play(self._engine, self._codec, episode, prompt, limits, request_id, seed)
        if played.failure is None:
            result = await score(
                episode.reward,
                limits.environment_timeout_s,
                self._rewards,
                copy.deepcopy(dict(row)),
                played.transcript,
            )
        else:
            result = failed(played.failure)
        return {
            **played.trajectory.columns(),
            "response_text": self._codec.decode(played.trajectory.token_ids),
            "reward": result.total,
            "reward_components": list(result.components.items()),
            "finish_reason": played.transcript.finish_reason,
        }

    async def _all(self, calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
        """All members at once; the first failure cancels the others, in the engine too, and is raised as it is."""
        try:
            async with asyncio.TaskGroup() as tasks:
                members = [tasks.create_task(call) for call in calls]
        except ExceptionGroup as failures:
            # Whether a retry helps is decided by the failure's own type.
            raise failures.exceptions[0] from failures
        return [member.result() for member in members]

    def _seeds(self, position: int) -> list[int]:
        """One seed a member, a function of the run's seed, the prompt's position and the member alone."""
        return [_seed(f"{self._config.seed}/{position}/{m}") for m in range(self._config.rollout.group_size)]


def _seed(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")


def _as_text(start: str | Sequence[Message]) -> str:
    """Messages as JSON: who said what can be read back."""
    return start if isinstance(start, str) else json.dumps([dict(message) for message in start], ensure_ascii=False)


def _microseconds() -> int:
    return time.time_ns() // 1000

"""rollout_group: generates one group, rewards it, stages it on S3.

Owns: the order of these three. Never touches: the ledger, batches, the weights an engine serves.
Invariant: no token is older than the version the group was admitted under: generation starts when the engine
itself reports that version or a newer one. What is staged carries the engine's own spans.
A crash leaves: nothing, or the staged group, which the next execution finds before it generates anything.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from typing import Any

from temporalio import activity

from roadstead.activities.working import beating
from roadstead.config import RunConfig
from roadstead.environments.prompts import PromptSet
from roadstead.environments.rewards import Environment
from roadstead.environments.text import TextCodec
from roadstead.inference.engine import Engine, GenerateRequest, Generation
from roadstead.inference.watcher import WeightWatcher
from roadstead.staleness import head_version, tail_version
from roadstead.storage import groups
from roadstead.storage.keys import RunKeys
from roadstead.storage.objects import ObjectStore
from roadstead.storage.references import StagedGroup, group_id
from roadstead.workflows.messages import GroupOrder

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
        prompt = self._prompts.at(order.position, self._config.seed)
        tokens = self._codec.encode(prompt["prompt"])
        started, seeds = _microseconds(), self._seeds(order.position)
        r = self._config.rollout
        generations = await self._sample(
            [
                GenerateRequest(
                    request_id=f"{group}-m{member}-{activity.info().attempt}",
                    prompt_token_ids=tokens,
                    max_tokens=r.max_tokens,
                    temperature=r.temperature,
                    seed=seed,
                    ignore_eos=r.ignore_eos,
                )
                for member, seed in enumerate(seeds)
            ]
        )
        info = await self._engine.info()
        shared = {
            "run_id": self._keys.run_id,
            "attempt": order.attempt,
            "group_id": group,
            "prompt_id": str(prompt["prompt_id"]),
            "prompt_text": prompt["prompt"],
            "prompt_token_ids": list(tokens),
            "v_traj": min(span.version for g in generations for span in g.version_spans),
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
            {**shared, "member": member, "seed": seed, **self._member(prompt, generation)}
            for member, (seed, generation) in enumerate(zip(seeds, generations, strict=True))
        ]

    async def _sample(self, requests: list[GenerateRequest]) -> list[Generation]:
        """All members at once; the first failure cancels the others in the engine and is raised as it is."""
        try:
            async with asyncio.TaskGroup() as tasks:
                members = [tasks.create_task(self._engine.generate(request)) for request in requests]
        except ExceptionGroup as failures:
            # Whether a retry helps is decided by the failure's own type.
            raise failures.exceptions[0] from failures
        return [member.result() for member in members]

    def _member(self, prompt: Any, generation: Generation) -> dict[str, Any]:
        text = self._codec.decode(generation.token_ids)
        reward = self._environment.reward(prompt, text, generation.finish_reason)
        mask = [True] * len(generation.token_ids)
        return {
            "response_text": text,
            "response_token_ids": list(generation.token_ids),
            "loss_mask": mask,
            "behavior_logprobs": list(generation.logprobs),
            "version_spans": [{"version": s.version, "start": s.start, "end": s.end} for s in generation.version_spans],
            "head_version": head_version(generation.version_spans, mask),
            "tail_version": tail_version(generation.version_spans, mask),
            "reward": reward.total,
            "reward_components": list(reward.components.items()),
            "finish_reason": generation.finish_reason,
            "turns": [{"role": "assistant", "start": 0, "end": len(generation.token_ids)}],
        }

    def _seeds(self, position: int) -> list[int]:
        """One seed a member, a function of the run's seed, the prompt's position and the member alone."""
        return [
            int.from_bytes(hashlib.sha256(f"{self._config.seed}/{position}/{member}".encode()).digest()[:4], "big")
            for member in range(self._config.rollout.group_size)
        ]


def _microseconds() -> int:
    return time.time_ns() // 1000

"""record_dead_letter: puts a group that could not be generated on record, with its prompt and the reason."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

from temporalio import activity

from roadstead.environments.prompts import PromptSet
from roadstead.storage import dead_letters
from roadstead.storage.dead_letters import DeadLetter
from roadstead.storage.keys import RunKeys
from roadstead.storage.objects import ObjectStore
from roadstead.storage.references import group_id
from roadstead.workflows.messages import DeadLetterOrder


class RecordDeadLetter:
    def __init__(self, store: ObjectStore, keys: RunKeys, prompts: PromptSet, seed: int) -> None:
        """seed: of the run, which decides the order of the prompts."""
        self._store, self._keys, self._prompts, self._seed = store, keys, prompts, seed

    @activity.defn
    async def record_dead_letter(self, order: DeadLetterOrder) -> None:
        group = order.group
        row = self._prompts.at(group.position, self._seed)
        letter = DeadLetter(
            run_id=self._keys.run_id,
            attempt=group.attempt,
            group_id=group_id(group.position),
            prompt_id=str(row["prompt_id"]),
            prompt=row["prompt"],
            version=group.version,
            attempts=order.attempts,
            reason=order.reason,
            at=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        await asyncio.to_thread(dead_letters.write, self._store, self._keys, letter)

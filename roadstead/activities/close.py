"""close_attempt: records how an attempt ended and what it left, when it ends in order."""

from __future__ import annotations

from datetime import UTC, datetime

from temporalio import activity

from roadstead.activities.working import in_thread
from roadstead.storage import runs
from roadstead.storage.keys import RunKeys
from roadstead.storage.objects import ObjectStore
from roadstead.storage.runs import AttemptEnd
from roadstead.workflows.messages import AttemptClose


class CloseAttempt:
    def __init__(self, store: ObjectStore, keys: RunKeys) -> None:
        self._store, self._keys = store, keys

    @activity.defn
    async def close_attempt(self, close: AttemptClose) -> None:
        await in_thread(self._close, close)

    def _close(self, close: AttemptClose) -> None:
        runs.check_current(self._store, self._keys, close.attempt)
        now = datetime.now(UTC).isoformat(timespec="seconds")
        runs.end_attempt(
            self._store, self._keys, AttemptEnd(run_id=self._keys.run_id, ended_at=now, **close.model_dump())
        )

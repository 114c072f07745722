"""persist_batch: assembles what the run announced and commits it, before the optimizer sees it.

Invariant: what is committed keeps the bound, judged by the spans that the engines reported and not by any counter.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pyarrow as pa
from temporalio import activity

from roadstead.activities.working import in_thread
from roadstead.config import RunConfig
from roadstead.storage import batches, groups, runs
from roadstead.storage.batches import BatchCommit, BatchGroup
from roadstead.storage.keys import RunKeys
from roadstead.storage.objects import ObjectStore
from roadstead.storage.schema import table_from_rows
from roadstead.training.advantages import group_advantages
from roadstead.workflows.messages import BatchOrder, CommittedBatch


class BoundExceeded(RuntimeError):
    """A batch holds a token older than the bound allows; it is not written and the run fails."""


class PersistBatch:
    def __init__(self, config: RunConfig, store: ObjectStore, keys: RunKeys) -> None:
        self._config, self._store, self._keys = config, store, keys

    @activity.defn
    async def persist_batch(self, order: BatchOrder) -> CommittedBatch:
        return await in_thread(self._persist, order)

    def _persist(self, order: BatchOrder) -> CommittedBatch:
        runs.check_current(self._store, self._keys, order.attempt)
        record = self._committed(order) or self._commit(order)
        runs.check_current(self._store, self._keys, order.attempt)
        stats = batches.read_stats(self._store, record)
        rewards = [r for r in stats["reward"].to_pylist() if r is not None]
        return CommittedBatch(
            step=record.step,
            digest=record.digest,
            rows=record.rows,
            response_tokens=record.response_tokens,
            max_staleness=record.max_staleness,
            mean_reward=sum(rewards) / len(rewards) if rewards else None,
        )

    def _committed(self, order: BatchOrder) -> BatchCommit | None:
        """The step's commit if it is this very batch, from an earlier execution or an earlier attempt.

        Its rows are not made again: when they were, the batch was not committed yet or not taken yet.
        """
        record = batches.find(self._store, self._keys, order.step)
        mine = [(e.slot, e.group_id, e.attempt, e.digest) for e in order.entries]
        if record is None or [(g.slot, g.group_id, g.attempt, g.digest) for g in record.groups] != mine:
            return None
        return record

    def _commit(self, order: BatchOrder) -> BatchCommit:
        rows = [row for entry in order.entries for row in self._rows(order, entry.slot)]
        table = table_from_rows(rows, batch=True)
        _check_bound(table, order)
        return batches.commit(
            self._store,
            self._keys,
            table,
            attempt=order.attempt,
            groups=tuple(
                BatchGroup(slot=e.slot, group_id=e.group_id, attempt=e.attempt, digest=e.digest, v_traj=e.v_traj)
                for e in order.entries
            ),
            cut=order.cut,
        )

    def _rows(self, order: BatchOrder, slot: int) -> list[dict[str, Any]]:
        entry = order.entries[slot]
        rows: list[dict[str, Any]] = groups.read(
            self._store, self._keys, entry.group_id, entry.attempt, entry.digest
        ).to_pylist()
        advantages = group_advantages([row["reward"] for row in rows], self._config.training.normalize_advantages)
        for row, advantage in zip(rows, advantages, strict=True):
            row.update(
                step=order.step,
                slot=entry.slot,
                staleness=order.step - row["head_version"],
                advantage=advantage,
                occupied_at=entry.occupied_at,
            )
        return rows


def _check_bound(table: pa.Table, order: BatchOrder) -> None:
    over: dict[str, int] = defaultdict(int)
    for group, staleness, live in zip(
        table["group_id"].to_pylist(),
        table["staleness"].to_pylist(),
        table["from_live_policy"].to_pylist(),
        strict=True,
    ):
        if live and staleness > order.max_staleness:
            over[group] = max(over[group], staleness)
    if over:
        raise BoundExceeded(
            f"step {order.step}: staleness over max_staleness {order.max_staleness} in {dict(over)}; nothing was "
            "written. The ledger and the engines' spans disagree: this is a bug, keep the run's folder"
        )

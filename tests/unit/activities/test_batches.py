"""persist_batch and publish_weights on a store in memory: what is written, in which order, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from temporalio.testing import ActivityEnvironment

from roadstead.activities.persist import BoundExceeded, PersistBatch
from roadstead.activities.publish import PublishWeights
from roadstead.config import parse
from roadstead.storage import batches, groups, steps, train_rows, weights
from roadstead.storage.keys import RunKeys
from roadstead.storage.objects import ObjectCorrupt, ObjectMissing
from roadstead.storage.references import Cut
from roadstead.storage.train_rows import TrainResult
from roadstead.workflows.messages import BatchEntry, BatchOrder, PublishOrder
from tests.support.memory_store import MemoryStore
from tests.support.rows import NOW, group_rows
from tests.unit.storage.test_commit import metrics, reference

KEYS = RunKeys("runs", "r")
CONFIG = parse({"name": "r", "model": {"path": "m"}, "data": {"prompts": "p.jsonl"}, "training": {"steps": 9}}, "test")


def staged_order(store: MemoryStore, *, step: int, versions: list[int], bound: int = 2) -> BatchOrder:
    entries = []
    for slot, version in enumerate(versions):
        group = groups.stage(store, KEYS, group_rows(f"g{slot:08d}", version=version, seed=slot, members=4))
        entries.append(
            BatchEntry(
                slot=slot,
                group_id=group.group_id,
                attempt=1,
                digest=group.digest,
                v_traj=version,
                occupied_at=NOW + 3,
            )
        )
    return BatchOrder(
        step=step,
        attempt=1,
        max_staleness=bound,
        entries=tuple(entries),
        cut=Cut(cursor=len(entries), ledger={}, terminal={entry.group_id: "trained" for entry in entries}),
    )


async def persist(store: MemoryStore, order: BatchOrder) -> Any:
    return await ActivityEnvironment().run(PersistBatch(CONFIG, store, KEYS).persist_batch, order)


async def test_a_batch_is_its_groups_in_slot_order_with_relative_advantages_and_observed_staleness() -> None:
    store = MemoryStore()
    committed = await persist(store, staged_order(store, step=3, versions=[1, 3, 2]))
    record = batches.find(store, KEYS, 3)
    assert record is not None and record.digest == committed.digest and committed.max_staleness == 2
    rows = batches.read(store, record).to_pylist()
    assert [(row["slot"], row["member"]) for row in rows] == [(s, m) for s in range(3) for m in range(4)]
    assert [row["staleness"] for row in rows[::4]] == [2, 0, 1]
    # Rewards are 0, 1, 0, 1 in each group: mean 0.5, standard deviation 0.5.
    assert [round(row["advantage"], 3) for row in rows[:4]] == [-1.0, 1.0, -1.0, 1.0]
    assert committed.mean_reward == 0.5


async def test_persisting_again_writes_nothing_and_answers_the_same() -> None:
    store = MemoryStore()
    order = staged_order(store, step=3, versions=[1, 3])
    first = await persist(store, order)
    before = dict(store.objects)
    assert await persist(store, order) == first and store.objects == before


async def test_a_token_over_the_bound_refuses_the_batch_and_writes_nothing() -> None:
    store = MemoryStore()
    order = staged_order(store, step=4, versions=[1, 4])
    before = dict(store.objects)
    with pytest.raises(BoundExceeded, match=r"g00000000.*3"):
        await persist(store, order)
    assert store.objects == before


async def test_a_staged_group_that_was_tampered_with_is_refused() -> None:
    store = MemoryStore()
    order = staged_order(store, step=3, versions=[2, 3])
    other = MemoryStore()
    groups.stage(other, KEYS, group_rows("g00000001", version=3, seed=9, members=4))
    store.objects[KEYS.group("g00000001", 1)] = other.objects[KEYS.group("g00000001", 1)]
    with pytest.raises(ObjectCorrupt, match="g00000001"):
        await persist(store, order)
    assert batches.find(store, KEYS, 3) is None


async def test_publication_writes_manifest_hint_record_in_this_order() -> None:
    store = MemoryStore()
    zero = weights.publish(store, KEYS, reference(0, "w0"), parent=None, batch_digest=None)
    order = staged_order(store, step=0, versions=[0, 0])
    committed = await persist(store, order)
    publish = PublishWeights(store, KEYS)
    both = PublishOrder(batch=order, committed=committed)
    with pytest.raises(ObjectMissing, match="no train result"):
        await ActivityEnvironment().run(publish.publish_weights, both)
    train_rows.write(
        store,
        KEYS,
        [],
        TrainResult(step=0, batch_digest=committed.digest, weights=reference(1, "w1"), metrics=metrics()),
    )
    store.mutations.clear()
    summary = await ActivityEnvironment().run(publish.publish_weights, both)
    assert store.mutations == [KEYS.weights_manifest(1), KEYS.latest_weights, KEYS.step_record(0)]
    record = steps.find(store, KEYS, 0)
    assert record is not None and summary.weights_digest == record.weights_out == "w1"
    assert record.weights_in == zero.digest and record.terminal == order.cut.terminal and record.cursor == 2
    assert await ActivityEnvironment().run(publish.publish_weights, both) == summary

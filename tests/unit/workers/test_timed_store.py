"""A batch's writes and the reads that prove them are told apart."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from roadstead.metrics.registry import Metrics
from roadstead.storage import batches, groups
from roadstead.storage.batches import BatchGroup
from roadstead.storage.keys import RunKeys
from roadstead.storage.schema import table_from_rows
from roadstead.workers.timed_store import TimedStore
from tests.support.memory_store import MemoryStore
from tests.support.rows import NOW, group_rows

KEYS = RunKeys("runs", "r")


class TimedMemory(TimedStore, MemoryStore):
    def __init__(self, metrics: Metrics) -> None:
        MemoryStore.__init__(self)
        self._metrics, self._written = metrics, set()


def calls(metrics: Metrics) -> dict[str, float]:
    return {
        sample.labels["operation"]: sample.value
        for family in text_string_to_metric_families(metrics.text())
        for sample in family.samples
        if sample.name == "roadstead_batch_store_seconds_count"
    }


def test_reading_groups_writing_a_batch_and_verifying_it() -> None:
    metrics = Metrics("orchestrator")
    store = TimedMemory(metrics)
    rows = group_rows()
    staged = groups.stage(MemoryStore(), KEYS, rows)
    groups.stage(store, KEYS, rows)
    before = calls(metrics)
    groups.read(store, KEYS, staged.group_id, 1, staged.digest)
    assert calls(metrics) == {**before, "read": before["read"] + 1}
    batch = [{**row, "step": 0, "slot": 0, "staleness": 0, "advantage": 0.5, "occupied_at": NOW} for row in rows]
    group = BatchGroup(slot=0, group_id=staged.group_id, attempt=1, digest=staged.digest, v_traj=0)
    batches.commit(store, KEYS, table_from_rows(batch, batch=True), attempt=1, groups=(group,))
    made = {name: count - before[name] for name, count in calls(metrics).items()}
    assert made == {"read": 2, "write": 3, "verify": 3}, (
        "data, stats and commit; the group, and that no commit is there"
    )
    assert store._written == set(), "what was verified is forgotten"

"""The index: the stats of committed batches, extended step by step, rebuilt when it is lost or damaged."""

from __future__ import annotations

import pytest

from roadstead.storage import batches
from roadstead.storage.audit import index
from roadstead.storage.audit.queries import secret
from roadstead.storage.keys import RunKeys
from roadstead.storage.objects import ObjectCorrupt, StoreAddress
from roadstead.storage.parquet import decode
from roadstead.storage.schema import STATS_COLUMNS, table_from_rows
from tests.support.memory_store import MemoryStore
from tests.support.rows import batch_rows

KEYS = RunKeys("runs", "r")


def commit(store: MemoryStore, *steps: int) -> None:
    for step in steps:
        batches.commit(store, KEYS, table_from_rows(batch_rows(step, groups=1), batch=True), attempt=1, groups=())


def held(store: MemoryStore) -> list[int]:
    return decode(store.objects[KEYS.index_rows])["step"].to_pylist()


def test_it_holds_every_committed_row_in_order_and_grows() -> None:
    store = MemoryStore()
    assert index.refresh(store, KEYS) == 0 and KEYS.index_rows not in store.objects
    commit(store, *range(70))
    assert index.refresh(store, KEYS) == 70 and held(store) == [step for step in range(70) for _ in range(2)]
    assert decode(store.objects[KEYS.index_rows]).column_names == list(STATS_COLUMNS)
    commit(store, 70)
    store.mutations.clear()
    assert index.refresh(store, KEYS) == 71 and set(held(store)) == set(range(71))
    assert store.mutations == [KEYS.index_rows]
    assert index.refresh(store, KEYS) == 71 and store.mutations == [KEYS.index_rows], "fresh: nothing is written"


@pytest.mark.parametrize("damage", [b"", b"PAR1", None])
def test_a_damaged_or_lost_index_is_built_again(damage: bytes | None) -> None:
    store = MemoryStore()
    commit(store, 0, 1)
    index.refresh(store, KEYS)
    whole = store.objects.pop(KEYS.index_rows)
    if damage is not None:
        store.objects[KEYS.index_rows] = damage
    assert index.refresh(store, KEYS) == 2 and store.objects[KEYS.index_rows] == whole


def test_an_orphan_is_not_in_it_and_a_changed_stats_file_is_refused() -> None:
    store, other = MemoryStore(), MemoryStore()
    commit(store, 0)
    batches.commit(other, KEYS, table_from_rows(batch_rows(0, tokens=9), batch=True), attempt=1, groups=())
    orphan = {key: body for key, body in other.objects.items() if "_COMMIT" not in key}
    store.objects.update(orphan)
    assert index.refresh(store, KEYS) == 1 and held(store) == [0] * 2
    record = batches.find(store, KEYS, 0)
    assert record is not None
    store.objects[record.stats.key] = next(body for key, body in orphan.items() if "stats" in key)
    with pytest.raises(ObjectCorrupt, match="stats"):
        index.refresh(store, KEYS, rebuild=True)


def test_the_secret_names_the_local_endpoint_and_quotes() -> None:
    text = secret(StoreAddress("b", "http://127.0.0.1:9", access_key="a'b", secret_key="c"))
    assert "'a''b'" in text and "endpoint '127.0.0.1:9'" in text and "use_ssl 'false'" in text and "path" in text
    assert "endpoint" not in secret(StoreAddress("b", access_key="a", secret_key="c"))

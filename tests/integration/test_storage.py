"""The object store on the real S3 server, and the probe that refuses an unsafe one."""

from __future__ import annotations

import concurrent.futures
import uuid

import pytest

from roadstead.storage import batches
from roadstead.storage.batches import BatchConflict
from roadstead.storage.keys import RunKeys
from roadstead.storage.objects import ObjectStore, Put, StoreAddress, StoreError, UnsafeStore
from roadstead.storage.schema import table_from_rows
from tests.support.memory_store import MemoryStore
from tests.support.rows import batch_rows
from tests.support.store_contract import StoreContract


class TestSeaweed(StoreContract):
    def test_the_probe_passes(self, store: ObjectStore) -> None:
        store.probe()

    def test_one_of_many_racing_writers_wins(self, store: ObjectStore, key: str) -> None:
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            outcomes = list(pool.map(lambda i: store.create(key, f"writer {i}".encode()), range(8)))
        assert outcomes.count(Put.CREATED) == 1
        assert store.get(key) == f"writer {outcomes.index(Put.CREATED)}".encode()

    def test_racing_commits_of_different_batches_leave_exactly_one(self, store: ObjectStore) -> None:
        keys = RunKeys("runs", f"race-{uuid.uuid4().hex[:8]}")

        def commit(tokens: int) -> str:
            table = table_from_rows(batch_rows(0, tokens=tokens), batch=True)
            try:
                return batches.commit(store, keys, table, attempt=1, groups=()).digest
            except BatchConflict:
                return "conflict"

        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            outcomes = list(pool.map(commit, [4, 5, 6, 7]))
        record = batches.find(store, keys, 0)
        assert record is not None and outcomes.count("conflict") == 3 and record.digest in outcomes
        assert batches.read(store, record).num_rows == 4

    def test_a_wrong_secret_is_an_error_with_its_reason(self, store: ObjectStore) -> None:
        address = StoreAddress(
            store.address.bucket, store.address.endpoint_url, access_key=store.address.access_key, secret_key="wrong"
        )
        with pytest.raises(StoreError, match="wrong secret key"):
            ObjectStore(address).create("x", b"x")


def test_a_store_that_ignores_conditions_is_refused() -> None:
    class Careless(MemoryStore):
        """Like rclone's and several other S3 gateways: If-None-Match is accepted and ignored."""

        def _create(self, key: str, body: object) -> bool:
            self.objects[key] = body  # type: ignore[assignment]
            return True

        @property
        def _client(self) -> object:  # type: ignore[override]
            return self

        def delete_object(self, **_: object) -> None:
            pass

    with pytest.raises(UnsafeStore, match="If-None-Match"):
        Careless().probe()


def test_a_store_that_is_not_there_is_named() -> None:
    address = StoreAddress("roadstead", "http://127.0.0.1:9", access_key="a", secret_key="b", attempts=1)
    with pytest.raises(StoreError, match=r"127\.0\.0\.1:9"):
        ObjectStore(address).create("x", b"x")

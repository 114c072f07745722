"""The commit protocol on a store that breaks: cured, or a clear error; never a gap, never half a commit.

Everything goes through a fault-injecting proxy in front of the real server; what is there afterwards is read past it.
"""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import uuid
from collections.abc import Iterator
from pathlib import Path

import botocore.auth
import pytest
from tenacity import wait_none

from roadstead.storage import batches, checkpoints, groups, objects, steps, train_rows, weights
from roadstead.storage.batches import BatchGroup
from roadstead.storage.checkpoints import CheckpointManifest
from roadstead.storage.keys import RunKeys
from roadstead.storage.objects import ObjectConflict, ObjectStore, Put, StoreError, sha256_file
from roadstead.storage.schema import table_from_rows
from roadstead.storage.steps import StepRecord
from roadstead.storage.train_rows import TrainResult
from tests.support.rows import batch_rows, group_rows
from tests.support.s3_proxy import Fault, S3Proxy, proxy_in_thread
from tests.unit.storage.test_commit import metrics, reference

ATTEMPTS = 4
WRITES = ("groups/*", "*/data-*", "*/stats-*", "*/_COMMIT.json", "*/train-*", "*/manifest.json", "steps/*")
"""Every object that one step writes, in order."""
COMMITS = ("*/data-*", "*/_COMMIT.json", "steps/*")
"""The first object of a batch, its commit point, and the step's."""
PASSING = (
    *(Fault.SLOW_DOWN, Fault.INTERNAL, Fault.CONFLICT, Fault.RESET_BEFORE, Fault.RESET_AFTER),
    *(Fault.TRUNCATED_UPLOAD, Fault.SHORT_UPLOAD, Fault.DELAY),
)
REMEDIES = {
    Fault.SLOW_DOWN: "throttles",
    Fault.DISK_FULL: "disk or quota is full",
    Fault.ACCESS_DENIED: "check the policy",
    Fault.TIME_SKEWED: "clock is off",
    Fault.RESET_BEFORE: "does not answer",
    Fault.SHORT_UPLOAD: "arrives damaged",
}


@pytest.fixture(scope="module", autouse=True)
def impatient() -> Iterator[None]:
    """The same retries without the waits: botocore would sleep up to 20 s between two."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("botocore.retries.standard.ExponentialBackoff.delay_amount", lambda self, context: 0.01)
        patch.setattr(objects, "_READ_S", 1)
        patch.setattr(objects, "wait_random_exponential", lambda **_: wait_none())
        yield


@pytest.fixture(scope="module")
def between(store: ObjectStore) -> Iterator[S3Proxy]:
    assert store.address.endpoint_url
    with proxy_in_thread(store.address.endpoint_url, stall_s=1.5, delay_s=0.2) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def client(store: ObjectStore, between: S3Proxy, impatient: None) -> ObjectStore:
    """One for all tests: building a boto3 client takes longer than most of them."""
    return ObjectStore(dataclasses.replace(store.address, endpoint_url=between.url, attempts=ATTEMPTS))


@pytest.fixture
def proxy(between: S3Proxy) -> S3Proxy:
    between.heal()
    between.crossings.clear()
    return between


@pytest.fixture
def through(proxy: S3Proxy, client: ObjectStore) -> ObjectStore:
    return client


@pytest.fixture
def keys(store: ObjectStore) -> RunKeys:
    keys = RunKeys("faults", uuid.uuid4().hex[:12])
    weights.publish(store, keys, reference(0, "w0"), parent=None, batch_digest=None)
    return keys


def one_step(store: ObjectStore, keys: RunKeys, step: int = 0) -> StepRecord:
    """The write-ahead log's order: groups, batch, train rows, weights, step record."""
    staged = [groups.stage(store, keys, group_rows(f"g{2 * step + slot:08d}", seed=slot)) for slot in range(2)]
    commit = batches.commit(
        store,
        keys,
        table_from_rows(batch_rows(step), batch=True),
        attempt=1,
        groups=tuple(
            BatchGroup(slot=slot, group_id=g.group_id, attempt=1, digest=g.digest, v_traj=0)
            for slot, g in enumerate(staged)
        ),
    )
    result = train_rows.write(
        store,
        keys,
        [],
        TrainResult(
            step=step, batch_digest=commit.digest, weights=reference(step + 1, f"w{step + 1}"), metrics=metrics()
        ),
    )
    parent = weights.manifest_of(store, keys, step)
    manifest = weights.publish(store, keys, result.weights, parent=parent, batch_digest=commit.digest)
    return steps.write(
        store,
        keys,
        StepRecord(
            run_id=keys.run_id,
            attempt=1,
            step=step,
            batch_digest=commit.digest,
            weights_in=parent.digest,
            weights_out=manifest.digest,
            rows=commit.rows,
            response_tokens=commit.response_tokens,
            max_staleness=commit.max_staleness,
            mean_reward=0.5,
            terminal={g.group_id: "trained" for g in staged},
            ledger={},
            cursor=2 * step + 2,
            metrics=metrics(),
        ),
    )


def assert_whole(store: ObjectStore, keys: RunKeys, step: int = 0) -> None:
    """The step as it must be, whatever the network did: read past the proxy."""
    commit, record = batches.find(store, keys, step), steps.find(store, keys, step)
    assert commit is not None and record is not None
    assert batches.read(store, commit).equals(table_from_rows(batch_rows(step), batch=True))
    for group in commit.groups:
        assert groups.read(store, keys, group.group_id, group.attempt, group.digest).num_rows == 2
    assert train_rows.find(store, keys, step, commit.digest) is not None
    assert record.batch_digest == commit.digest
    assert record.weights_out == weights.manifest_of(store, keys, step + 1).digest
    found = [key.removeprefix(keys.root) for key in store.keys(keys.root)]
    assert len(found) == 2 + 2 + 3 + 1 + 1 + 1, f"nothing beside what the step writes: {found}"


def assert_no_multipart(store: ObjectStore, proxy: S3Proxy) -> None:
    assert not proxy.crossed("POST")
    assert not store._client.list_multipart_uploads(Bucket=store.address.bucket).get("Uploads")


@pytest.mark.parametrize("fault", PASSING, ids=lambda f: f.name)
def test_a_passing_fault_at_every_write_is_cured(
    fault: Fault, proxy: S3Proxy, through: ObjectStore, store: ObjectStore, keys: RunKeys
) -> None:
    for write in WRITES:
        proxy.inject(fault, method="PUT", key=f"{keys.root}/{write}", times=1)
    one_step(through, keys)
    assert_whole(store, keys)
    assert {c.fault for c in proxy.crossed("PUT") if c.fault} == {fault}
    assert len([c for c in proxy.crossed("PUT") if c.fault]) == len(WRITES)
    assert_no_multipart(store, proxy)


@pytest.mark.parametrize("fault", [Fault.TRUNCATED_READ, Fault.SHORT_READ, Fault.RESET_AFTER], ids=lambda f: f.name)
def test_a_passing_fault_at_every_read_is_cured(
    fault: Fault, proxy: S3Proxy, through: ObjectStore, store: ObjectStore, keys: RunKeys
) -> None:
    for write in WRITES:
        proxy.inject(fault, method="GET", key=f"{keys.root}/{write}", times=1)
    one_step(through, keys)
    assert_whole(store, keys)
    assert len([c for c in proxy.crossed("GET") if c.fault is fault]) >= len(WRITES) - 1


@pytest.mark.parametrize("write", COMMITS)
def test_a_silent_store_is_given_up_on_and_asked_again(
    write: str, proxy: S3Proxy, through: ObjectStore, store: ObjectStore, keys: RunKeys
) -> None:
    proxy.inject(Fault.STALL, method="PUT", key=f"{keys.root}/{write}", times=1)
    one_step(through, keys)
    assert_whole(store, keys)


@pytest.mark.parametrize(
    ("fault", "write"),
    [(Fault.SLOW_DOWN, write) for write in WRITES]
    + [(fault, write) for fault in REMEDIES for write in COMMITS if fault is not Fault.SLOW_DOWN],
    ids=lambda value: value.name if isinstance(value, Fault) else value,
)
def test_a_lasting_fault_is_an_error_with_key_and_remedy_and_nothing_reads_as_whole(
    fault: Fault, write: str, proxy: S3Proxy, through: ObjectStore, store: ObjectStore, keys: RunKeys
) -> None:
    where = f"{keys.root}/{write}"
    proxy.inject(fault, method="PUT", key=where)
    with pytest.raises(StoreError, match=REMEDIES[fault]) as error:
        one_step(through, keys)
    assert not isinstance(error.value, ObjectConflict)
    tries = proxy.crossed("PUT", where)
    assert f"s3://{store.address.bucket}/{tries[0].key}" in str(error.value)
    assert 1 <= len(tries) <= ATTEMPTS and len({c.key for c in tries}) == 1
    assert steps.find(store, keys, 0) is None, "the record is last: without it the step did not happen"
    if write in WRITES[:4]:
        assert batches.find(store, keys, 0) is None
    assert not any(c.status == 200 for c in proxy.crossed("PUT", where))
    proxy.heal()
    one_step(through, keys)
    assert_whole(store, keys)


@pytest.mark.parametrize("fault", [Fault.TRUNCATED_READ, Fault.SHORT_READ], ids=lambda f: f.name)
def test_a_batch_that_never_arrives_whole_is_never_handed_out(
    fault: Fault, proxy: S3Proxy, through: ObjectStore, keys: RunKeys
) -> None:
    one_step(through, keys)
    commit = batches.find(through, keys, 0)
    assert commit is not None
    proxy.inject(fault, method="GET", key="*/data-*")
    with pytest.raises(StoreError, match=commit.data.key):
        batches.read(through, commit)
    assert len([c for c in proxy.crossed("GET", "*/data-*") if c.fault]) == ATTEMPTS


def test_a_batch_that_reads_back_wrongly_is_not_committed(
    proxy: S3Proxy, through: ObjectStore, store: ObjectStore, keys: RunKeys
) -> None:
    proxy.inject(Fault.TRUNCATED_READ, method="GET", key="*/data-*")
    with pytest.raises(StoreError):
        one_step(through, keys)
    assert batches.find(store, keys, 0) is None


@pytest.mark.parametrize("seed", range(3))
def test_bad_weather_for_five_steps(seed: int, store: ObjectStore, keys: RunKeys) -> None:
    assert store.address.endpoint_url
    with proxy_in_thread(store.address.endpoint_url, seed=seed, delay_s=0.1) as proxy:
        for fault in (*PASSING, Fault.TRUNCATED_READ, Fault.SHORT_READ):
            proxy.inject(fault, method="PUT" if fault is Fault.CONFLICT else "*", share=0.03)
        through = ObjectStore(dataclasses.replace(store.address, endpoint_url=proxy.url))
        for step in range(5):
            one_step(through, keys, step)
        assert sum(c.fault is not None for c in proxy.crossings) > 10
    records = steps.all_of(store, keys)
    assert [r.step for r in records] == list(range(5))
    assert all(a.weights_out == b.weights_in for a, b in itertools.pairwise(records))
    for step in range(5):
        commit = batches.find(store, keys, step)
        assert commit is not None and commit.digest == records[step].batch_digest
        assert batches.read(store, commit).equals(table_from_rows(batch_rows(step), batch=True))


@pytest.mark.parametrize("fault", [Fault.TRUNCATED_UPLOAD, Fault.SHORT_UPLOAD, Fault.RESET_AFTER], ids=lambda f: f.name)
def test_a_large_file_arrives_whole(
    fault: Fault, proxy: S3Proxy, through: ObjectStore, store: ObjectStore, keys: RunKeys, tmp_path: Path
) -> None:
    source, back = tmp_path / "model.safetensors", tmp_path / "back"
    source.write_bytes(bytes(range(256)) * (1 << 16))
    digest = sha256_file(source)
    proxy.inject(fault, method="PUT", times=2)
    proxy.inject(Fault.TRUNCATED_READ, method="GET", times=2)
    # A lost answer looks like somebody else's object until its bytes are compared.
    expected = Put.ALREADY if fault is Fault.RESET_AFTER else Put.CREATED
    assert through.put_file_once(f"{keys.root}/file", source, digest) is expected
    through.get_file(f"{keys.root}/file", back, digest)
    assert sha256_file(back) == digest
    assert_no_multipart(store, proxy)


def test_a_stale_listing_hides_nothing_that_must_be_found(proxy: S3Proxy, through: ObjectStore, keys: RunKeys) -> None:
    def checkpoint(version: int) -> None:
        checkpoints.complete(
            through,
            keys,
            CheckpointManifest(version=version, weights_digest=f"w{version}", world_size=1, settings={}, files=()),
        )

    checkpoint(0)
    proxy.inject(Fault.STALE_LIST, method="LIST")
    one_step(through, keys, 0)
    one_step(through, keys, 1)
    checkpoint(2)
    # Batches, records and weights are found by key.
    assert [r.step for r in steps.all_of(through, keys)] == [0, 1] and batches.find(through, keys, 1) is not None
    assert weights.latest_version(through, keys) == 2
    # Only the search for a checkpoint lists: an older one costs replay, not correctness.
    older = checkpoints.newest(through, keys, 9)
    assert older is not None and older.version == 0
    proxy.heal()
    newer = checkpoints.newest(through, keys, 9)
    assert newer is not None and newer.version == 2


def test_a_clock_that_is_an_hour_off_is_named(
    through: ObjectStore, store: ObjectStore, keys: RunKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not injected: the server itself refuses the signature's date."""
    real = botocore.auth.get_current_datetime
    monkeypatch.setattr(
        botocore.auth, "get_current_datetime", lambda *a, **k: real(*a, **k) - datetime.timedelta(hours=1)
    )
    with pytest.raises(StoreError, match="clock is off"):
        through.create(f"{keys.root}/x", b"x")
    monkeypatch.undo()
    assert not store.exists(f"{keys.root}/x")


@pytest.mark.parametrize("fault", [Fault.ACCESS_DENIED, Fault.SLOW_DOWN], ids=lambda f: f.name)
def test_hints_and_listings_fail_as_loudly(fault: Fault, proxy: S3Proxy, through: ObjectStore, keys: RunKeys) -> None:
    proxy.inject(fault)
    for call in (
        lambda: through.put_hint(keys.latest_weights, b"{}"),
        lambda: through.folders(keys.checkpoints),
        lambda: list(through.keys(keys.root)),
        lambda: through.exists(keys.run),
        lambda: through.get(keys.run),
    ):
        with pytest.raises(StoreError, match=keys.root):
            call()

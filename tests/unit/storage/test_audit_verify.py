"""`verify`: whatever of a run's objects is changed, taken away or put in another's place is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from roadstead.storage import batches, steps, train_rows, weights
from roadstead.storage.audit import verify
from roadstead.storage.audit.verify import Kind
from roadstead.storage.keys import RunKeys
from roadstead.storage.objects import BrokenRead, StoreError
from roadstead.storage.parquet import decode, encode
from tests.support.audit_run import SyntheticRun
from tests.support.memory_store import MemoryStore

KEYS = RunKeys("runs", "r")
STEPS = 4


@pytest.fixture(scope="module")
def log() -> dict[str, bytes]:
    store = MemoryStore()
    SyntheticRun(store, KEYS).write(STEPS)
    return store.objects


@pytest.fixture
def store(log: dict[str, bytes]) -> MemoryStore:
    store = MemoryStore()
    store.objects = dict(log)
    return store


def train_key(store: MemoryStore, step: int) -> str:
    commit = batches.find(store, KEYS, step)
    assert commit is not None
    return KEYS.train_rows(step, commit.digest)


def test_a_whole_log_is_whole(store: MemoryStore) -> None:
    verdict = verify(store, KEYS)
    assert verdict.ok and verdict.steps == STEPS and verdict.unrecorded == ()
    # Data, stats, 8 groups, train rows, and their records: everything the run wrote but for run and attempts.
    assert verdict.objects >= STEPS * 14 and verdict.bytes > 100_000


def test_progress_counts_every_step(store: MemoryStore) -> None:
    seen: list[tuple[int, int]] = []
    verify(store, KEYS, range(1, 3), progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 2), (2, 2)]


def drop(key: Callable[[MemoryStore], str]) -> Callable[[MemoryStore], str]:
    def change(store: MemoryStore) -> str:
        gone = key(store)
        store.objects.pop(gone)
        return gone

    return change


def replace(
    key: Callable[[MemoryStore], str], old: bytes, new: bytes, named: Callable[[MemoryStore], str] | None = None
) -> Callable[[MemoryStore], str]:
    """`named`: the object that contradicts the changed one and is named in its place."""

    def change(store: MemoryStore) -> str:
        assert old in store.objects[key(store)]
        store.objects[key(store)] = store.objects[key(store)].replace(old, new)
        return (named or key)(store)

    return change


def data_key(store: MemoryStore) -> str:
    commit = batches.find(store, KEYS, 2)
    assert commit is not None
    return commit.data.key


def other_trainer(store: MemoryStore) -> str:
    key = train_key(store, 2)
    table = decode(store.objects[key])
    lists = table["trainer_logprobs"].to_pylist()
    lists[5][0] -= 1.0
    column = pa.array(lists, table.schema.field("trainer_logprobs").type)
    store.objects[key] = encode(table.set_column(2, table.schema.field("trainer_logprobs"), column))
    return key


def fewer_train_rows(store: MemoryStore) -> str:
    key = train_key(store, 2)
    store.objects[key] = encode(decode(store.objects[key]).slice(1))
    return key


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (drop(lambda s: KEYS.step_record(2)), "missing"),
        (drop(lambda s: KEYS.batch_commit(2)), "missing"),
        (drop(lambda s: KEYS.weights_manifest(3)), "missing"),
        (drop(lambda s: KEYS.group("g00000018", 1)), "missing"),
        (replace(lambda s: KEYS.step_record(2), b'"weights_in":"w2"', b'"weights_in":"w9"'), "chain"),
        (replace(lambda s: KEYS.weights_manifest(3), b'"parent_digest":"w2"', b'"parent_digest":"w1"'), "chain"),
        (replace(lambda s: KEYS.batch_commit(2), b'"rows":64', b'"rows":63', data_key), "rows"),
        (
            replace(lambda s: KEYS.step_record(2), b'"loss_tokens":1', b'"loss_tokens":2', lambda s: train_key(s, 2)),
            "train",
        ),
        (replace(lambda s: KEYS.step_record(2), b'"format":1', b'"format":9'), "unreadable"),
        (other_trainer, "train"),
        (fewer_train_rows, "train"),
    ],
)
def test_what_was_changed_is_named(change: Callable[[MemoryStore], str], kind: Kind, store: MemoryStore) -> None:
    key = change(store)
    problems = verify(store, KEYS).problems
    assert (kind, key) in {(p.kind, p.key) for p in problems}, problems
    assert {p.step for p in problems} <= {2, 3}, "step 3 begins with the weights that step 2 made"


def test_a_step_under_way_is_no_problem_and_is_said(store: MemoryStore) -> None:
    store.objects.pop(KEYS.step_record(STEPS - 1))
    verdict = verify(store, KEYS)
    assert verdict.ok and verdict.unrecorded == (STEPS - 1,) and verdict.steps == STEPS - 1


def test_bytes_that_rotted_in_the_store_are_a_problem_and_a_silent_store_is_an_error(store: MemoryStore) -> None:
    commit = batches.find(store, KEYS, 1)
    assert commit is not None

    class Rotten(MemoryStore):
        error: StoreError = BrokenRead("checksum")

        def get(self, key: str, digest: str | None = None) -> bytes:
            if key == commit.data.key:
                raise self.error
            return super().get(key, digest)

    rotten = Rotten()
    rotten.objects = store.objects
    assert [(p.step, p.kind) for p in verify(rotten, KEYS).problems] == [(1, "unreadable")]
    rotten.error = StoreError("503")
    with pytest.raises(StoreError, match="503"):
        verify(rotten, KEYS)


def test_the_weights_own_bytes(tmp_path: Path) -> None:
    store = MemoryStore()
    SyntheticRun(store, KEYS).write(1)
    # The synthetic run's weights are names only: put real files under them.
    folder = tmp_path / "model"
    folder.mkdir()
    header = json.dumps({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(range(16)))
    digest = weights.tensors_digest(folder)
    zero, one = (weights.manifest_of(store, KEYS, version) for version in (0, 1))
    file = weights.upload_file(store, KEYS, 0, folder / "model.safetensors")
    for manifest in (zero, one):
        changed = manifest.model_copy(
            update={"files": (file,), "digest": digest, "parent_digest": digest if manifest.version else None}
        )
        store.objects[KEYS.weights_manifest(manifest.version)] = changed.model_dump_json().encode()
    record, commit = steps.find(store, KEYS, 0), batches.find(store, KEYS, 0)
    assert record is not None and commit is not None
    result = train_rows.find(store, KEYS, 0, commit.digest)
    assert result is not None
    trained = result.model_copy(update={"weights": result.weights.model_copy(update={"digest": digest})})
    key = KEYS.train_rows(0, commit.digest)
    rows = decode(store.objects.pop(key)).to_pylist()
    train_rows.write(store, KEYS, rows, trained)
    store.objects[KEYS.step_record(0)] = (
        record.model_copy(update={"weights_in": digest, "weights_out": digest}).model_dump_json().encode()
    )
    assert verify(store, KEYS, with_weights=True).ok
    store.objects[file.key] = store.objects[file.key][:-1] + b"\xff"
    problems = verify(store, KEYS, with_weights=True).problems
    assert [p.kind for p in problems] == ["sha256", "sha256"] and "version 0" in problems[0].detail
    assert verify(store, KEYS).ok, "the files are read only when asked for"

"""The commit protocol of the batch log, killed before every write it makes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roadstead.storage import batches, groups, steps, train_rows, weights
from roadstead.storage.batches import BatchCommit, BatchConflict
from roadstead.storage.digest import table_digest
from roadstead.storage.keys import RunKeys
from roadstead.storage.objects import ObjectConflict, ObjectCorrupt, canonical_json
from roadstead.storage.schema import table_from_rows
from roadstead.storage.steps import StepRecord
from roadstead.storage.train_rows import TrainMetrics, TrainResult
from roadstead.storage.weights import WeightFile, WeightsRef
from tests.support.memory_store import Crash, MemoryStore
from tests.support.rows import batch_rows, group_rows

KEYS = RunKeys("runs", "r")


def commit(store: MemoryStore, step: int = 0, **changes: object) -> BatchCommit:
    table = table_from_rows(batch_rows(step, **changes), batch=True)  # type: ignore[arg-type]
    return batches.commit(store, KEYS, table, attempt=1, groups=())


def test_what_is_read_is_what_was_written() -> None:
    store = MemoryStore()
    record = commit(store)
    table = batches.read(store, record)
    assert table.equals(table_from_rows(batch_rows(0), batch=True))
    assert record.digest == table_digest(table) and record.rows == 4 and record.response_tokens == 16


@given(crash=st.integers(0, 3), other=st.booleans())
@settings(deadline=None)
def test_a_kill_before_any_write_commits_nothing_or_everything(crash: int, other: bool) -> None:
    store = MemoryStore()
    store.crash_before = crash
    try:
        commit(store)
        committed = True
    except Crash:
        committed = False
    assert (batches.find(store, KEYS, 0) is not None) == committed == (crash >= 3)
    store.crash_before = None
    if other and not committed:  # the next attempt brings another batch: the orphans of the first are in nobody's way
        assert commit(store, tokens=5).response_tokens == 20
    else:
        record = commit(store)
        assert batches.read(store, record).num_rows == 4
    assert list(store.objects).count(KEYS.batch_commit(0)) == 1


def test_the_same_batch_again_is_success_and_another_is_a_conflict_naming_both() -> None:
    store = MemoryStore()
    first = commit(store)
    before = dict(store.objects)
    assert commit(store) == first
    with pytest.raises(BatchConflict) as error:
        commit(store, tokens=5)
    assert first.digest in str(error.value)
    assert store.objects == before, "a refused batch leaves the log as it was"


def test_a_tampered_object_is_found() -> None:
    store = MemoryStore()
    record = commit(store)
    other = commit(MemoryStore(), tokens=5)
    for key, body in (
        (record.data.key, b"PAR1"),
        (record.data.key, store.objects[record.data.key][:-1]),
        (record.data.key, store.objects[record.data.key].replace(b"vllm", b"VLLM")),
    ):
        kept, store.objects[key] = store.objects[key], body
        with pytest.raises(ObjectCorrupt):
            batches.read(store, record)
        store.objects[key] = kept
    # A swapped batch with a consistent file digest is still not the one that was committed.
    store.objects["elsewhere"] = store.objects[record.data.key]
    forged = record.model_copy(update={"digest": other.digest})
    with pytest.raises(ObjectCorrupt, match="canonical digest"):
        batches.read(store, forged)


def test_a_commit_record_that_is_no_record_is_named() -> None:
    store = MemoryStore()
    store.objects[KEYS.batch_commit(0)] = b"{}"
    with pytest.raises(ObjectCorrupt, match=r"_COMMIT\.json"):
        batches.find(store, KEYS, 0)


def test_the_first_staged_group_wins() -> None:
    store = MemoryStore()
    first = groups.stage(store, KEYS, group_rows(seed=1))
    second = groups.stage(store, KEYS, group_rows(seed=2))
    assert first == second == groups.find(store, KEYS, "g00000000", 1)
    with pytest.raises(ObjectCorrupt):
        groups.read(store, KEYS, "g00000000", 1, "0" * 64)


def test_a_staged_group_reports_the_oldest_and_newest_of_its_tokens() -> None:
    rows = group_rows(version=3)
    rows[1].update(
        version_spans=[{"version": 2, "start": 0, "end": 1}, {"version": 4, "start": 1, "end": 4}],
        head_version=2,
        tail_version=4,
    )
    staged = groups.stage(MemoryStore(), KEYS, rows)
    assert (staged.oldest_version, staged.newest_version, staged.tokens) == (2, 4, 8)


def metrics() -> TrainMetrics:
    return TrainMetrics(
        loss=0.5,
        grad_norm=1.0,
        grad_clipped=False,
        applied=True,
        learning_rate=1e-3,
        loss_tokens=16,
        importance_mean=1.0,
        importance_max=1.0,
        capped_share=0.0,
        kl_to_behavior=0.0,
    )


def reference(version: int, digest: str) -> WeightsRef:
    file = WeightFile(name="model.safetensors", key=f"k{digest}", bytes=1, sha256=digest)
    config = WeightFile(name="config.json", key="c", bytes=1, sha256="c")
    return WeightsRef(version=version, digest=digest, files=(file, config) if version == 0 else (file,))


def test_weights_inherit_what_training_does_not_change_and_chain_their_digests() -> None:
    store = MemoryStore()
    zero = weights.publish(store, KEYS, reference(0, "w0"), parent=None, batch_digest=None)
    one = weights.publish(store, KEYS, reference(1, "w1"), parent=zero, batch_digest="b0")
    assert [f.name for f in one.files] == ["config.json", "model.safetensors"]
    assert one.files[1].sha256 == "w1" and one.parent_digest == "w0" and one.batch_digest == "b0"
    assert weights.publish(store, KEYS, reference(1, "w1"), parent=zero, batch_digest="b0") == one
    with pytest.raises(ObjectConflict, match="w1"):
        weights.publish(store, KEYS, reference(1, "wX"), parent=zero, batch_digest="b0")


def test_the_newest_version_is_found_though_the_hint_lies() -> None:
    store = MemoryStore()
    assert weights.latest_version(store, KEYS) is None
    zero = weights.publish(store, KEYS, reference(0, "w0"), parent=None, batch_digest=None)
    weights.publish(store, KEYS, reference(1, "w1"), parent=zero, batch_digest="b0")
    store.objects[KEYS.latest_weights] = canonical_json({"version": 0})
    assert weights.latest_version(store, KEYS) == 1
    del store.objects[KEYS.latest_weights]
    assert weights.latest_version(store, KEYS) == 1


def test_a_train_result_is_written_once_and_found_by_its_batch() -> None:
    store = MemoryStore()
    result = TrainResult(step=0, batch_digest="b" * 64, weights=reference(1, "w1"), metrics=metrics())
    assert train_rows.find(store, KEYS, 0, "b" * 64) is None
    assert train_rows.write(store, KEYS, [], result) == result
    again = result.model_copy(update={"weights": reference(1, "w2")})
    assert train_rows.write(store, KEYS, [], again) == result, "the first result stays"
    assert train_rows.find(store, KEYS, 0, "b" * 64) == result


def test_a_step_record_is_the_last_word() -> None:
    store = MemoryStore()

    def record(**changes: object) -> StepRecord:
        values = {
            "run_id": "r",
            "attempt": 1,
            "step": 0,
            "batch_digest": "b",
            "weights_in": "w0",
            "weights_out": "w1",
            "rows": 4,
            "response_tokens": 16,
            "max_staleness": 0,
            "mean_reward": 0.5,
            "terminal": {"g00000000": "trained"},
            "ledger": {},
            "cursor": 4,
            "metrics": metrics(),
        }
        return StepRecord.model_validate({**values, **changes})

    assert steps.write(store, KEYS, record()) == record()
    assert steps.write(store, KEYS, record()) == record()
    for field in ("batch_digest", "weights_in", "weights_out"):
        with pytest.raises(ObjectConflict, match=field):
            steps.write(store, KEYS, record(**{field: "other"}))
    steps.write(store, KEYS, record(step=2))
    assert [r.step for r in steps.all_of(store, KEYS)] == [0], "a record after a gap does not count"


@pytest.mark.parametrize("keep", [0, 4, -20, -1])
def test_a_staged_group_that_is_cut_short_is_corrupt_and_named(keep: int) -> None:
    store = MemoryStore()
    staged = groups.stage(store, KEYS, group_rows())
    key = KEYS.group(staged.group_id, 1)
    store.objects[key] = store.objects[key][:keep]
    for read in (
        lambda: groups.find(store, KEYS, staged.group_id, 1),
        lambda: groups.read(store, KEYS, staged.group_id, 1, staged.digest),
    ):
        with pytest.raises(ObjectCorrupt, match=key):
            read()

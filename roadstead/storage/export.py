"""Batches as plain files outside the store.

Owns: the files it writes. Invariant: an exported file is the committed object, byte for byte, after its digest and
the step record's were checked. A crash leaves: whole files only.
"""

from __future__ import annotations

from pathlib import Path

from roadstead.storage import batches
from roadstead.storage.keys import RunKeys
from roadstead.storage.objects import ObjectCorrupt, ObjectMissing, ObjectStore
from roadstead.storage.steps import StepRecord


def export_batch(store: ObjectStore, keys: RunKeys, record: StepRecord, folder: Path) -> Path:
    """Write `folder/batch-<step>.parquet`. Raises ObjectMissing, ObjectCorrupt."""
    commit = batches.find(store, keys, record.step)
    if commit is None:
        raise ObjectMissing(f"{store.url(keys.batch_commit(record.step))}: gone, but step {record.step} is recorded")
    if commit.digest != record.batch_digest:
        raise ObjectCorrupt(
            f"{store.url(keys.batch_commit(record.step))}: batch {commit.digest}, the step record says "
            f"{record.batch_digest}"
        )
    batches.read(store, commit)
    path = folder / f"batch-{record.step:08d}.parquet"
    store.get_file(commit.data.key, path, commit.data.sha256)
    return path

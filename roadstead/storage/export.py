"""Batches outside the store: as plain files, and as prompts that bring their trajectories with them.

Owns: the files it writes. Invariant: an exported file is the committed object, byte for byte, after its digest and
the step record's were checked; a replayable prompt holds exactly what was trained. A crash leaves: whole files only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from roadstead.storage import batches
from roadstead.storage.batches import BatchCommit
from roadstead.storage.keys import RunKeys
from roadstead.storage.objects import ObjectCorrupt, ObjectMissing, ObjectStore
from roadstead.storage.steps import StepRecord


def export_batch(store: ObjectStore, keys: RunKeys, record: StepRecord, folder: Path) -> Path:
    """Write `folder/batch-<step>.parquet`. Raises ObjectMissing, ObjectCorrupt."""
    commit = _commit_of(store, keys, record)
    batches.read(store, commit)
    path = folder / f"batch-{record.step:08d}.parquet"
    store.get_file(commit.data.key, path, commit.data.sha256)
    return path


def replayable(store: ObjectStore, keys: RunKeys, record: StepRecord) -> Iterator[dict[str, Any]]:
    """The step's groups in slot order, as rows of a prompt file: the column `trajectories` and what it needs.

    `prompt_id` is the group's name, under which it is found again in this run; a prompt may come more than once, its
    own id is under `source_prompt_id`. A group with a member without a reward is left out: nobody could compare it.
    Raises ObjectMissing, ObjectCorrupt.
    """
    table = batches.read(store, _commit_of(store, keys, record))
    for group, members in groupby(table.to_pylist(), key=lambda row: row["group_id"]):
        rows = list(members)
        if any(row["reward"] is None for row in rows):
            continue
        yield {
            "prompt": rows[0]["prompt_text"],
            "prompt_id": f"{keys.run_id}/{group}",
            "source_prompt_id": rows[0]["prompt_id"],
            "prompt_token_ids": rows[0]["prompt_token_ids"],
            "trajectories": [_trajectory(row) for row in rows],
        }


def _trajectory(row: Mapping[str, Any]) -> dict[str, Any]:
    columns = ("response_token_ids", "behavior_logprobs", "loss_mask", "turns", "finish_reason", "reward")
    return {
        **{name: row[name] for name in columns},
        "reward_components": dict(row["reward_components"] or ()),
        "temperature": row["sampling"]["temperature"],
    }


def _commit_of(store: ObjectStore, keys: RunKeys, record: StepRecord) -> BatchCommit:
    commit = batches.find(store, keys, record.step)
    if commit is None:
        raise ObjectMissing(f"{store.url(keys.batch_commit(record.step))}: gone, but step {record.step} is recorded")
    if commit.digest != record.batch_digest:
        raise ObjectCorrupt(
            f"{store.url(keys.batch_commit(record.step))}: batch {commit.digest}, the step record says "
            f"{record.batch_digest}"
        )
    return commit

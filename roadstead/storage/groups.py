"""Staged groups: what an engine generated, before the ledger decided its place.

Owns: `groups/<group>-a<attempt>.parquet`. Never touches: batches, the ledger.
Invariant: one object a (group, attempt). Generation is not repeatable, so when two executions of one group both
finish, the first staged object wins and the second execution adopts it.
A crash leaves: nothing, or the whole group; the next execution finds it and generates nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from roadstead.storage.digest import table_digest
from roadstead.storage.keys import RunKeys
from roadstead.storage.objects import ObjectCorrupt, ObjectStore
from roadstead.storage.parquet import decode, encode
from roadstead.storage.references import StagedGroup
from roadstead.storage.schema import check, table_from_rows

_VERDICT = "roadstead.verdict"
"""File metadata: what the filters said, as the fields of `StagedGroup` from `filtered` on."""


def stage(
    store: ObjectStore,
    keys: RunKeys,
    rows: Sequence[Mapping[str, Any]],
    *,
    filtered: str | None = None,
    trainable: bool = True,
    note: str | None = None,
    aborted_members: int = 0,
) -> StagedGroup:
    """Write one finished group with its verdict. Returns the reference of what is stored, ours or an earlier
    execution's."""
    table = table_from_rows(rows, batch=False)
    group_id, attempt = table["group_id"][0].as_py(), table["attempt"][0].as_py()
    verdict = json.dumps(
        {"filtered": filtered, "trainable": trainable, "note": note, "aborted_members": aborted_members}
    )
    store.create(keys.group(group_id, attempt), encode(table, {_VERDICT: verdict}))
    found = find(store, keys, group_id, attempt)
    assert found is not None, "created or already there"
    return found


def find(store: ObjectStore, keys: RunKeys, group_id: str, attempt: int) -> StagedGroup | None:
    """The reference of a staged group, or None. Raises ObjectCorrupt, SchemaError."""
    key = keys.group(group_id, attempt)
    body = store.find(key)
    if body is None:
        return None
    table = decode(body, store.url(key))
    check(table, batch=False)
    # A group staged before there were filters has no verdict: it passes.
    verdict = json.loads((table.schema.metadata or {}).get(_VERDICT.encode(), b"{}"))
    rewards = [r for r in table["reward"].to_pylist() if r is not None]
    return StagedGroup(
        group_id=group_id,
        attempt=attempt,
        digest=table_digest(table),
        trajectories=table.num_rows,
        tokens=pc.sum(pc.list_value_length(table["response_token_ids"])).as_py(),
        oldest_version=min(table["head_version"].to_pylist()),
        newest_version=max(table["tail_version"].to_pylist()),
        mean_reward=sum(rewards) / len(rewards) if rewards else None,
        **verdict,
    )


def read(store: ObjectStore, keys: RunKeys, group_id: str, attempt: int, digest: str) -> pa.Table:
    """The staged table. Raises ObjectMissing, ObjectCorrupt."""
    key = keys.group(group_id, attempt)
    table = decode(store.get(key), store.url(key))
    if (found := table_digest(table)) != digest:
        raise ObjectCorrupt(f"{store.url(key)}: canonical digest {found}, the ledger holds {digest}")
    check(table, batch=False)
    return table

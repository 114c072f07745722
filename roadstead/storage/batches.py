"""The batch log: the exact trained batch, committed before the optimizer sees it.

Owns: `batches/step=.../data-*`, `stats-*` and `_COMMIT.json`. Never touches: groups, weights, the ledger.
Invariant: `_COMMIT.json` is the commit point. It is created once, after the data it names was read back and
verified; whoever reads a batch starts from it, never from a listing.
A crash leaves, in the order of writing:
    before data      nothing
    after data       an orphan data file, named by its content: the same batch adopts it, another ignores it
    after stats      two orphans, likewise
    after _COMMIT    a committed batch: every later attempt to write it answers "already"
A second, different batch for the step is a `BatchConflict` that names both digests.
"""

from __future__ import annotations

from typing import Literal

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel, ConfigDict

from roadstead.storage import schema
from roadstead.storage.digest import table_digest
from roadstead.storage.keys import RunKeys
from roadstead.storage.objects import (
    ObjectConflict,
    ObjectCorrupt,
    ObjectStore,
    canonical_json,
    sha256,
)
from roadstead.storage.parquet import decode, encode
from roadstead.storage.references import Cut


class BatchConflict(ObjectConflict):
    """The step is committed with another batch."""


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class StoredFile(Frozen):
    key: str
    bytes: int
    sha256: str


class BatchGroup(Frozen):
    """One slot of a committed batch."""

    slot: int
    group_id: str
    attempt: int
    digest: str
    v_traj: int


class BatchCommit(Frozen):
    """Content of `_COMMIT.json`."""

    format: Literal[1] = 1
    schema_version: int = schema.SCHEMA_VERSION
    run_id: str
    attempt: int
    step: int
    digest: str
    """Canonical digest of the data table."""
    data: StoredFile
    stats: StoredFile
    rows: int
    response_tokens: int
    max_staleness: int
    groups: tuple[BatchGroup, ...]
    cut: Cut | None = None
    """Null in a batch that was committed before runs could be resumed from S3 alone."""


def commit(
    store: ObjectStore,
    keys: RunKeys,
    table: pa.Table,
    *,
    attempt: int,
    groups: tuple[BatchGroup, ...],
    cut: Cut | None = None,
) -> BatchCommit:
    """Write, verify, commit. Returns the commit that is stored. Raises BatchConflict, SchemaError, StoreError.

    `table`: the whole batch in slot order, then member order, one step only.
    """
    schema.check(table, batch=True)
    steps = set(table["step"].to_pylist())
    if len(steps) != 1:
        raise schema.SchemaError(f"step: a batch holds one step, this one holds {sorted(steps)}")
    step, digest = int(steps.pop()), table_digest(table)
    if (there := find(store, keys, step)) is not None:
        return _same(store, keys, there, digest)
    stats = table.select(list(schema.STATS_COLUMNS))
    data_file = _put_verified(store, keys.batch_data(step, digest), table, digest)
    stats_file = _put_verified(store, keys.batch_stats(step, digest), stats, table_digest(stats))
    record = BatchCommit(
        run_id=keys.run_id,
        attempt=attempt,
        step=step,
        digest=digest,
        data=data_file,
        stats=stats_file,
        rows=table.num_rows,
        response_tokens=pc.sum(pc.list_value_length(table["response_token_ids"])).as_py(),
        # Rows that no policy of this run made have no age.
        max_staleness=max(table.filter(table["from_live_policy"])["staleness"].to_pylist(), default=0),
        groups=groups,
        cut=cut,
    )
    store.create(keys.batch_commit(step), canonical_json(record.model_dump(mode="json")))
    there = find(store, keys, step)
    assert there is not None, "created or already there"
    return _same(store, keys, there, digest)


def find(store: ObjectStore, keys: RunKeys, step: int) -> BatchCommit | None:
    """The commit of a step, or None. Raises ObjectCorrupt when it can't be read as one."""
    body = store.find(keys.batch_commit(step))
    if body is None:
        return None
    try:
        return BatchCommit.model_validate_json(body)
    except ValueError as error:
        raise ObjectCorrupt(f"{store.url(keys.batch_commit(step))}: not a batch commit: {error}") from error


def read(store: ObjectStore, record: BatchCommit) -> pa.Table:
    """The committed table, proved: file sha256, rows, schema, canonical digest. Raises ObjectCorrupt."""
    table = decode(store.get(record.data.key, record.data.sha256), store.url(record.data.key))
    where = store.url(record.data.key)
    if table.num_rows != record.rows:
        raise ObjectCorrupt(f"{where}: {table.num_rows} rows, the commit says {record.rows}")
    if (found := table_digest(table)) != record.digest:
        raise ObjectCorrupt(f"{where}: canonical digest {found}, the commit says {record.digest}")
    schema.check(table, batch=True)
    return table


def read_stats(store: ObjectStore, record: BatchCommit) -> pa.Table:
    """The committed table's scalars, file sha256 checked. Raises ObjectCorrupt."""
    return decode(store.get(record.stats.key, record.stats.sha256), store.url(record.stats.key))


def _same(store: ObjectStore, keys: RunKeys, there: BatchCommit, digest: str) -> BatchCommit:
    if there.digest != digest:
        raise BatchConflict(
            f"{store.url(keys.batch_commit(there.step))}: step {there.step} is committed with batch "
            f"{there.digest} (attempt {there.attempt}); refused batch {digest}"
        )
    return there


def _put_verified(store: ObjectStore, key: str, table: pa.Table, digest: str) -> StoredFile:
    """Put and read back. An object that is there already (another encoder's bytes) must hold the same table."""
    store.create(key, encode(table))
    body = store.get(key)
    back = decode(body, store.url(key))
    if back.num_rows != table.num_rows or table_digest(back) != digest:
        raise ObjectCorrupt(
            f"{store.url(key)}: reads back as {table_digest(back)} ({back.num_rows} rows), wrote {digest} "
            f"({table.num_rows} rows)"
        )
    return StoredFile(key=key, bytes=len(body), sha256=sha256(body))

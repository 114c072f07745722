"""The scalars of all committed batches in one file, for questions that span a run.

Owns: `index/rows.parquet`. Never touches: the log; nothing that must be right reads this file.
Invariant: the file holds the stats of committed batches only, each proved by its commit's sha256 when it was added;
it is extended or rebuilt at will, and losing it costs seconds.
A crash leaves: the file of before.

A thousand stats files take seconds to open over S3 one by one, this one takes a tenth of a second.
"""

from __future__ import annotations

import io
import json
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pyarrow.parquet as pq

from roadstead.storage import batches
from roadstead.storage.batches import BatchCommit
from roadstead.storage.keys import RunKeys
from roadstead.storage.objects import ObjectCorrupt, ObjectStore
from roadstead.storage.parquet import decode

_THREADS = 16
"""Small objects: the time is spent waiting for answers."""
_COMMITS = b"roadstead.commits"
_ROW_GROUP = 16_384
"""128 steps of 128 rows: small enough that a window of steps skips most of a long run's file."""


def refresh(store: ObjectStore, keys: RunKeys, *, rebuild: bool = False) -> int:
    """Bring the index up to the last committed step; returns the number of steps in it. Raises StoreError."""
    old, digests = (None, []) if rebuild else _there(store, keys)
    new: list[BatchCommit] = []
    while len(found := _commits(store, keys, len(digests) + len(new))) > 0:
        new += found
    if not new:
        return len(digests)
    with ThreadPoolExecutor(_THREADS) as pool:
        parts = list(pool.map(lambda commit: batches.read_stats(store, commit), new))
    digests += [commit.digest for commit in new]
    table = pa.concat_tables([old, *parts] if old is not None else parts)
    table = table.replace_schema_metadata({_COMMITS: json.dumps(digests)})
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd", row_group_size=_ROW_GROUP)
    store.put_hint(keys.index_rows, sink.getvalue())
    return len(digests)


def _there(store: ObjectStore, keys: RunKeys) -> tuple[pa.Table | None, list[str]]:
    """The index as it is; nothing when there is none or it can't be read: it is built again then."""
    body = store.find(keys.index_rows)
    if body is None:
        return None, []
    try:
        table = decode(body)
        return table, list(json.loads(table.schema.metadata[_COMMITS]))
    except (ObjectCorrupt, KeyError, TypeError, ValueError):
        return None, []


def _commits(store: ObjectStore, keys: RunKeys, first: int) -> list[BatchCommit]:
    """Commits of the next steps from `first` on, up to the first that is missing."""
    with ThreadPoolExecutor(_THREADS) as pool:
        found = list(pool.map(lambda step: batches.find(store, keys, step), range(first, first + 4 * _THREADS)))
    there = [commit is not None for commit in found]
    end = there.index(False) if False in there else len(found)
    return [commit for commit in found[:end] if commit is not None]

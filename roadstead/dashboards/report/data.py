"""All that a report is made of, read once.

Owns: which objects are read. Never touches: arithmetic, layout; it writes nothing but the index hint.
Invariant: an object that can't be read is a note on the page, never a missing page: a report is wanted most when
something is broken. Only a run that is not there, or a store that does not answer, is an error.
A crash leaves: nothing.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from roadstead.storage import batches, evals, groups, runs, steps
from roadstead.storage.audit import Report, audit, index
from roadstead.storage.audit.verify import step_numbers
from roadstead.storage.batches import BatchCommit
from roadstead.storage.evals import EvaluationSummary
from roadstead.storage.keys import RunKeys
from roadstead.storage.objects import BrokenRead, ObjectCorrupt, ObjectMissing, ObjectStore
from roadstead.storage.runs import AttemptEnd, AttemptRecord, RunRecord
from roadstead.storage.schema import SCHEMA
from roadstead.storage.steps import StepRecord

T = TypeVar("T")
Progress = Callable[[str, int, int], None]

COLUMNS = (
    *("step", "group_id", "v_traj", "staleness", "from_live_policy", "reward", "reward_components", "advantage"),
    *("reserved_at", "started_at", "finished_at", "occupied_at"),
)
_THREADS = 16
"""Small objects: the time is spent waiting for answers."""
MOST_WASTED = 2000
"""Staged groups that nothing was trained on and that are opened for their tokens; the rest is counted only."""
_BROKEN = (ObjectCorrupt, ObjectMissing, BrokenRead)
_STAGED = re.compile(r"/(?P<group>[^/]+)-a(?P<attempt>\d+)\.parquet$")


@dataclass(frozen=True)
class Untrained:
    """A staged group that no committed batch holds."""

    group_id: str
    attempt: int
    tokens: int | None
    """Response tokens; None: not opened, or not readable."""


@dataclass
class RunData:
    keys: RunKeys
    location: str
    run: RunRecord
    config: dict[str, Any]
    """As the last attempt has it."""
    attempts: list[AttemptRecord]
    ends: dict[int, AttemptEnd]
    steps: range
    """From 0 to the last step of which anything is there, gaps included."""
    records: dict[int, StepRecord]
    commits: dict[int, BatchCommit]
    rows: pa.Table
    """COLUMNS of every committed row."""
    untrained: list[Untrained]
    evaluations: list[EvaluationSummary]
    audit: Report | None
    notes: list[str] = field(default_factory=list)
    """What could not be read."""


def read_run(store: ObjectStore, keys: RunKeys, *, with_audit: bool, progress: Progress) -> RunData:
    """Raises ObjectMissing without such a run, StoreError when the store does not answer."""
    notes: list[str] = []
    run = runs.read(store, keys)
    history = runs.attempts(store, keys)
    config = next((a.config for a in reversed(history) if a.config), run.config)
    numbers = step_numbers(store, keys)

    def record(step: int) -> StepRecord | None:
        return _or_note(lambda: steps.find(store, keys, step), notes)

    def commit(step: int) -> BatchCommit | None:
        return _or_note(lambda: batches.find(store, keys, step), notes)

    with ThreadPoolExecutor(_THREADS) as pool:
        records = _told(pool.map(record, numbers), "reading step records", len(numbers), progress)
        commits = _told(pool.map(commit, numbers), "reading batch commits", len(numbers), progress)
        ends = {a.attempt: end for a in history if (end := runs.find_end(store, keys, a.attempt)) is not None}
        committed = {c.step: c for c in commits if c is not None}
        rows = _rows(store, keys, committed, pool, notes, progress)
        untrained = _untrained(store, keys, committed.values(), pool, notes, progress)
    evaluations = _or_note(lambda: evals.all_of(store, keys), notes) or []
    report = None
    if with_audit:
        report = audit(store, keys, progress=lambda done, total: progress("auditing", done, total))
        notes += report.notes
    return RunData(
        keys=keys,
        location=store.url(keys.root),
        run=run,
        config=config,
        attempts=history,
        ends=ends,
        steps=numbers,
        records={r.step: r for r in records if r is not None},
        commits=committed,
        rows=rows,
        untrained=untrained,
        evaluations=evaluations,
        audit=report,
        notes=notes,
    )


def _rows(
    store: ObjectStore,
    keys: RunKeys,
    commits: dict[int, BatchCommit],
    pool: ThreadPoolExecutor,
    notes: list[str],
    progress: Progress,
) -> pa.Table:
    """The index, which ends at the first gap, and what lies behind it. A broken stats file costs its step's rows."""
    table, indexed = None, 0
    try:
        indexed = index.refresh(store, keys)
        if indexed:
            table = pq.read_table(io.BytesIO(store.get(keys.index_rows)), columns=list(COLUMNS))
    except _BROKEN:
        indexed = 0
    rest = [commit for step, commit in sorted(commits.items()) if step >= indexed]

    def read(commit: BatchCommit) -> pa.Table | None:
        return _or_note(lambda: batches.read_stats(store, commit).select(list(COLUMNS)), notes)

    parts = _told(pool.map(read, rest), "reading rows", len(rest), progress)
    empty = pa.schema([SCHEMA.field(name) for name in COLUMNS]).empty_table()
    tables = [part.replace_schema_metadata(None) for part in (table, *parts) if part is not None]
    return pa.concat_tables([empty, *tables], promote_options="permissive")


def _untrained(
    store: ObjectStore,
    keys: RunKeys,
    commits: Iterable[BatchCommit],
    pool: ThreadPoolExecutor,
    notes: list[str],
    progress: Progress,
) -> list[Untrained]:
    taken = {(group.group_id, group.attempt) for commit in commits for group in commit.groups}
    found = [match for key in store.keys(f"{keys.root}/groups/") if (match := _STAGED.search(key))]
    left = [(m["group"], int(m["attempt"])) for m in found if (m["group"], int(m["attempt"])) not in taken]

    def tokens(name: tuple[str, int]) -> int | None:
        staged = _or_note(lambda: groups.find(store, keys, *name), notes)
        return staged.tokens if staged is not None else None

    opened = left[:MOST_WASTED]
    counts = _told(pool.map(tokens, opened), "reading groups not trained", len(opened), progress)
    if len(left) > len(opened):
        notes.append(f"{len(left)} staged groups were not trained; tokens are those of the first {len(opened)}")
    counts += [None] * (len(left) - len(opened))
    return [Untrained(*name, tokens=count) for name, count in zip(left, counts, strict=True)]


def _or_note(read: Callable[[], T], notes: list[str]) -> T | None:
    try:
        return read()
    except (*_BROKEN, ValueError, pa.ArrowException) as error:
        notes.append(str(error).splitlines()[0])
        return None


def _told(items: Iterable[T], what: str, total: int, progress: Progress) -> list[T]:
    done: list[T] = []
    progress(what, 0, total)
    for item in items:
        done.append(item)
        progress(what, len(done), total)
    return done

"""Where a run stands, from S3 alone.

Owns: the reading of the last consistent cut, and of the finished groups that no batch took. Never touches: the
ledger's rules, Temporal; it writes nothing.
Invariant: the cut is the newest committed batch's: the step record's where the step was finished, else the commit's.
Every group below its cursor that neither its ledger nor its backlog holds has a terminal state on record. What was
admitted after the cut is known by what it left: staged groups, and ends in attempt records. The rest of those
prompts is admitted again under the same group ids.
A crash leaves: nothing; reading again reads the same.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from roadstead.storage import batches, groups, runs, steps
from roadstead.storage.batches import BatchCommit
from roadstead.storage.keys import RunKeys
from roadstead.storage.objects import ObjectCorrupt, ObjectStore
from roadstead.storage.references import Cut, StagedGroup, group_id, position_of

_READERS = 16
"""Staged groups are read side by side: each costs a round trip, and a window holds dozens."""


@dataclass(frozen=True)
class Recovered:
    """What a new attempt continues from."""

    attempt: int
    """The last one on record; 0: the run never began."""
    version: int
    """Published policy version = recorded steps."""
    pending: BatchCommit | None
    """A batch that is committed but whose step is not recorded: it must be trained next, exactly as it is."""
    cursor: int
    """Every prompt below it was drawn; those that are neither staged nor in the backlog have ended."""
    backlog: tuple[int, ...]
    """Positions below the cursor to generate (again), in order."""
    staged: tuple[StagedGroup, ...]
    """Finished groups that no batch took, by position."""


def recover(store: ObjectStore, keys: RunKeys, *, window: int) -> Recovered:
    """Read where the run stands.

    window: the most groups that can be in the system at once, (S + 1) x slots. So many positions without a staged
    group end the search past the cursor; what lies beyond is generated again.
    Raises ObjectCorrupt when a record can't be read, or the log contradicts itself.
    """
    version = steps.count(store, keys)
    pending = batches.find(store, keys, version)
    if pending is not None and batches.find(store, keys, version + 1) is not None:
        raise ObjectCorrupt(
            f"{store.url(keys.step_record(version))}: missing, but step {version + 1} has a committed batch; restore "
            "the record from a copy of the bucket, or resume under a new `name` from the weights of "
            f"version {version}"
        )
    cut = _cut(store, keys, version, pending)
    history = runs.attempts(store, keys)
    ends = [end for record in history if (end := runs.find_end(store, keys, record.attempt)) is not None]
    ended = set(cut.terminal).union(*(record.terminal for record in history), *(end.terminal for end in ends))
    held = {group for buffer in cut.ledger.get("buffers", []) for half in buffer for group, _ in half}
    open_below = {position_of(group) for group in held} | set(cut.backlog)
    cursor = max([cut.cursor, *(end.cursor for end in ends)])

    staged: dict[int, StagedGroup] = {}
    sources = _sources(history)
    with ThreadPoolExecutor(_READERS) as pool:

        def look(positions: list[int]) -> None:
            for position, found in zip(positions, pool.map(find, positions), strict=True):
                if found is not None:
                    staged[position] = found

        def find(position: int) -> StagedGroup | None:
            return _find(store, keys, position, sources)

        look(sorted(p for p in {*open_below, *range(cut.cursor, cursor)} if group_id(p) not in ended))
        misses, ahead = 0, cursor
        while misses < window and history:
            positions = list(range(ahead, ahead + _READERS))
            look(positions)
            for position in positions:
                known = position in staged or group_id(position) in ended
                misses = 0 if known else misses + 1
                cursor = position + 1 if known else cursor
            ahead += _READERS
    waiting = {*open_below, *range(cut.cursor, cursor)} - set(staged)
    return Recovered(
        attempt=history[-1].attempt if history else 0,
        version=version,
        pending=pending,
        cursor=cursor,
        backlog=tuple(sorted(p for p in waiting if group_id(p) not in ended)),
        staged=tuple(staged[position] for position in sorted(staged)),
    )


def _cut(store: ObjectStore, keys: RunKeys, version: int, pending: BatchCommit | None) -> Cut:
    if pending is not None and pending.cut is not None:
        return pending.cut
    if version == 0:
        return Cut(cursor=0, ledger={}, terminal={})
    record = steps.find(store, keys, version - 1)
    assert record is not None, "counted"
    cut = Cut(cursor=record.cursor, backlog=record.backlog, ledger=record.ledger, terminal=record.terminal)
    if pending is None:
        return cut
    # Committed before batches carried their cut: its groups have ended, whatever else happened is done again.
    taken = {group.group_id: "trained" for group in pending.groups}
    return cut.model_copy(
        update={
            "terminal": {**cut.terminal, **taken},
            "cursor": max([cut.cursor, *(position_of(group) + 1 for group in taken)]),
        }
    )


def _sources(history: list[runs.AttemptRecord]) -> tuple[dict[str, int], int]:
    """Where a staged group may be adopted from: what the last attempt adopted, and what it staged itself."""
    if not history:
        return {}, 0
    return {group.group_id: group.attempt for group in history[-1].carried}, history[-1].attempt


def _find(store: ObjectStore, keys: RunKeys, position: int, sources: tuple[dict[str, int], int]) -> StagedGroup | None:
    carried, own = sources
    group = group_id(position)
    return groups.find(store, keys, group, carried.get(group, own))

"""Run and attempt records: what a run is, each time it was begun or resumed, and how that ended.

Owns: `run.json`, `attempts/<n>.json` and `attempts/<n>-end.json`. Never touches: steps, batches.
Invariant: a run's record never changes; a run id that exists with another configuration is refused. Attempt numbers
are taken once: whoever creates the next one has fenced off all before it (`check_current`).
A crash leaves: a run record without an attempt, which the next start completes; an attempt without an end, which
is what a killed attempt looks like.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, ValidationError

from roadstead.staleness import TerminalState
from roadstead.storage.batches import Frozen
from roadstead.storage.keys import RunKeys
from roadstead.storage.objects import ObjectConflict, ObjectCorrupt, ObjectStore, Put, canonical_json
from roadstead.storage.references import Ending


class RunRecord(Frozen):
    format: Literal[1] = 1
    run_id: str
    config: dict[str, Any]
    """The run's configuration, secrets removed."""
    versions: dict[str, str]
    """Component name to version: engine and trainer are one unit."""
    model_digest: str
    dataset_digest: str
    dataset_rows: int
    created_at: str
    """UTC, ISO 8601."""


class Fenced(ObjectConflict):
    """A newer attempt began: this one must not commit anything any more."""


class CarriedGroup(Frozen):
    """A finished group of an earlier attempt, staged and not yet trained, that this attempt adopts."""

    group_id: str
    attempt: int
    digest: str


class AttemptRecord(Frozen):
    format: Literal[1] = 1
    run_id: str
    attempt: int
    reason: str
    from_version: int
    fencing_token: str
    started_at: str
    config: dict[str, Any] | None = None
    """The run's configuration from this attempt on; null: as run.json has it."""
    versions: dict[str, str] | None = None
    """Component versions from this attempt on; null: as run.json has them."""
    carried: tuple[CarriedGroup, ...] = ()
    """Staged groups that are trained from here on. What earlier attempts left beside them is never trained."""
    terminal: dict[str, TerminalState] = Field(default_factory=dict)
    """Groups that ended with the resume itself: too old for every open batch, or no room left for them."""


class AttemptEnd(Frozen):
    """The orderly end of an attempt."""

    format: Literal[1] = 1
    run_id: str
    attempt: int
    how: Ending
    version: int
    cursor: int
    """Prompts drawn from the dataset so far: those at or past the last batch's cursor wait, or are in `terminal`."""
    terminal: dict[str, TerminalState]
    """Groups that ended after the last batch was taken."""
    carried: tuple[str, ...]
    """Finished groups that no batch took: they are staged and wait for a resume."""
    ended_at: str
    """UTC, ISO 8601."""


def create(store: ObjectStore, keys: RunKeys, record: RunRecord) -> RunRecord:
    """Create the run, or return it when it exists with the same configuration, model and dataset."""
    if store.create(keys.run, canonical_json(record.model_dump(mode="json"))) is Put.CREATED:
        return record
    there = read(store, keys)
    for field in ("config", "model_digest", "dataset_digest"):
        mine, theirs = getattr(record, field), getattr(there, field)
        if mine != theirs:
            raise ObjectConflict(
                f"run {keys.run_id!r} exists with another {field} (created {there.created_at}): "
                f"{_first_difference(theirs, mine)}; choose another name, or go on with that run: "
                f"`roadstead resume {keys.run_id} --config FILE`"
            )
    return there


def read(store: ObjectStore, keys: RunKeys) -> RunRecord:
    """Raises ObjectMissing when there is no such run."""
    try:
        return RunRecord.model_validate_json(store.get(keys.run))
    except ValidationError as error:
        raise ObjectCorrupt(f"{store.url(keys.run)}: not a run record: {error}") from error


def open_attempt(store: ObjectStore, keys: RunKeys, record: AttemptRecord) -> AttemptRecord:
    """Record a start. Raises ObjectConflict when the attempt number is taken."""
    store.put_once(keys.attempt(record.attempt), canonical_json(record.model_dump(mode="json")))
    return record


def last_attempt(store: ObjectStore, keys: RunKeys) -> int:
    """Highest attempt number on record; 0 when the run never began."""
    attempt = 0
    while store.exists(keys.attempt(attempt + 1)):
        attempt += 1
    return attempt


def attempts(store: ObjectStore, keys: RunKeys) -> list[AttemptRecord]:
    """Every attempt so far, in order."""
    found: list[AttemptRecord] = []
    while (body := store.find(keys.attempt(len(found) + 1))) is not None:
        try:
            found.append(AttemptRecord.model_validate_json(body))
        except ValidationError as error:
            raise ObjectCorrupt(f"{store.url(keys.attempt(len(found) + 1))}: not an attempt record: {error}") from error
    return found


def current_config(store: ObjectStore, keys: RunKeys) -> dict[str, Any]:
    """The run's configuration as its last attempt has it. Raises ObjectMissing, ObjectCorrupt."""
    config = read(store, keys).config
    for attempt in attempts(store, keys):
        config = attempt.config or config
    return config


def check_current(store: ObjectStore, keys: RunKeys, attempt: int) -> None:
    """Raises Fenced when a newer attempt is on record. Asked before and after each commit.

    Before: an old writer does not commit. After: one whose commit fell between the newer attempt's beginning and its
    look at the log learns that it is no longer the run, and goes no further; its commit is then an ordinary
    conflict for the newer attempt, which stops and can be resumed on top of it.
    """
    if store.exists(keys.attempt(attempt + 1)):
        raise Fenced(
            f"{store.url(keys.attempt(attempt + 1))}: attempt {attempt + 1} of run {keys.run_id!r} began; attempt "
            f"{attempt} commits nothing any more. Stop its processes"
        )


def end_attempt(store: ObjectStore, keys: RunKeys, record: AttemptEnd) -> AttemptEnd:
    """Record an orderly end; the first one stays."""
    store.create(keys.attempt_end(record.attempt), canonical_json(record.model_dump(mode="json")))
    there = find_end(store, keys, record.attempt)
    assert there is not None, "created or already there"
    return there


def find_end(store: ObjectStore, keys: RunKeys, attempt: int) -> AttemptEnd | None:
    """How the attempt ended; None: it goes on, or it was killed."""
    key = keys.attempt_end(attempt)
    body = store.find(key)
    if body is None:
        return None
    try:
        return AttemptEnd.model_validate_json(body)
    except ValidationError as error:
        raise ObjectCorrupt(f"{store.url(key)}: not the end of an attempt: {error}") from error


def _first_difference(theirs: Any, mine: Any, path: str = "") -> str:
    if isinstance(theirs, dict) and isinstance(mine, dict):
        for key in sorted({*theirs, *mine}):
            if theirs.get(key) != mine.get(key):
                return _first_difference(theirs.get(key), mine.get(key), f"{path}.{key}" if path else key)
    return f"{path or 'it'} was {theirs!r}, is {mine!r} now"

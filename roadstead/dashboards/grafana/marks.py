"""Moments of a run that belong on every chart: attempts that begin and end, and steps that went wrong.

Owns: which moments those are, their words and their keys. Never touches: Grafana; it writes nothing.
Invariant: a moment's key is a function of the run's records, so that whoever draws it again finds the first drawing.
A crash leaves: nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Literal

import pyarrow.compute as pc

from roadstead.storage import batches, runs, steps
from roadstead.storage.audit import Report
from roadstead.storage.keys import RunKeys
from roadstead.storage.objects import ObjectStore

Kind = Literal["resume", "drain", "bad-step"]
"""resume: an attempt begins, the first one too. drain: it ends, in whatever way. Each kind has a colour of its own."""


@dataclass(frozen=True)
class Mark:
    run: str
    kind: Kind
    name: str
    """Unique in its run."""
    text: str
    begin: int
    """Milliseconds since 1970, UTC."""
    end: int | None = None
    """None: a moment, not a span."""

    @property
    def key(self) -> str:
        return f"{self.run}/{self.name}"


def marks_of(store: ObjectStore, keys: RunKeys, report: Report | None) -> list[Mark]:
    """Of a run's records and, where one is given, of the critical findings of its audit.

    Raises ObjectCorrupt when a record can't be read, StoreError when the store does not answer.
    """
    return [*_attempts(store, keys), *_skipped(store, keys), *_findings(store, keys, report)]


def _attempts(store: ObjectStore, keys: RunKeys) -> list[Mark]:
    found = []
    for attempt in runs.attempts(store, keys):
        number = attempt.attempt
        text = f"attempt {number} begins at version {attempt.from_version}: {attempt.reason}"
        found.append(Mark(keys.run_id, "resume", f"attempt-{number}", text, _milliseconds(attempt.started_at)))
        if (end := runs.find_end(store, keys, number)) is not None:
            text = f"attempt {number} {end.how} at version {end.version}; `roadstead status {keys.run_id}`"
            found.append(Mark(keys.run_id, "drain", f"attempt-{number}-end", text, _milliseconds(end.ended_at)))
    return found


def _skipped(store: ObjectStore, keys: RunKeys) -> list[Mark]:
    """Steps whose gradient was not finite: the weights did not move."""
    found = []
    for record in steps.all_of(store, keys):
        when = _trained_at(store, keys, record.step) if record.metrics.not_finite else None
        if when is not None:
            text = f"step {record.step} was not applied, its gradient is not finite; `roadstead audit {keys.run_id}`"
            found.append(Mark(keys.run_id, "bad-step", f"not-applied-{record.step}", text, when))
    return found


def _findings(store: ObjectStore, keys: RunKeys, report: Report | None) -> list[Mark]:
    found = []
    for finding in report.findings if report else ():
        if finding.severity != "critical" or finding.first_step is None:
            continue
        begin = _trained_at(store, keys, finding.first_step)
        last = max(finding.steps, default=finding.first_step)
        end = _trained_at(store, keys, last) if last > finding.first_step else None
        if begin is not None:
            text = f"{finding.title} (first in step {finding.first_step}): {finding.why}"
            name = f"{finding.check}-{finding.first_step}"
            found.append(Mark(keys.run_id, "bad-step", name, text, begin, end))
    return found


def _trained_at(store: ObjectStore, keys: RunKeys, step: int) -> int | None:
    """When the step's batch was whole. Records hold no time, rows do; None where there is no readable batch."""
    commit = batches.find(store, keys, step)
    if commit is None:
        return None
    last = pc.max(batches.read_stats(store, commit)["occupied_at"]).as_py()
    return None if last is None else round(last.timestamp() * 1000)


def _milliseconds(iso: str) -> int:
    return round(datetime.fromisoformat(iso).timestamp() * 1000)

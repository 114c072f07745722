"""The marks on the charts: attempts, and steps that went wrong, at the time when it happened."""

from __future__ import annotations

import json

import pytest

from roadstead.dashboards.grafana.marks import Mark, marks_of
from roadstead.storage import batches
from roadstead.storage.audit import Report, audit
from roadstead.storage.keys import RunKeys
from tests.support.memory_store import MemoryStore
from tests.support.report_run import ReportRun

KEYS = RunKeys("runs", "marked")
STEPS, SKIPPED, BROKEN = 8, 3, 6


@pytest.fixture(scope="module")
def store() -> MemoryStore:
    """A run that was killed and resumed, with a step that was not applied and a batch that was damaged."""
    store = MemoryStore()
    ReportRun(store, KEYS).write(STEPS)
    record = json.loads(store.objects[KEYS.step_record(SKIPPED)])
    record["metrics"] |= {"applied": False, "grad_norm": None}
    store.objects[KEYS.step_record(SKIPPED)] = json.dumps(record).encode()
    commit = batches.find(store, KEYS, BROKEN)
    assert commit is not None
    body = store.objects[commit.data.key]
    store.objects[commit.data.key] = body[:200] + bytes([body[200] ^ 1]) + body[201:]
    return store


@pytest.fixture(scope="module")
def report(store: MemoryStore) -> Report:
    return audit(store, KEYS)


def ready_ms(store: MemoryStore, step: int) -> int:
    commit = batches.find(store, KEYS, step)
    assert commit is not None
    times = batches.read_stats(store, commit)["occupied_at"].to_pylist()
    return round(max(times).timestamp() * 1000)


def named(marks: list[Mark]) -> dict[str, Mark]:
    found = {mark.name: mark for mark in marks}
    assert len(found) == len(marks), "names are unique in a run"
    return found


def test_attempts_begin_and_end_where_their_records_say(store: MemoryStore) -> None:
    marks = named(marks_of(store, KEYS, None))
    begun, resumed, ended = marks["attempt-1"], marks["attempt-2"], marks["attempt-2-end"]
    assert begun.kind == resumed.kind == "resume" and ended.kind == "drain"
    assert "attempt-1-end" not in marks, "it was killed"
    assert begun.begin < resumed.begin < ended.begin
    assert f"version {STEPS // 2}" in resumed.text and f"finished at version {STEPS}" in ended.text
    assert resumed.key == "marked/attempt-2"


def test_a_step_that_was_not_applied_is_marked_when_its_batch_was_whole(store: MemoryStore) -> None:
    mark = named(marks_of(store, KEYS, None))[f"not-applied-{SKIPPED}"]
    assert (mark.kind, mark.begin, mark.end) == ("bad-step", ready_ms(store, SKIPPED), None)
    assert f"step {SKIPPED}" in mark.text and "roadstead audit marked" in mark.text


def test_critical_findings_are_marked_and_others_are_not(store: MemoryStore, report: Report) -> None:
    harmless = report.findings[0].model_copy(update={"severity": "warning", "first_step": 2, "title": "looks odd"})
    report = report.model_copy(update={"findings": (*report.findings, harmless)})
    found = [m for m in marks_of(store, KEYS, report) if m.kind == "bad-step" and "not-applied" not in m.name]
    critical = [finding for finding in report.findings if finding.severity == "critical"]
    assert sorted(m.begin for m in found) == sorted(ready_ms(store, f.first_step or 0) for f in critical)
    assert ready_ms(store, BROKEN) in {m.begin for m in found}
    assert not any("looks odd" in m.text for m in found)
    assert all(f.title in {m.text.split(" (first")[0] for m in found} for f in critical)


def test_the_same_run_gives_the_same_marks(store: MemoryStore, report: Report) -> None:
    assert marks_of(store, KEYS, report) == marks_of(store, KEYS, report)

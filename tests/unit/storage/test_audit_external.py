"""Trajectories from elsewhere in a log: no symptom of an engine, and no age."""

from __future__ import annotations

from typing import Any

import numpy as np

from roadstead.dashboards.report.data import read_run
from roadstead.dashboards.report.numbers import numbers_of
from roadstead.storage.audit import audit, verify
from roadstead.storage.keys import RunKeys
from tests.support.audit_run import MEMBERS, Row, SyntheticRun
from tests.support.memory_store import MemoryStore

KEYS = RunKeys("runs", "r")
FIRST = slice(0, 2 * MEMBERS)
"""The rows of two groups of each batch."""


def _from_elsewhere(step: int, rows: list[Row]) -> None:
    """The same long responses in every step, as a prompt brings them in every epoch, of a policy far away."""
    random = np.random.default_rng(7)
    for row in rows[FIRST]:
        ids = [int(token) for token in random.integers(3, 400, 120)]
        row.update(
            response_token_ids=ids,
            loss_mask=[True] * len(ids),
            behavior_logprobs=[float(x) for x in -random.gamma(0.6, 1.2, len(ids)).astype(np.float32)],
            version_spans=[{"version": step, "start": 0, "end": len(ids)}],
            v_traj=step,
            head_version=step,
            tail_version=step,
            turns=[{"role": "assistant", "start": 0, "end": len(ids)}],
            finish_reason="length",
            engine_id="external",
            seed=0,
            from_live_policy=False,
        )


def _far_away(step: int, batch: list[Row], train: list[Row]) -> None:
    for i, row in enumerate(batch[FIRST]):
        behavior = np.array(row["behavior_logprobs"], dtype=np.float32)
        train[i] = SyntheticRun.trained(row, (behavior - 1.5).astype(np.float32))


def _log(**plants: Any) -> MemoryStore:
    store = MemoryStore()
    SyntheticRun(store, KEYS, **plants).write(6)
    return store


def test_they_are_no_symptom() -> None:
    store = _log(rows=_from_elsewhere, train=_far_away)
    report = audit(store, KEYS)
    assert [finding.title for finding in report.findings] == [] and report.rows == 6 * 64


def test_the_same_rows_from_an_engine_are_one() -> None:
    def sampled_here(step: int, rows: list[Row]) -> None:
        _from_elsewhere(step, rows)
        for row in rows[FIRST]:
            row["from_live_policy"] = True

    checks = {finding.check for finding in audit(_log(rows=sampled_here, train=_far_away), KEYS).findings}
    assert {"duplicates", "logprob-drift", "lengths", "importance"} <= checks


def test_the_oldest_row_of_a_commit_is_the_oldest_that_has_an_age() -> None:
    """The label of such a row is that of its admission; here it is older than the bound and of no account."""

    def old_label(step: int, rows: list[Row]) -> None:
        _from_elsewhere(step, rows)
        for row in rows[FIRST]:
            row["version_spans"] = [{**row["version_spans"][0], "version": 0}]
            row.update(v_traj=0, head_version=0, tail_version=0)

    store = _log(rows=old_label, train=_far_away)
    assert verify(store, KEYS).problems == ()
    assert audit(store, KEYS).findings == ()
    report = numbers_of(read_run(store, KEYS, with_audit=False, progress=lambda what, done, total: None))
    assert report.total["age_max"] <= 2 and max(report.ages) <= 2

"""A step's numbers are those of its batch on S3, and a resume that goes back loses none of them.

They are read as Prometheus reads them: scraped over HTTP, parsed from the text.
"""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from prometheus_client.parser import text_string_to_metric_families

from roadstead.metrics import catalogue
from roadstead.metrics.registry import Metrics
from roadstead.metrics.server import served
from roadstead.staleness import AgeStatistics
from roadstead.storage import batches, runs, steps
from roadstead.storage.keys import RunKeys
from roadstead.storage.objects import canonical_json
from roadstead.storage.runs import AttemptRecord
from roadstead.storage.steps import StepRecord
from roadstead.workers.step_metrics import StepNumbers, StepWatch
from tests.support import tiny
from tests.support.audit_run import BOUND, MEMBERS, SyntheticRun
from tests.support.memory_store import MemoryStore
from tests.support.report_run import ReportRun

KEYS = RunKeys("runs", "r")
OF_A_STEP = {metric.name for metric in catalogue.CATALOGUE if metric.of_a_step} - {"roadstead_step_admissions_groups"}
Scrape = dict[tuple[str, str], float]
"""(name, attempt) to value."""


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def metrics() -> Metrics:
    return Metrics("orchestrator")


@pytest.fixture
def numbers(metrics: Metrics, tmp_path: Path) -> StepNumbers:
    config = tiny.config(
        tmp_path, "r", rollout__group_size=MEMBERS, staleness={"max_staleness": BOUND, "groups_per_batch": 8}
    )
    return StepNumbers(config, metrics)


@pytest.fixture
def port(metrics: Metrics, tmp_path: Path) -> Iterator[int]:
    with served(metrics.registry, tmp_path, {"run": "r", "role": "orchestrator"}) as port:
        assert port is not None
        yield port


def scrape(port: int) -> Scrape:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    found: Scrape = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if set(sample.labels) <= {"attempt"}:
                found[(sample.name, sample.labels.get("attempt", ""))] = sample.value
    return found


def stats_of(store: MemoryStore, step: int) -> pa.Table:
    commit = batches.find(store, KEYS, step)
    assert commit is not None
    return batches.read_stats(store, commit)


def test_the_numbers_of_a_step_are_those_of_its_batch_and_record(
    store: MemoryStore, metrics: Metrics, numbers: StepNumbers, port: int
) -> None:
    records = ReportRun(store, KEYS).write(6, killed_at=0)
    for record in records:
        stats = stats_of(store, record.step).to_pylist()
        numbers.show(record, stats_of(store, record.step))
        found = {name: value for (name, attempt), value in scrape(port).items() if attempt == "1"}
        ages = AgeStatistics.of((row["step"], row["head_version"], row["from_live_policy"]) for row in stats)
        rewards = [row["reward"] for row in stats if row["reward"] is not None]
        advantages = [row["advantage"] for row in stats]
        trainable = [row for row in stats if row["reward"] is not None and row["advantage"] != 0]
        filtered = MEMBERS * sum(state == "filtered" for state in record.terminal.values())
        expected = {
            "roadstead_step": record.step,
            "roadstead_batch_age_max_versions": ages.maximum,
            "roadstead_batch_age_p99_versions": ages.p99,
            "roadstead_batch_age_mean_versions": ages.mean,
            "roadstead_batch_reward_mean": np.mean(rewards),
            "roadstead_batch_reward_stddev": np.std(rewards),
            "roadstead_batch_advantage_mean": np.mean(advantages),
            "roadstead_batch_advantage_stddev": np.std(advantages),
            "roadstead_batch_trajectories": len(stats),
            "roadstead_batch_response_tokens": record.response_tokens,
            "roadstead_batch_trainable_ratio": len(trainable) / (len(stats) + filtered),
            "roadstead_train_loss": record.metrics.loss,
            "roadstead_train_grad_norm": record.metrics.grad_norm,
            "roadstead_train_learning_rate": record.metrics.learning_rate,
            "roadstead_train_importance_mean_ratio": record.metrics.importance_mean,
            "roadstead_train_importance_max_ratio": record.metrics.importance_max,
            "roadstead_train_capped_tokens_ratio": record.metrics.capped_share,
            "roadstead_train_kl_behavior_nats": record.metrics.kl_to_behavior,
        }
        assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-6, abs=1e-9)
        assert np.isnan(found["roadstead_train_entropy_nats"]), "this record is older than the number"
        assert set(found) == OF_A_STEP


def test_counters_hold_the_sum_over_all_steps(
    store: MemoryStore, metrics: Metrics, numbers: StepNumbers, port: int
) -> None:
    records = ReportRun(store, KEYS).write(6, killed_at=0)
    StepWatch(store, KEYS, numbers, lambda: None).look()
    assert scrape(port)[("roadstead_trained_tokens_total", "")] == 0, "they were recorded before this process"
    for record in records:
        numbers.show(record, stats_of(store, record.step))
    found = {name: value for (name, _), value in scrape(port).items()}
    ages = [age for record in records for age in stats_of(store, record.step)["staleness"].to_pylist()]
    assert found["roadstead_trained_tokens_total"] == sum(record.response_tokens for record in records)
    assert found["roadstead_trained_age_versions_count"] == len(ages)
    assert found["roadstead_trained_age_versions_sum"] == sum(ages)
    assert found["roadstead_clipped_steps_total"] == sum(record.metrics.grad_clipped for record in records)
    assert found["roadstead_skipped_steps_total"] == 0 == found["roadstead_over_bound_trajectories_total"]


def test_a_skipped_step_and_trajectories_over_the_bound_are_counted(
    store: MemoryStore, metrics: Metrics, numbers: StepNumbers, port: int
) -> None:
    def plant(step: int, rows: list[dict[str, Any]]) -> None:
        if step == 4:
            for row in rows[:3]:
                spans = [{"version": 0, "start": 0, "end": len(row["response_token_ids"])}]
                row.update(head_version=0, tail_version=0, v_traj=0, staleness=4, version_spans=spans)

    records = SyntheticRun(store, KEYS, rows=plant).write(6)
    for record in records:
        spoilt = {"applied": record.step != 2, "grad_norm": None if record.step == 2 else 1.0}
        record = record.model_copy(update={"metrics": record.metrics.model_copy(update=spoilt)})
        numbers.show(record, stats_of(store, record.step))
        if record.step == 2:
            assert np.isnan(scrape(port)[("roadstead_train_grad_norm", "1")]), "not the norm of the step before"
        if record.step == 4:
            assert scrape(port)[("roadstead_batch_age_max_versions", "1")] == 4
    found = scrape(port)
    assert found[("roadstead_skipped_steps_total", "")] == 1
    assert found[("roadstead_over_bound_trajectories_total", "")] == 3


def test_a_resume_that_goes_back_some_steps_loses_and_overwrites_no_point(
    store: MemoryStore, metrics: Metrics, numbers: StepNumbers, port: int
) -> None:
    """frameworks.md row 33. Attempt 1 gets to step 12, attempt 2 begins again at step 10."""
    first = SyntheticRun(store, KEYS).write(13)
    again = [_again(record) for record in first[10:]]
    points: dict[tuple[str, str, float], float] = {}
    for record in (*first, *again):
        numbers.show(record, stats_of(store, record.step))
        found = scrape(port)
        for (name, attempt), value in found.items():
            if name in OF_A_STEP:
                point = (name, attempt, found[("roadstead_step", attempt)])
                assert points.setdefault(point, value) == pytest.approx(value, nan_ok=True), "no point ever changes"
    expected = {*(("1", step) for step in range(13)), *(("2", step) for step in range(10, 13))}
    assert {point[1:] for point in points} == expected
    assert len(points) == len(OF_A_STEP) * len(expected), "every number of every step of both attempts"
    for record in first[10:]:
        name = "roadstead_train_loss"
        assert points[(name, "1", record.step)] == pytest.approx(record.metrics.loss)
        assert points[(name, "2", record.step)] == pytest.approx(record.metrics.loss + 1)


def _again(record: StepRecord) -> StepRecord:
    """As attempt 2 would have it."""
    return record.model_copy(
        update={"attempt": 2, "metrics": record.metrics.model_copy(update={"loss": record.metrics.loss + 1})}
    )


def test_the_watch_follows_the_log_and_goes_back_with_the_attempt(
    store: MemoryStore, metrics: Metrics, numbers: StepNumbers, port: int
) -> None:
    attempt = 1
    watch = StepWatch(store, KEYS, numbers, lambda: attempt)
    watch.look()
    assert ("roadstead_step", "1") not in scrape(port)
    records = SyntheticRun(store, KEYS).write(13)
    watch.look()
    found = scrape(port)
    assert found[("roadstead_step", "1")] == 12
    rows = sum(record.rows for record in records)
    assert found[("roadstead_trained_age_versions_count", "")] == rows
    watch.look()
    assert scrape(port)[("roadstead_trained_age_versions_count", "")] == rows, "a step is counted once"
    for record in records[10:]:
        store.objects[KEYS.step_record(record.step)] = canonical_json(_again(record).model_dump(mode="json"))
    runs.open_attempt(
        store,
        KEYS,
        AttemptRecord(
            run_id="r",
            attempt=2,
            reason="resumed",
            from_version=10,
            fencing_token="t",
            started_at="2026-01-01T00:00:00Z",
        ),
    )
    attempt = 2
    watch.look()
    found = scrape(port)
    assert found[("roadstead_step", "2")] == 12 and found[("roadstead_step", "1")] == 12
    assert found[("roadstead_trained_age_versions_count", "")] == rows + sum(record.rows for record in records[10:])


def test_a_new_process_shows_the_last_step_and_counts_from_the_next(
    store: MemoryStore, metrics: Metrics, numbers: StepNumbers, port: int
) -> None:
    records = SyntheticRun(store, KEYS).write(4)
    last = store.objects.pop(KEYS.step_record(3))
    watch = StepWatch(store, KEYS, numbers, lambda: 1)
    watch.look()
    found = scrape(port)
    assert found[("roadstead_step", "1")] == 2
    assert found[("roadstead_train_loss", "1")] == pytest.approx(records[2].metrics.loss)
    assert found[("roadstead_trained_tokens_total", "")] == 0
    store.objects[KEYS.step_record(3)] = last
    watch.look()
    found = scrape(port)
    assert found[("roadstead_step", "1")] == 3
    assert found[("roadstead_trained_tokens_total", "")] == records[3].response_tokens
    assert steps.count(store, KEYS) == 4

"""The newest closed evaluation is what is shown."""

from __future__ import annotations

import pytest

from roadstead.metrics import catalogue
from roadstead.metrics.registry import Metrics
from roadstead.storage import evals
from roadstead.workers.evaluation_metrics import EvaluationWatch
from tests.support.memory_store import MemoryStore
from tests.unit.storage.test_evals import KEYS, settings, summary, table
from tests.unit.workers.test_run_metrics import value


def closed(store: MemoryStore, version: int, prompts: int) -> float | None:
    tables = [table(position, version=version) for position in range(prompts)]
    made = summary(tables, version=version, seconds=3.5)
    evals.close(store, KEYS, made)
    return made.mean_reward


def test_the_newest_version_on_record_is_shown_and_no_older_one_after_it() -> None:
    store, metrics = MemoryStore(), Metrics("orchestrator")
    watch = EvaluationWatch(store, KEYS, metrics)
    watch.look()
    closed(store, 4, prompts=3)
    evals.stage(store, KEYS, settings(), table(0, version=8))  # open: no summary yet
    watch.look()
    assert value(metrics, catalogue.EVALUATION_VERSION.name) == 4
    reward = closed(store, 8, prompts=2)
    watch.look()
    assert value(metrics, catalogue.EVALUATION_VERSION.name) == 8
    assert value(metrics, catalogue.EVALUATION_REWARD_MEAN.name) == pytest.approx(reward)
    assert value(metrics, catalogue.EVALUATION_MISSING.name) == 1
    assert value(metrics, catalogue.EVALUATION_SECONDS.name) == 3.5
    closed(store, 6, prompts=3)  # it was late
    watch.look()
    assert value(metrics, catalogue.EVALUATION_VERSION.name) == 8

"""What the rollout worker's fleet knows becomes gauges, and its watchers' stages become times."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client.parser import text_string_to_metric_families

from roadstead.inference import watcher
from roadstead.inference.fleet import Fleet
from roadstead.metrics import catalogue
from roadstead.metrics.registry import Metrics
from roadstead.workers.fleet_metrics import ReloadTimes, show, watches
from roadstead.workers.local import engines
from tests.support import tiny


def samples(metrics: Metrics, name: str) -> dict[tuple[str, ...], float]:
    """By label values, in the order of label names."""
    return {
        tuple(value for _, value in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(metrics.text())
        for sample in family.samples
        if sample.name == name
    }


def fleet(**changes: Any) -> Fleet:
    values: dict[str, Any] = {
        "in_flight": {"vllm-1": 3, "vllm-2": 0},
        "waiting": 2,
        "ejected": {"vllm-2": object()},
        "versions": {"vllm-1": 7, "vllm-2": None},
    }
    return cast(Fleet, SimpleNamespace(**{**values, **changes}))


def test_each_engine_has_its_load_its_version_and_whether_it_is_used() -> None:
    metrics = Metrics("rollout")
    show(fleet(), metrics)
    assert samples(metrics, "roadstead_engine_in_flight_groups") == {("vllm-1",): 3, ("vllm-2",): 0}
    assert samples(metrics, "roadstead_engine_up") == {("vllm-1",): 1, ("vllm-2",): 0}
    versions = samples(metrics, "roadstead_engine_version")
    assert versions[("vllm-1",)] == 7 and math.isnan(versions[("vllm-2",)])
    assert samples(metrics, "roadstead_fleet_waiting_groups") == {(): 2}


def test_a_reload_is_from_the_poll_that_saw_it_to_the_engines_own_word() -> None:
    metrics = Metrics("rollout")
    told = ReloadTimes(metrics, "vllm-1")
    assert samples(metrics, "roadstead_weights_reload_seconds_count") == {("vllm-1",): 0}
    for stage, seconds in [("poll", 9.0), ("attach", 9.0), ("poll", 0.1), ("download", 2.0), ("load", 3.0)]:
        told(stage, seconds)
    assert samples(metrics, "roadstead_weights_reload_seconds_count") == {("vllm-1",): 0}, "not yet read back"
    told("read back", 0.4)
    told("clean up", 5.0)
    told("a stage of a later release", 1.0)
    assert samples(metrics, "roadstead_weights_reload_seconds_count") == {("vllm-1",): 1}
    assert samples(metrics, "roadstead_weights_reload_seconds_sum")[("vllm-1",)] == pytest.approx(5.5)
    stages = samples(metrics, "roadstead_weights_stage_seconds_sum")
    assert stages[("vllm-1", "poll")] == pytest.approx(9.1) and stages[("vllm-1", "load")] == 3.0
    assert samples(metrics, "roadstead_weights_reload_timestamp_seconds")[("vllm-1",)] > 1e9


def test_the_catalogue_knows_the_watchers_stages() -> None:
    named = set(re.findall(r'_timed\("([^"]+)"', Path(watcher.__file__).read_text()))
    assert named and named <= set(catalogue.RELOAD_STAGE_SECONDS.labels["stage"])


async def test_every_engine_has_a_target_file_while_the_worker_runs(tmp_path: Path) -> None:
    config = tiny.config(tmp_path, "r", engine={"max_model_len": 128, "urls": ["http://10.0.0.7:8000"]})
    (watch,) = watches(config, fleet(), engines(config, tmp_path), tmp_path, Metrics("rollout"))
    task = asyncio.ensure_future(watch)
    await asyncio.sleep(0.05)
    (file,) = (tmp_path / "metrics").glob("*.json")
    (group,) = json.loads(file.read_text())
    assert group["targets"] == ["10.0.0.7:8000"]
    assert group["labels"] == {"job": "vllm", "run": "r", "role": "engine", "engine": "vllm-10.0.0.7-8000"}
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert not file.exists()


def test_without_metrics_nobody_watches(tmp_path: Path) -> None:
    config = tiny.config(tmp_path, "r", metrics={"enabled": False})
    assert watches(config, fleet(), [], tmp_path, Metrics("rollout")) == []

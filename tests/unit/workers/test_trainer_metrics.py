"""Every second of the trainer is in one phase, whatever it says of itself."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from roadstead.metrics.registry import Metrics
from roadstead.training.protocol import Status
from roadstead.workers.trainer_metrics import TrainerNumbers


def status(phase: str, since: float, **changes: Any) -> Status:
    values: dict[str, Any] = {
        "version": 4,
        "busy_step": None,
        "phase": phase,
        "since": since,
        "pid": 1,
        "incarnation": 0,
        "boot_seconds": 12.5,
        "last_failure": None,
    }
    return Status(**{**values, **changes})  # type: ignore[typeddict-item]


def samples(metrics: Metrics, name: str) -> dict[str, float]:
    """By the value of its one label."""
    return {
        next(iter(sample.labels.values()), ""): sample.value
        for family in text_string_to_metric_families(metrics.text())
        for sample in family.samples
        if sample.name == name
    }


def spent(metrics: Metrics) -> dict[str, float]:
    found = samples(metrics, "roadstead_trainer_phase_seconds_total")
    return {phase: seconds for phase, seconds in found.items() if seconds}


def test_time_between_two_looks_is_split_where_the_phase_began() -> None:
    metrics = Metrics("train")
    numbers = TrainerNumbers(metrics)
    numbers.look(status("idle", 90.0), 100.0)
    assert spent(metrics) == {}, "what was before the first look belongs to nobody's count"
    numbers.look(status("idle", 90.0), 101.0)
    numbers.look(status("train", 101.25, busy_step=4), 102.0)
    numbers.look(status("upload", 102.5), 103.0)
    assert spent(metrics) == pytest.approx({"idle": 1.25, "train": 1.25, "upload": 0.5})
    assert samples(metrics, "roadstead_trainer_phase_age_seconds") == {"": 0.5}


def test_long_texts_become_few_phases() -> None:
    metrics = Metrics("train")
    numbers = TrainerNumbers(metrics)
    texts = ["boot: building the DeepSpeed engine", "replay of step 3 on the way to version 5", "something new", "read"]
    numbers.look(status("idle", 0.0), 0.0)
    for at, text in enumerate(texts, start=1):
        numbers.look(status(text, at - 1.0), float(at))
    assert spent(metrics) == {"boot": 1.0, "replay": 1.0, "other": 1.0, "read": 1.0}


def test_a_trainer_that_does_not_answer_is_down_and_one_that_boots_is_not_up() -> None:
    metrics = Metrics("train")
    numbers = TrainerNumbers(metrics)
    numbers.look(status("idle", 0.0), 0.0)
    assert samples(metrics, "roadstead_trainer_up") == {"": 1.0}
    numbers.look(None, 2.0)
    assert samples(metrics, "roadstead_trainer_up") == {"": 0.0}
    assert spent(metrics) == {"idle": 2.0}, "until somebody looked and found it gone"
    numbers.look(None, 5.0)
    numbers.look(status("boot: importing torch", 4.0, version=None, incarnation=1, boot_seconds=None), 6.0)
    assert spent(metrics) == {"idle": 2.0, "down": 3.0, "boot": 1.0}
    assert samples(metrics, "roadstead_trainer_up") == {"": 0.0}
    assert samples(metrics, "roadstead_trainer_incarnation") == {"": 1.0}
    assert samples(metrics, "roadstead_trainer_boot_seconds") == {"": 12.5}


def test_a_clock_that_is_set_back_costs_no_process_its_life() -> None:
    """A counter that is lowered raises."""
    metrics = Metrics("train")
    numbers = TrainerNumbers(metrics)
    numbers.look(status("idle", 100.0), 101.0)
    numbers.look(status("train", 50.0), 51.0)
    numbers.look(status("train", 50.0), 52.0)
    assert spent(metrics) == {"train": 1.0}

"""Histories that earlier releases wrote replay on this code: a run survives a deploy in mid-flight."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from temporalio.client import WorkflowHistory
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.worker import Replayer

from roadstead.workers.orchestrator import runner
from roadstead.workflows.evaluation import Evaluation
from roadstead.workflows.training_run import TrainingRun
from roadstead.workflows.training_step import TrainingStep

FOLDER = Path(__file__).parents[2] / "histories"
RECORDED = sorted(FOLDER.glob("*.json.gz"))


def load(file: Path) -> WorkflowHistory:
    return WorkflowHistory.from_json(file.name, gzip.decompress(file.read_bytes()).decode())


def replayer() -> Replayer:
    return Replayer(
        workflows=[TrainingRun, TrainingStep, Evaluation],
        workflow_runner=runner(),
        data_converter=pydantic_data_converter,
    )


@pytest.mark.parametrize("file", RECORDED, ids=lambda file: file.name.removesuffix(".json.gz"))
async def test_it_replays(file: Path) -> None:
    await replayer().replay_workflow(load(file))


def test_every_life_is_there() -> None:
    lives = {file.name.split("-")[1] for file in RECORDED}
    assert lives == {"whole", "drained", "resumed"}


async def test_a_changed_workflow_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check can fail: a run that closes no steps at its end is another workflow."""

    async def nothing(self: TrainingRun, how: str) -> None:
        return None

    monkeypatch.setattr(TrainingRun, "_close_steps", nothing)
    failed = 0
    for file in RECORDED:
        try:
            await replayer().replay_workflow(load(file))
        except Exception:  # the SDK raises several types
            failed += 1
    assert failed >= 3

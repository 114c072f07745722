"""`roadstead audit` and `roadstead batch verify`: output, exit codes, options."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from roadstead.cli import audit, batch
from roadstead.cli.audit import step_range
from roadstead.cli.main import app
from roadstead.storage import batches
from roadstead.storage.keys import RunKeys
from tests.support.audit_run import Row, SyntheticRun
from tests.support.memory_store import MemoryStore

KEYS = RunKeys("runs", "r")


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> MemoryStore:
    store = MemoryStore()

    def with_run(name: str, data: Path | None, read: Callable[[MemoryStore, RunKeys], Any]) -> Any:
        assert name == KEYS.run_id
        return read(store, KEYS)

    for module in (audit, batch):
        monkeypatch.setattr(module, "with_run", with_run)
    return store


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})


def test_a_healthy_run_exits_with_0(store: MemoryStore) -> None:
    SyntheticRun(store, KEYS).write(3)
    result = call("audit", "r")
    assert result.exit_code == 0 and "3 steps, 192 rows, 15 checks: nothing was found" in result.stdout
    result = call("batch", "verify", "r")
    assert result.exit_code == 0 and "the log is whole" in result.stdout


def test_a_fault_exits_with_1_and_names_its_rows(store: MemoryStore) -> None:
    def plant(step: int, rows: list[Row]) -> None:
        if step == 1:
            rows[10].update(reward=None)

    SyntheticRun(store, KEYS, rows=plant).write(3)
    result = call("audit", "r")
    assert result.exit_code == 1 and "missing-reward" in result.stdout and "1/g00000009/2" in result.stdout
    result = call("audit", "r", "--json")
    report = json.loads(result.stdout)
    assert result.exit_code == 1 and report["findings"][0]["rows"][0]["group_id"] == "g00000009"
    assert call("audit", "r", "--steps", "2:").exit_code == 0
    assert call("batch", "verify", "r").exit_code == 0, "a missing reward is no broken digest"


def test_a_broken_log_is_not_verified(store: MemoryStore) -> None:
    SyntheticRun(store, KEYS).write(3)
    commit = batches.find(store, KEYS, 1)
    assert commit is not None
    store.objects[commit.data.key] = store.objects[commit.data.key][:-9]
    result = call("batch", "verify", "r")
    assert result.exit_code == 1 and commit.data.key in result.stdout and "NOT whole" in result.stdout
    result = call("batch", "verify", "r", "--json")
    verdict = json.loads(result.stdout)
    assert result.exit_code == 1 and not verdict["ok"] and verdict["problems"][0]["kind"] == "sha256"
    assert call("batch", "verify", "r", "--steps", "2").exit_code == 0


def test_weight_files_are_read_when_asked_for(store: MemoryStore) -> None:
    """The synthetic run's manifests name files that were never uploaded."""
    SyntheticRun(store, KEYS).write(1)
    result = call("batch", "verify", "r", "--weights")
    assert result.exit_code == 1 and "weight file of version 1" in result.stdout


def test_steps_are_read_as_ranges() -> None:
    assert step_range(None) is None and step_range("3") == range(3, 4) and step_range("3:5") == range(3, 5)
    assert step_range(":5") == range(0, 5) and step_range("3:")[10] == 13  # type: ignore[index]


@pytest.mark.parametrize("text", ["a", ":", "5:5", "1-3", "-1"])
def test_other_ranges_are_refused_with_the_remedy(text: str, store: MemoryStore) -> None:
    result = call("audit", "r", f"--steps={text}")
    assert result.exit_code == 2 and "10" in result.output

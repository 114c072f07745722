"""A worker's two targets: its own metrics and the Temporal SDK's; with metrics off, nothing listens."""

from __future__ import annotations

import json
import socket
import urllib.request
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from roadstead.metrics.registry import Metrics
from roadstead.metrics.server import write_target
from roadstead.workers import telemetry
from roadstead.workers.telemetry import shown
from tests.support import tiny


def targets(folder: Path) -> dict[str, tuple[str, dict[str, str]]]:
    found = {}
    for file in (folder / "metrics").glob("*.json"):
        (group,) = json.loads(file.read_text())
        found[file.stem] = (group["targets"][0], group["labels"])
    return found


def test_both_targets_answer_while_the_worker_runs(tmp_path: Path) -> None:
    with shown(tiny.config(tmp_path, "r"), tmp_path, Metrics("train")) as runtime:
        assert runtime is not None
        found = targets(tmp_path)
        labels = {"run": "r", "role": "train"}
        assert {name: labels for name, (_, labels) in found.items()} == {
            "train": {"job": "roadstead", **labels},
            "train-temporal": {"job": "temporal", **labels},
        }
        for address, _ in found.values():
            with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
                assert answer.status == 200
    assert targets(tmp_path) == {}


def test_with_metrics_off_nothing_listens(tmp_path: Path) -> None:
    config = tiny.config(tmp_path, "r", metrics={"enabled": False})
    with shown(config, tmp_path, Metrics("train")) as runtime:
        assert runtime is None and not (tmp_path / "metrics").exists()


def test_a_port_that_somebody_else_has_by_now_is_not_insisted_on(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        write_target(tmp_path / "metrics" / "train-temporal.json", taken, "temporal", {})
        with capture_logs() as logs, shown(tiny.config(tmp_path, "r"), tmp_path, Metrics("train")) as runtime:
            assert runtime is not None and targets(tmp_path)["train-temporal"][0] != taken
        assert logs == []


def test_an_sdk_that_can_not_serve_costs_a_warning_and_no_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It binds by itself: between our look for a port and its binding somebody may be quicker."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        monkeypatch.setattr(telemetry, "free_port", lambda last: other.getsockname()[1])
        with capture_logs() as logs, shown(tiny.config(tmp_path, "r"), tmp_path, Metrics("train")) as runtime:
            assert runtime is None and set(targets(tmp_path)) == {"train"}
        assert [line["event"] for line in logs] == ["metrics.not_served"]

"""A process serves its metrics where its target file says, and is none the worse when it can't."""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from roadstead.metrics import catalogue, server
from roadstead.metrics.registry import Metrics
from roadstead.metrics.server import free_port, last_port, served, target, targets_folder

LABELS = {"run": "r", "role": "orchestrator"}


def file_of(folder: Path) -> Path:
    return targets_folder(folder) / "orchestrator.json"


def scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text: str = answer.read().decode()
    return text


def test_the_target_file_leads_to_the_values_and_goes_with_the_process(tmp_path: Path) -> None:
    metrics = Metrics("orchestrator")
    metrics.set(catalogue.POLICY_VERSION, 7)
    with served(metrics.registry, tmp_path, LABELS) as port:
        (group,) = json.loads(file_of(tmp_path).read_text())
        assert group == {"targets": [f"127.0.0.1:{port}"], "labels": {"job": "roadstead", **LABELS}}
        assert port is not None and "roadstead_policy_version 7.0" in scrape(port)
    assert list(targets_folder(tmp_path).iterdir()) == [], "nothing is left, no half-written file either"
    with pytest.raises(urllib.error.URLError):
        scrape(port)


def test_after_a_kill_the_next_process_takes_over_file_and_port(tmp_path: Path) -> None:
    with served(Metrics("orchestrator").registry, tmp_path, LABELS) as first:
        left = file_of(tmp_path).read_text()
    file_of(tmp_path).write_text(left)  # as a killed process leaves it
    with served(Metrics("orchestrator").registry, tmp_path, LABELS) as second:
        assert second == first
    file_of(tmp_path).write_text(left)
    with socket.socket() as other:
        other.bind(("127.0.0.1", first or 0))
        other.listen()
        with served(Metrics("orchestrator").registry, tmp_path, LABELS) as third:
            assert third not in {None, first}
            assert f"127.0.0.1:{third}" in file_of(tmp_path).read_text()


@pytest.mark.parametrize("text", ["", "[]", "{", '[{"targets": []}]', '[{"targets": ["host:none"]}]', "3"])
def test_a_target_file_that_says_nothing_is_no_reason_to_stop(tmp_path: Path, text: str) -> None:
    targets_folder(tmp_path).mkdir()
    file_of(tmp_path).write_text(text)
    assert last_port(tmp_path, "orchestrator") == 0
    with served(Metrics("orchestrator").registry, tmp_path, LABELS) as port:
        assert port


def test_what_can_not_be_bound_or_written_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "metrics").write_text("a file where the folder should be")
    with capture_logs() as logs, served(Metrics("orchestrator").registry, tmp_path, LABELS) as port:
        assert port is not None and scrape(port), "served all the same"
    assert [line["event"] for line in logs] == ["metrics.no_target_file"]

    def refuse(*_: object) -> None:
        raise OSError("no ports here")

    monkeypatch.setattr(server, "start_http_server", refuse)
    with capture_logs() as logs, served(Metrics("orchestrator").registry, tmp_path, LABELS) as port:
        assert port is None
    assert [line["event"] for line in logs] == ["metrics.not_served"]


def test_a_target_of_another_server_has_its_own_labels(tmp_path: Path) -> None:
    with target(tmp_path, "vllm-20001", "127.0.0.1:20001", "vllm", {"run": "r", "role": "engine", "engine": "e"}):
        (group,) = json.loads((targets_folder(tmp_path) / "vllm-20001.json").read_text())
        assert group["labels"] == {"job": "vllm", "run": "r", "role": "engine", "engine": "e"}


def test_a_port_for_somebody_else_is_the_last_one_if_it_is_free() -> None:
    port = free_port(0)
    assert free_port(port) == port
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        assert free_port(port) != port

"""The local Prometheus: what it is told to scrape, and what is said when there is none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

from roadstead.infra.processes import ProcessFailed
from roadstead.infra.prometheus_server import binary, configuration
from tests.support.prometheus import promtool


@pytest.mark.parametrize("runs", [[], ["one"], ["one", "two"]])
def test_prometheus_takes_the_configuration_whatever_runs_there_are(tmp_path: Path, runs: list[str]) -> None:
    for run in runs:
        (tmp_path / "runs" / run / "metrics").mkdir(parents=True)
    (tmp_path / "rules.yml").write_text("groups: []")
    file = tmp_path / "prometheus.yml"
    file.write_text(configuration(tmp_path, tmp_path / "rules.yml"))
    promtool("check", "config", str(file))
    jobs = yaml.safe_load(file.read_text())["scrape_configs"]
    files = [pattern for job in jobs for discovery in job["file_sd_configs"] for pattern in discovery["files"]]
    assert files == [f"{tmp_path}/runs/{run}/metrics/*.json" for run in runs]


def test_without_a_binary_the_remedy_and_the_reason_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ProcessFailed, match="scripts/prometheus"):
        binary("prometheus")
    (tmp_path / "prometheus").mkdir()
    (tmp_path / "prometheus" / "absent").write_text("no Prometheus: no apt-get here\n")
    with pytest.raises(ProcessFailed, match="no apt-get here"):
        binary("promtool")

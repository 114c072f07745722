"""`roadstead metrics`: a whole prometheus.yml on stdout, and which targets answer."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import typer
import yaml
from typer.testing import CliRunner

from roadstead.cli import metrics
from roadstead.metrics.registry import Metrics
from roadstead.metrics.server import free_port, served, target

# What Prometheus 2.42 accepts in file_sd_configs: one star at most, in the last part of the path.
_ACCEPTED = re.compile(r"^[^*]*(\*[^/]*)?\.(json|yml|yaml|JSON|YML|YAML)$")


def ask(*arguments: str) -> str:
    app = typer.Typer()
    metrics.register(app)
    result = CliRunner().invoke(app, [*arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_output_is_a_configuration_and_the_targets_are_comments_in_it(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "a-run"
    gone = f"127.0.0.1:{free_port(0)}"
    with (
        served(Metrics("ledger").registry, folder, {"run": "a-run", "role": "ledger"}) as port,
        target(folder, "engine-0", gone, "vllm", {"run": "a-run", "role": "engine", "engine": "engine-0"}),
    ):
        text = ask("a-run", "--data", str(tmp_path))
        answer = json.loads(ask("a-run", "--json", "--data", str(tmp_path)))
    (job,) = yaml.safe_load(text)["scrape_configs"]
    ((pattern,),) = (discovery["files"] for discovery in job["file_sd_configs"])
    assert pattern == str(folder / "metrics" / "*.json") and _ACCEPTED.match(pattern)
    assert f"# up   http://127.0.0.1:{port}/metrics  roadstead a-run ledger\n" in text
    assert f"# down http://{gone}/metrics  vllm a-run engine engine-0\n" in text
    assert answer["scrape_configs"] == [job]
    assert {(t["role"], t["engine"], t["up"]) for t in answer["targets"]} == {
        ("engine", "engine-0", False),
        ("ledger", None, True),
    }


def test_a_run_that_is_not_here_is_named_with_those_that_are(tmp_path: Path) -> None:
    (tmp_path / "runs" / "here").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"run 'there': nothing of it in .*known there: here"):
        ask("there", "--data", str(tmp_path))

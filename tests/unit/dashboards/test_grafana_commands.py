"""`roadstead dashboards render|push`, as a person calls them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from roadstead.cli import dashboards
from roadstead.dashboards.grafana.alerts import ALERTS
from roadstead.dashboards.grafana.boards import BOARDS
from roadstead.storage.keys import RunKeys
from tests.support.fake_grafana import PASSWORD, TOKEN, USER, grafana
from tests.support.memory_store import MemoryStore
from tests.support.report_run import ReportRun


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("URL", "TOKEN", "USER", "PASSWORD"):
        monkeypatch.delenv(f"GRAFANA_{name}", raising=False)


def call(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(dashboards.app, list(arguments), env=environment or None)


def test_render_writes_everything_and_twice_the_same(tmp_path: Path) -> None:
    (tmp_path / "data" / "runs" / "one").mkdir(parents=True)
    arguments = ["render", "-o", str(tmp_path / "out"), "--data", str(tmp_path / "data")]
    first = call(*arguments, "--grafana", "https://grafana.example.org/g/", "--datasource", "mimir")
    assert first.exit_code == 0, first.output
    files = {file.relative_to(tmp_path / "out"): file.read_bytes() for file in (tmp_path / "out").rglob("*.*")}
    assert {str(file) for file in files} == {
        *(f"dashboards/{board.uid}.json" for board in BOARDS),
        *("grafana-alert-rules.json", "prometheus.yml", "roadstead.rules.yml"),
    }
    again = call(*arguments, "--grafana", "https://grafana.example.org/g/", "--datasource", "mimir")
    assert again.output == first.output
    assert files == {file.relative_to(tmp_path / "out"): file.read_bytes() for file in (tmp_path / "out").rglob("*.*")}
    out = tmp_path / "out"
    rules = yaml.safe_load((out / "roadstead.rules.yml").read_text())["groups"][0]["rules"]
    assert [rule["alert"] for rule in rules] == [alert.name for alert in ALERTS]
    assert all(
        rule["annotations"]["dashboard"].startswith("https://grafana.example.org/g/d/roadstead-") for rule in rules
    )
    assert {
        q["datasourceUid"]
        for r in json.loads((out / "grafana-alert-rules.json").read_text())["rules"]
        for q in r["data"]
    } == {
        *("mimir", "__expr__"),
    }
    config = yaml.safe_load((out / "prometheus.yml").read_text())
    assert config["rule_files"] == [str(out / "roadstead.rules.yml")]
    assert config["scrape_configs"][0]["file_sd_configs"][0]["files"] == [f"{tmp_path}/data/runs/one/metrics/*.json"]


def test_push_takes_its_login_from_the_environment() -> None:
    with grafana() as server:
        token = call("push", "--grafana", server.url, "--prometheus", "http://p:9090", GRAFANA_TOKEN=TOKEN)
        assert token.exit_code == 0, token.output
        assert len(server.dashboards) == len(BOARDS) and server.groups
        server.calls.clear()
        basic = call(
            "push",
            "--prometheus",
            "http://p:9090",
            GRAFANA_URL=server.url,
            GRAFANA_USER=USER,
            GRAFANA_PASSWORD=PASSWORD,
        )
        assert basic.exit_code == 0 and server.writes() == []


def test_push_with_a_data_source_of_theirs_makes_none_and_without_alerts_no_rules() -> None:
    with grafana() as server:
        done = call("push", "--grafana", server.url, "--token", TOKEN, "--datasource", "mimir", "--no-alerts")
        assert done.exit_code == 0, done.output
        assert server.datasources == {} and server.groups == {}
        for board in server.dashboards.values():
            assert board["templating"]["list"][0]["current"]["value"] == "mimir"


def test_push_marks_the_runs_that_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    ReportRun(store, RunKeys("runs", "marked")).write(4)

    def with_run(name: str, data: Path | None, read: Any) -> Any:
        return read(store, RunKeys("runs", name))

    monkeypatch.setattr(dashboards, "with_run", with_run)
    with grafana() as server:
        for audit in ("--audit", "--no-audit"):
            done = call("push", "marked", "--grafana", server.url, "--token", TOKEN, "--datasource", "mimir", audit)
            assert done.exit_code == 0, done.output
        assert sorted(a["tags"][3] for a in server.annotations.values()) == [
            *("marked/attempt-1", "marked/attempt-2", "marked/attempt-2-end"),
        ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--token", "t"], "--prometheus"),
        (["--token", "t", "--prometheus", "http://p", "--datasource", "d"], "--prometheus"),
        (["--prometheus", "http://p"], "GRAFANA_TOKEN"),
        (["--prometheus", "http://p", "--token", "t", "--user", "u"], "GRAFANA_TOKEN"),
    ],
)
def test_push_says_which_option_is_missing(arguments: list[str], said: str) -> None:
    answer = call("push", *arguments)
    assert answer.exit_code == 2 and said in answer.output


def test_a_refusal_is_one_message_with_the_reason_and_exit_code_1() -> None:
    with grafana() as server:
        refused = call("push", "--grafana", server.url, "--token", "glsa_wrong", "--datasource", "d")
    assert refused.exit_code not in {0, 2} and isinstance(refused.exception, SystemExit)
    assert "401" in str(refused.exception) and "Invalid API key" in str(refused.exception)


@pytest.mark.parametrize(
    ("missing", "command"),
    [
        ("grafana_foundation_sdk", ["render"]),
        ("grafana_client", ["push", "--token", "t", "--datasource", "d"]),
    ],
)
def test_without_the_extra_the_remedy_is_named(missing: str, command: list[str], tmp_path: Path) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; from roadstead.cli.dashboards import app; app({command!r})"
    answer = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert answer.returncode == 1 and missing in answer.stderr
    assert "make setup" in answer.stderr and "roadstead[dashboards]" in answer.stderr


@pytest.mark.parametrize("command", ["render", "push", "prometheus"])
def test_help_has_examples(command: str) -> None:
    text = call(command, "--help").output
    assert "Examples:" in text and f"roadstead dashboards {command}" in text

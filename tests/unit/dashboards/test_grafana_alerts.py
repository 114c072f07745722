"""Each alert fires on the fault that it is for, says what to do, and is gone when the fault is.

Prometheus' own rule tester evaluates the rules that `roadstead dashboards render` writes, on series of a healthy run
into which one fault is planted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from roadstead.dashboards.grafana.alerts import ALERTS, Alert
from roadstead.dashboards.grafana.boards import BOARDS
from roadstead.dashboards.grafana.render import DASHBOARDS, GRAFANA_RULES, RULES, render
from roadstead.dashboards.grafana.rules import for_grafana, for_prometheus
from roadstead.metrics import catalogue as c
from tests.support import planted
from tests.support.planted import BEGINS, ENDS, OVER, PLANTS, Plant
from tests.support.prometheus import promtool

URL = "http://grafana.example"
BY_NAME = {alert.name: alert for alert in ALERTS}


def expected(plant: Plant) -> dict[str, Any]:
    """The alert as it must be, labels filled in."""
    rule = next(r for r in for_prometheus(URL)["groups"][0]["rules"] if r["alert"] == plant.alert)
    labels = {"run": planted.RUN, **plant.labels}

    def filled(text: str) -> str:
        return re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda match: labels[match[1]], text)

    return {
        "exp_labels": {**labels, "severity": rule["labels"]["severity"]},
        "exp_annotations": {key: filled(text) for key, text in rule["annotations"].items()},
    }


def firing(minute: int, plant: Plant | None) -> list[dict[str, Any]]:
    """What every alert is expected to say at that minute: the plant's fires, no other does."""
    return [
        {
            "eval_time": f"{minute}m",
            "alertname": name,
            "exp_alerts": [expected(plant)] if plant is not None and name == plant.alert else [],
        }
        for name in BY_NAME
    ]


@pytest.fixture(scope="module")
def rules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rules")
    render(folder, grafana_url=URL, folder_uid="f", datasource_uid="d")
    return folder


def check(rules: Path, changes: Mapping[str, planted.Level], asked: list[dict[str, Any]], every: str = "1m") -> None:
    file = rules / "rules_test.yml"
    test = {"interval": "1m", "input_series": planted.input_series(changes), "alert_rule_test": asked}
    file.write_text(json.dumps({"rule_files": [RULES], "evaluation_interval": every, "tests": [test]}))
    promtool("test", "rules", str(file))


def test_prometheus_takes_the_rules(rules: Path) -> None:
    assert f"{len(ALERTS)} rules found" in promtool("check", "rules", str(rules / RULES))


def test_a_healthy_run_sets_no_alert_off(rules: Path) -> None:
    check(rules, {}, [asked for minute in range(1, OVER, 7) for asked in firing(minute, None)])


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.alert)
def test_the_alert_fires_on_its_fault_alone_and_clears_after_it(rules: Path, plant: Plant) -> None:
    asked = [*firing(BEGINS - 1, None), *firing(ENDS - 1, plant), *firing(OVER, None)]
    check(rules, plant.changes, asked, every="3m")  # evaluations are what the time of this test goes into


def test_a_fault_that_does_not_last_wakes_nobody(rules: Path) -> None:
    """An engine that is away for one minute, as at every restart."""
    away = {planted.of(c.ENGINE_UP, engine=planted.ENGINE): lambda minute: float(minute != 60)}
    check(rules, away, [asked for minute in range(59, 64) for asked in firing(minute, None)])


def test_the_end_of_a_run_is_no_closed_gate(rules: Path) -> None:
    """The last S + 1 steps admit nothing and generate nothing, which is how a run should end."""
    ending = {
        planted.of(c.TARGET_STEPS): lambda minute: minute * 60 // planted.STEP_S + 2,
        planted.of(c.STEP_ADMISSIONS, attempt="1"): planted.flat(0),
        planted.of(c.GENERATION_IDLE): planted.growing(60),
    }
    check(rules, ending, firing(ENDS, None))


def test_every_alert_has_a_plant_and_every_plant_an_alert() -> None:
    assert {plant.alert for plant in PLANTS} == set(BY_NAME)


def test_the_documentation_lists_every_alert_with_its_duration_and_severity() -> None:
    text = (Path(__file__).parents[3] / "docs" / "dashboards.md").read_text()
    rows = re.findall(r"^\| (Roadstead\w+) \| .+? \| (at once|\d+ min) \| (\w+) \|$", text, re.MULTILINE)
    holds = {"at once": "0s"}
    assert [(name, holds.get(hold, hold.replace(" min", "m")), severity) for name, hold, severity in rows] == [
        (alert.name, alert.hold, alert.severity) for alert in ALERTS
    ]


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_an_alert_says_whom_it_is_about_what_to_do_and_where_to_look(alert: Alert) -> None:
    assert "{{ $labels.run }}" in alert.summary and "\n" not in alert.summary and len(alert.action) > 80
    used = set(re.findall(r"\$labels\.(\w+)", alert.summary + alert.action))
    assert used <= set(alert.labels) and alert.labels[0] == "run"
    assert alert.board in BOARDS and alert.panel in alert.board.panels
    shown = {
        name
        for query in alert.panel.queries
        for name in re.findall(r"roadstead_\w+?(?=_sum|_count|\{)|\bup\b", query.expression)
    }
    judged = set(re.findall(r"roadstead_\w+?(?=_sum|_count|\{|\)|\[| )|\bup\b", alert.condition))
    assert shown & judged, "the panel shows a metric that the alert judges by"


def test_grafana_gets_the_same_alerts_as_prometheus(rules: Path) -> None:
    for_one = {rule["alert"]: rule for rule in yaml.safe_load((rules / RULES).read_text())["groups"][0]["rules"]}
    for_other = {rule["title"]: rule for rule in json.loads((rules / GRAFANA_RULES).read_text())["rules"]}
    assert list(for_one) == list(for_other) == list(BY_NAME)
    for name, rule in for_other.items():
        alert, counted = BY_NAME[name], rule["data"][0]["model"]["expr"]
        assert counted == f"count by ({', '.join(alert.labels)}) ({for_one[name]['expr']})"
        assert rule["for"] == for_one[name]["for"] and rule["labels"] == for_one[name]["labels"]
        for text in ("summary", "description"):
            assert rule["annotations"][text] == for_one[name]["annotations"][text]
        panel = rule["annotations"]["__panelId__"]
        assert (
            f"/d/{rule['annotations']['__dashboardUid__']}?viewPanel={panel}&"
            in for_one[name]["annotations"]["dashboard"]
        )


def test_links_lead_to_the_panel_that_the_dashboard_has_under_that_id(rules: Path) -> None:
    for rule in for_grafana("f", "d")["rules"]:
        alert = BY_NAME[rule["title"]]
        dashboard = json.loads((rules / DASHBOARDS / f"{rule['annotations']['__dashboardUid__']}.json").read_text())
        (panel,) = [p for p in dashboard["panels"] if str(p["id"]) == rule["annotations"]["__panelId__"]]
        assert panel["title"] == alert.panel.title

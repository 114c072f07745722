"""A real Prometheus scrapes a real run: every panel and every alert has its series, and alerts fire and clear.

Times are shortened for the alerts only: windows of 15 minutes are 10 seconds here and nothing needs to hold. With their
own times they are tested by `promtool test rules`, tests/unit/dashboards/test_grafana_alerts.py.
"""

from __future__ import annotations

import itertools
import math
import re
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from roadstead.dashboards.grafana.alerts import ALERTS
from roadstead.dashboards.grafana.board import Board
from roadstead.dashboards.grafana.boards import BOARDS
from roadstead.dashboards.grafana.queries import RUN as ONE
from roadstead.dashboards.grafana.queries import by
from roadstead.dashboards.grafana.rules import for_prometheus
from roadstead.infra.prometheus_server import configuration
from roadstead.metrics import catalogue as c
from roadstead.metrics.catalogue import CATALOGUE, Metric
from roadstead.storage import batches, steps
from tests.support.live_plants import PLANTED, planted
from tests.support.prometheus import Prometheus, promtool, running
from tests.support.workplace import LIMIT_S, Workplace

pytestmark = pytest.mark.timeout(LIMIT_S + 60)

RUN, STEPS = "watched", 8
_INTERVAL = "$__rate_interval"
_FIRE_S, _CLEAR_S = 90, 90
"""Much more than the 15 s that it takes on a quiet machine."""


@dataclass
class Scraped:
    place: Workplace
    prometheus: Prometheus
    process: subprocess.Popen[str]
    began: float
    ended: float = 0.0
    output: str = ""

    def finished(self) -> Scraped:
        if not self.ended:
            self.output, _ = self.process.communicate(timeout=LIMIT_S)
            assert self.process.returncode == 0, self.output
            self.ended = time.time()
        return self

    def series(self, expression: str) -> list[dict[str, Any]]:
        """Over the run's life, numbers only: NaN is what a quotient of nothing is."""
        expression = expression.replace("$run", RUN).replace(_INTERVAL, "10s")
        found = self.prometheus.range(expression, self.began, self.ended)
        return [s for s in found if any(not math.isnan(float(value)) for _, value in s["values"])]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("prometheus")


@pytest.fixture(scope="module")
def scraped(workplace: Workplace, folder: Path) -> Iterator[Scraped]:
    """A run under way and a Prometheus that reads its target files as they come and go."""
    rules = for_prometheus("http://grafana")
    for rule in rules["groups"][0]["rules"]:
        rule["expr"] = rule["expr"].replace("[15m:1m]", "[10s:1s]").replace("[15m]", "[10s]")
        rule["for"] = "0s"
    rules["groups"][0]["interval"] = "1s"
    (folder / "rules.yml").write_text(yaml.safe_dump(rules))
    for run in (RUN, "planted-1", "planted-2"):
        (folder / "data" / "runs" / run).mkdir(parents=True)
    (folder / "data" / "runs" / RUN).rmdir()
    (workplace.data / "runs" / RUN / "metrics").mkdir(parents=True)
    (folder / "data" / "runs" / RUN).symlink_to(workplace.data / "runs" / RUN)
    config = yaml.safe_load(configuration(folder / "data", folder / "rules.yml"))
    config["scrape_configs"][0]["scrape_interval"] = "1s"
    config["scrape_configs"][0]["file_sd_configs"][0]["refresh_interval"] = "1s"
    with running(folder, config) as prometheus:
        evaluation = {"prompts": str(workplace.folder / "prompts.jsonl"), "every": 4, "max_tokens": 4}
        process = workplace.start(RUN, training__steps=STEPS, training__kl_coefficient=0.01, evaluation=evaluation)
        began = Scraped(workplace, prometheus, process, time.time())
        try:
            yield began
        finally:
            if process.poll() is None:
                process.terminate()
                process.communicate(timeout=60)


def wait_for(prometheus: Prometheus, wanted: dict[str, str], gone: bool, seconds: float) -> None:
    """Until each alert fires for its run, or for neither."""
    deadline = time.monotonic() + seconds
    while True:
        firing = {
            (alert["labels"]["alertname"], alert["labels"]["run"])
            for rule in prometheus.rules().values()
            for alert in rule["alerts"]
            if alert["state"] == "firing"
        }
        left = {pair for pair in wanted.items() if (pair in firing) == gone}
        if not left:
            return
        assert time.monotonic() < deadline, f"{'still firing' if gone else 'not firing'} after {seconds} s: {left}"
        time.sleep(0.5)


def test_every_alert_fires_on_a_planted_fault_and_clears_when_it_is_gone(scraped: Scraped, folder: Path) -> None:
    assert set(PLANTED) == {alert.name for alert in ALERTS}
    with planted(folder / "data" / "runs") as plants:
        wait_for(scraped.prometheus, PLANTED, gone=False, seconds=_FIRE_S)
        rules = scraped.prometheus.rules()
        assert {name: rule["health"] for name, rule in rules.items()} == dict.fromkeys(PLANTED, "ok")
        for alert in ALERTS:
            one = next(a for a in rules[alert.name]["alerts"] if a["labels"]["run"] == PLANTED[alert.name])
            assert set(one["labels"]) == {"alertname", "severity", *alert.labels}
            assert PLANTED[alert.name] in one["annotations"]["summary"] and "{{" not in str(one["annotations"])
        plants.faulty = False
        wait_for(scraped.prometheus, PLANTED, gone=True, seconds=_CLEAR_S)


def test_no_alert_about_correctness_fired_for_the_real_run(scraped: Scraped) -> None:
    """Those about time mean nothing here: their own durations are what keeps a boot from setting them off."""
    scraped.finished()
    fired = {s["metric"]["alertname"] for s in scraped.series('ALERTS{alertstate="firing",run="$run"}')}
    assert not fired & {
        *("RoadsteadAdmissionSpike", "RoadsteadBoundExceeded", "RoadsteadStepNotApplied", "RoadsteadTwoWriters"),
        *("RoadsteadGroupsLost", "RoadsteadEmptyBatches"),
    }


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)
def test_every_query_of_every_panel_returns_series_of_the_run(scraped: Scraped, board: Board) -> None:
    scraped.finished()
    empty = [
        f"{panel.title}: {query.expression}"
        for panel in board.panels
        for query in panel.queries
        if not scraped.series(query.expression)
    ]
    assert empty == []


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)
def test_series_are_told_apart_by_what_their_legend_names(scraped: Scraped, board: Board) -> None:
    """No two series of a query have the same legend; a label whose values are known has all of them."""
    scraped.finished()
    for panel in board.panels:
        for query in panel.queries:
            named = set(re.findall(r"\{\{(\w+)\}\}", query.legend))
            found = [
                tuple(s["metric"].get(label, "") for label in sorted(named)) for s in scraped.series(query.expression)
            ]
            assert len(found) == len(set(found)), (panel.title, query.legend, found)


def test_every_metric_that_an_alert_judges_by_is_there(scraped: Scraped) -> None:
    """An alert whose metric is never served would be silent for ever."""
    scraped.finished()
    missing = [
        f"{alert.name}: {selector}"
        for alert in ALERTS
        for selector in set(re.findall(r"(?:roadstead_\w+|\bup\b)(?:\{[^}]*\})?", alert.condition))
        if not scraped.series(f'last_over_time({selector}[10s]) and on (run) up{{run="$run"}}')
    ]
    assert missing == []


def test_series_whose_labels_are_known_beforehand_are_all_there(scraped: Scraped) -> None:
    """An increase() misses the first event of a series that comes into being with it."""
    scraped.finished()
    for metric in CATALOGUE:
        if metric.labels and all(metric.labels.values()):
            name = f"{metric.name}_count" if metric.kind == "histogram" else metric.name
            found = {
                tuple(s["metric"][label] for label in metric.labels) for s in scraped.series(f'{name}{{run="$run"}}')
            }
            assert found == set(itertools.product(*metric.labels.values())), name


def test_numbers_are_those_of_the_records(scraped: Scraped) -> None:
    scraped.finished()
    store, keys = scraped.place.store(RUN)
    records = steps.all_of(store, keys)
    assert len(records) == STEPS

    def values(metric: Metric) -> list[float]:
        (series,) = scraped.series(by("max", ONE(metric), "run"))
        return [float(value) for _, value in series["values"]]

    ages = [
        row["staleness"]
        for record in records
        if (commit := batches.find(store, keys, record.step)) is not None
        for row in batches.read(store, commit).to_pylist()
    ]
    assert max(values(c.BATCH_AGE_MAX)) == max(ages)
    assert values(c.STALENESS_BOUND)[-1] == 2 and values(c.ADMISSION_BOUND)[-1] == 12
    # The processes end with the run: the last scrape may be a step or two before it.
    step = int(values(c.STEP)[-1])
    assert STEPS - 3 <= step <= STEPS - 1
    seen = records[step]
    assert values(c.BATCH_REWARD_MEAN)[-1] == pytest.approx(seen.mean_reward)
    assert values(c.TRAIN_LOSS)[-1] == pytest.approx(seen.metrics.loss)
    assert values(c.TOKENS_TRAINED)[-1] == sum(record.response_tokens for record in records[: step + 1])


def test_the_configuration_is_one_that_prometheus_takes(scraped: Scraped, folder: Path) -> None:
    file = folder / "own.yml"
    file.write_text(configuration(scraped.place.data, folder / "rules.yml"))
    assert "SUCCESS" in promtool("check", "config", str(file))

"""Every panel can be read: it has a unit and a description, a place of its own, and queries about the chosen run."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import pytest

from roadstead.dashboards.grafana.board import Board
from roadstead.dashboards.grafana.boards import BOARDS
from roadstead.dashboards.grafana.queries import RUN, VLLM_METRICS
from roadstead.metrics import catalogue as c
from roadstead.metrics.catalogue import BY_NAME, CATALOGUE
from tests.support import grafana_schema

UID = "some-prometheus"
boards = pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)


def panels(board: Board) -> list[dict[str, Any]]:
    return [panel for panel in board.json(UID)["panels"] if panel["type"] != "row"]


def expressions(board: Board) -> list[str]:
    return [target["expr"] for panel in panels(board) for target in panel["targets"]]


def names(expression: str) -> set[str]:
    return set(re.findall(r"\b(?:roadstead_|vllm:)[a-z0-9_:]+", expression))


def metric_of(name: str) -> str:
    """Of a series: a histogram has three."""
    return re.sub(r"_(bucket|sum|count)$", "", name)


def test_there_are_six_dashboards_and_each_links_to_the_others() -> None:
    assert [board.uid.removeprefix("roadstead-") for board in BOARDS] == [
        *("overview", "staleness", "engines", "trainer", "data", "faults")
    ]
    for board in BOARDS:
        (link,) = board.json(UID)["links"]
        assert link["tags"] == board.json(UID)["tags"] == ["roadstead"] and link["includeVars"] and link["keepTime"]


@boards
def test_every_panel_has_a_unit_a_description_of_healthy_and_a_data_source_variable(board: Board) -> None:
    for panel in panels(board):
        assert panel["title"] and panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert len(panel["description"]) > 15, panel["title"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert panel["options"], f"{panel['title']}: Grafana refuses a panel whose options are null"


@boards
def test_ids_are_unique_and_no_panel_lies_on_another_or_outside(board: Board) -> None:
    pieces = board.json(UID)["panels"]
    found = [piece["id"] for piece in pieces]
    assert found == list(range(1, len(pieces) + 1))
    for one, other in itertools.combinations([piece["gridPos"] for piece in pieces], 2):
        apart = (
            one["x"] + one["w"] <= other["x"]
            or other["x"] + other["w"] <= one["x"]
            or one["y"] + one["h"] <= other["y"]
            or other["y"] + other["h"] <= one["y"]
        )
        assert apart, (one, other)
    assert all(p["gridPos"]["x"] >= 0 and p["gridPos"]["x"] + p["gridPos"]["w"] <= 24 for p in pieces)


@boards
def test_a_panel_is_found_again_by_the_id_that_alerts_link_to(board: Board) -> None:
    by_id = {panel["id"]: panel["title"] for panel in panels(board)}
    assert {board.ids[panel]: panel.title for panel in board.panels} == by_id


@boards
def test_every_query_is_about_the_chosen_run_and_rates_follow_the_scrape_interval(board: Board) -> None:
    for expression in expressions(board):
        selectors = re.findall(r"(?:roadstead_|vllm:)[a-z0-9_:]+(\{[^}]*\})?", expression)
        selectors += re.findall(r"\b(?:up|ALERTS)(\{[^}]*\})?", expression)
        assert selectors and all(RUN.fixed in selector for selector in selectors), expression
        for window in re.findall(r"(?:rate|increase)\([^\[]+\[([^\]]+)\]", expression):
            assert window in {"$__rate_interval", "10m"}, expression


@boards
def test_units_of_one_panel_agree_with_what_its_metrics_count(board: Board) -> None:
    """No panel mixes seconds with counts: but for quotients, whose unit is neither, all its metrics have one unit."""
    for panel in board.panels:
        plain = [q.expression for q in panel.queries if " / " not in q.expression and "rate(" not in q.expression]
        units = {BY_NAME[name].unit for e in plain for name in names(e) if name in BY_NAME}
        assert len(units) <= 1, (panel.title, units)
        seconds = any("_seconds" in name for e in plain for name in names(e))
        assert not seconds or panel.unit == "s", panel.title


def test_every_metric_of_the_catalogue_is_on_some_dashboard() -> None:
    shown = {metric_of(name) for board in BOARDS for e in expressions(board) for name in names(e)}
    shown |= {name for board in BOARDS for e in expressions(board) for name in names(e)}
    missing = {metric.name for metric in (*CATALOGUE, *VLLM_METRICS)} - shown
    assert missing == set(), "show it, or say here why not"


def test_queries_name_only_what_exists() -> None:
    known = set(BY_NAME) | {metric.name for metric in VLLM_METRICS}
    for board in BOARDS:
        for expression in expressions(board):
            assert {n if n in known else metric_of(n) for n in names(expression)} <= known, expression


def test_a_misspelt_label_value_or_suffix_is_refused_where_it_is_written() -> None:
    with pytest.raises(ValueError, match="queue='outt'"):
        RUN(c.QUEUE, queue="outt")
    with pytest.raises(ValueError, match="no kind="):
        RUN(c.QUEUE, kind="out")
    with pytest.raises(ValueError, match="is a gauge"):
        RUN(c.QUEUE, "_bucket")
    with pytest.raises(ValueError, match="is a histogram"):
        RUN(c.TRAINED_AGE)
    assert RUN(c.QUEUE, queue="~in|out") == 'roadstead_queue_groups{run="$run",queue=~"in|out"}'


@boards
def test_rendering_again_gives_the_same_bytes(board: Board) -> None:
    assert json.dumps(board.json(UID)) == json.dumps(board.json(UID))


@pytest.mark.parametrize("version", grafana_schema.VERSIONS)
@boards
def test_the_json_is_what_grafanas_published_schema_says(board: Board, version: str) -> None:
    dashboard = board.json(UID)
    for annotation in dashboard["annotations"]["list"]:
        # Of the Prometheus data source, which extends annotations; the schema of the package does not have plugins.
        assert (annotation.pop("titleFormat", None), annotation.pop("tagKeys", None)) in {
            *((None, None), ("{{alertname}}", "severity"))
        }
    assert grafana_schema.faults(dashboard, version) == []


@pytest.mark.parametrize("version", grafana_schema.VERSIONS)
@pytest.mark.parametrize(
    "fault",
    [
        lambda d: d["panels"][1].update(options=None),
        lambda d: d["panels"][1].update(gridPos={"x": "0", "y": 0, "w": 1, "h": 1}),
        lambda d: d["panels"][1]["fieldConfig"]["defaults"].update(unitt="s"),
        lambda d: d["panels"][-1]["options"]["legend"].update(placement="left"),
        lambda d: d["templating"]["list"][0].pop("type"),
        lambda d: d.update(panelz=[]),
    ],
)
def test_the_schema_finds_planted_faults(version: str, fault: Any) -> None:
    """Otherwise the test above could not fail."""
    dashboard = BOARDS[0].json(UID)
    fault(dashboard)
    assert grafana_schema.faults(dashboard, version) != []

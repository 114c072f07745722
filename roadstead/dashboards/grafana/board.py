"""What a dashboard is, and how it becomes Grafana's.

Owns: what all dashboards share: the variables, the annotations, the links to each other. Never touches: panels.
Invariant: a dashboard is a function of this code alone: rendering it again gives the same JSON.
A crash leaves: nothing, it is pure.

Annotations come from two places: what `roadstead dashboards push` writes about a run's records (attempts, bad steps),
and Prometheus' own series about alerts that fire.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as models

from roadstead.dashboards.grafana.marks import Kind
from roadstead.dashboards.grafana.panels import DATASOURCE, Panel, Row, ids, placed
from roadstead.dashboards.grafana.queries import RUN
from roadstead.metrics.catalogue import POLICY_VERSION

TAG = "roadstead"
_GRAFANA = models.DataSourceRef(type_val="grafana", uid="-- Grafana --")
_MOST_ANNOTATIONS = 500

_MARKS: dict[Kind, tuple[str, str]] = {
    "resume": ("Starts and resumes", "blue"),
    "drain": ("Drains, stops, ends", "purple"),
    "bad-step": ("Bad steps", "red"),
}
"""Layers of annotations that a person can switch, by the tag that Grafana finds them by."""


@dataclass(frozen=True)
class Board:
    uid: str
    title: str
    description: str
    rows: tuple[Row, ...]

    @property
    def panels(self) -> tuple[Panel, ...]:
        return tuple(panel for _, panels in self.rows for panel in panels)

    @cached_property
    def ids(self) -> dict[Panel, int]:
        return ids(self.rows)

    def json(self, datasource_uid: str) -> dict[str, Any]:
        """As Grafana's API and its file provisioning take it. datasource_uid: what is chosen when it is opened."""
        board = builders.Dashboard(self.title).uid(self.uid).description(self.description).tags([TAG])
        board = board.editable().timezone("browser").refresh("10s").time("now-3h", "now")
        board = board.tooltip(models.DashboardCursorSync.CROSSHAIR).with_variable(_datasource(datasource_uid))
        board = board.with_variable(_run()).link(_links())
        for annotation in _annotations():
            board = board.annotation(annotation)
        for piece in placed(self.rows):
            board = board.with_row(piece) if isinstance(piece, builders.Row) else board.with_panel(piece)
        done: dict[str, Any] = json.loads(json.dumps(board.build(), cls=JSONEncoder))
        for annotation in done["annotations"]["list"]:
            if annotation["datasource"]["type"] == "prometheus":
                # The typed builder lacks them; without a title Grafana shows a mark that says nothing.
                annotation |= {"titleFormat": "{{alertname}}", "tagKeys": "severity"}
            else:
                annotation["target"]["refId"] = "Anno"  # required by the schema; the builder has no word for it
        return done


def _datasource(uid: str) -> builders.DatasourceVariable:
    chosen = models.VariableOption(selected=True, text=uid, value=uid)
    return builders.DatasourceVariable("datasource").label("Data source").type("prometheus").current(chosen)


def _run() -> builders.QueryVariable:
    names = builders.QueryVariable("run").label("Run").datasource(DATASOURCE)
    names = names.query({"query": f"label_values({POLICY_VERSION.name}, run)", "refId": "run"})
    # One run: annotations are found by its name as a tag, and a query for one of several would find all.
    names = names.multi(False).include_all(False).sort(models.VariableSort.ALPHABETICAL_ASC)
    return names.refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)


def _links() -> builders.DashboardLink:
    link = builders.DashboardLink("Roadstead").type(models.DashboardLinkType.DASHBOARDS).tags([TAG])
    return link.include_vars(True).keep_time(True).as_dropdown(False)


def _annotations() -> list[builders.AnnotationQuery]:
    found = []
    for kind, (name, colour) in _MARKS.items():
        target = builders.AnnotationTarget().limit(_MOST_ANNOTATIONS).match_any(False).type("tags")
        target = target.tags([TAG, "$run", kind])
        layer = builders.AnnotationQuery().name(name).datasource(_GRAFANA).enable(True).icon_color(colour)
        found.append(layer.target(target))
    alerts = builders.AnnotationQuery().name("Alerts").datasource(DATASOURCE).enable(True).icon_color("orange")
    return [*found, alerts.expr(f'ALERTS{{alertstate="firing",{RUN.fixed}}}')]

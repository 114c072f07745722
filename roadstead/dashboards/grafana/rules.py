"""The alerts as Prometheus' rules and as Grafana's.

Owns: both forms. Never touches: conditions and words, which are alerts.py's.
Invariant: both have the same alerts with the same conditions, durations, labels and texts.
A crash leaves: nothing, it is pure.
"""

from __future__ import annotations

import json
from typing import Any

from grafana_foundation_sdk.builders import alerting, expr, prometheus
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.alerting import RelativeTimeRange
from grafana_foundation_sdk.models.dashboard import DataSourceRef

from roadstead.dashboards.grafana.alerts import ALERTS, Alert
from roadstead.dashboards.grafana.queries import by

GROUP = "roadstead"
_EVERY_S = 30
"""Between evaluations. Grafana wants a multiple of its own 10 s."""
_EXPRESSION = DataSourceRef(type_val="__expr__", uid="__expr__")


def for_prometheus(grafana_url: str) -> dict[str, Any]:
    """A rule file. grafana_url: what links to panels begin with."""
    rules = [
        {
            "alert": alert.name,
            "expr": alert.condition,
            "for": alert.hold,
            "labels": {"severity": alert.severity},
            "annotations": {
                "summary": alert.summary,
                "description": alert.action,
                "dashboard": f"{grafana_url.rstrip('/')}{panel_path(alert)}",
            },
        }
        for alert in ALERTS
    ]
    return {"groups": [{"name": GROUP, "interval": f"{_EVERY_S}s", "rules": rules}]}


def for_grafana(folder_uid: str, datasource_uid: str) -> dict[str, Any]:
    """A rule group, as Grafana's provisioning API takes it (PUT .../rule-groups/roadstead)."""
    group = alerting.RuleGroup(GROUP).folder_uid(folder_uid).interval(_EVERY_S)
    group = group.rules([_rule(alert, folder_uid, datasource_uid) for alert in ALERTS])
    done: dict[str, Any] = json.loads(json.dumps(group.build(), cls=JSONEncoder))
    return done


def panel_path(alert: Alert) -> str:
    """Of the alert's panel in Grafana, for the run that it fires for."""
    return f"/d/{alert.board.uid}?viewPanel={alert.board.ids[alert.panel]}&var-run={{{{ $labels.run }}}}"


def _rule(alert: Alert, folder_uid: str, datasource_uid: str) -> alerting.Rule:
    """A: how many series the condition has, by the alert's labels. C: whether that is more than 0. The values of a
    condition's series say nothing: a queue that is empty is a series with the value 0."""
    counted = prometheus.Dataquery().expr(by("count", alert.condition, *alert.labels)).instant().ref_id("A")
    threshold = expr.ExprTypeThresholdConditionsEvaluator().type("gt").params([0])
    more = expr.TypeThreshold().datasource(_EXPRESSION).expression("A").ref_id("C")
    more = more.conditions([expr.ExprTypeThresholdConditions().evaluator(threshold)])
    range_ = RelativeTimeRange(from_val=600, to=0)
    rule = alerting.Rule(alert.name).folder_uid(folder_uid).rule_group(GROUP).org_id(1).for_val(alert.hold)
    rule = rule.with_query(
        alerting.Query("A").datasource_uid(datasource_uid).relative_time_range(range_).model(counted)
    ).with_query(alerting.Query("C").datasource_uid("__expr__").relative_time_range(range_).model(more))
    # No series means that all is well, which Grafana calls no data.
    rule = rule.condition("C").no_data_state("OK").exec_err_state("Error").labels({"severity": alert.severity})
    return rule.annotations(
        {
            "summary": alert.summary,
            "description": alert.action,
            # Grafana takes both or neither, and links and marks the panel by them.
            "__dashboardUid__": alert.board.uid,
            "__panelId__": str(alert.board.ids[alert.panel]),
        }
    )

"""What is worth telling somebody: one list, from which Prometheus' rules and Grafana's are made.

Owns: the order of alerts. Never touches: how they are evaluated.
Invariant: every alert has a fault planted for it in the tests, on which it fires alone.
A crash leaves: nothing, it is pure.
"""

from __future__ import annotations

from roadstead.dashboards.grafana.alerts import halts, losses, outages, table
from roadstead.dashboards.grafana.alerts.base import Alert

__all__ = ["ALERTS", "Alert"]

ALERTS: tuple[Alert, ...] = (*table.ALERTS, *halts.ALERTS, *outages.ALERTS, *losses.ALERTS)

"""Dashboards and alerts as code: six dashboards, one list of alerts, for Grafana and Prometheus.

Owns: panels (boards/), alerts, their two forms (rules), files (render), the way into a Grafana (push, marks).
Never touches: where metrics come from; a run's objects, which it only reads.
Invariant: every metric is named by its object in the catalogue.
A crash leaves: nothing of a run.

Needs the extra `dashboards`: grafana-foundation-sdk to build, grafana-client to push.
"""

FOLDER_UID = "roadstead"
DATASOURCE_UID = "roadstead-prometheus"
"""Of the data source that is made where no other is named."""

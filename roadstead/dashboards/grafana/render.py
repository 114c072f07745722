"""Everything as files, for those who provision by file, or want to see it first.

Owns: the files of one folder. Never touches: servers.
Invariant: rendering again writes the same bytes.
A crash leaves: some files new and some old; render again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from roadstead.dashboards.grafana.boards import BOARDS
from roadstead.dashboards.grafana.rules import for_grafana, for_prometheus

DASHBOARDS, RULES, GRAFANA_RULES = "dashboards", "roadstead.rules.yml", "grafana-alert-rules.json"


def render(to: Path, *, grafana_url: str, folder_uid: str, datasource_uid: str) -> list[Path]:
    """Write dashboards and alert rules under `to`; the files, in order. Raises OSError."""
    written = []
    for board in BOARDS:
        written.append(_write(to / DASHBOARDS / f"{board.uid}.json", board.json(datasource_uid)))
    written.append(_write(to / GRAFANA_RULES, for_grafana(folder_uid, datasource_uid)))
    rules = yaml.safe_dump(for_prometheus(grafana_url), sort_keys=False, width=120)
    (to / RULES).write_text(f"# Written by `roadstead dashboards render`; do not edit.\n{rules}")
    return [*written, to / RULES]


def _write(file: Path, content: dict[str, Any]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content, indent=1) + "\n")
    return file

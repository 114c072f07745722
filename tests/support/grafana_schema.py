"""Grafana's published schema of a dashboard, as JSON Schema.

Made once from the package @grafana/schema (Apache-2.0), 11.6.16 and 13.2.3, with typescript-json-schema 0.68.0:

    npm i @grafana/schema@13.2.3 typescript-json-schema typescript@5
    npx typescript-json-schema p.ts Published --required --ignoreErrors

where p.ts exports an interface Published of four members: dashboard (Dashboard of the package), timeseriesOptions and
timeseriesField (Options and FieldConfig of composable/timeseries), statOptions (Options of composable/stat). Then
descriptions were dropped and `additionalProperties: false` was set on every object, so that a misspelt key is found,
but for queries, variables, annotations, field configurations and free records, which plugins extend.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from jsonschema import Draft7Validator
from jsonschema.exceptions import best_match

VERSIONS = ("11.6.16", "13.2.3")
_PARTS = {"timeseries": ("timeseriesOptions", "timeseriesField"), "stat": ("statOptions", None)}


@cache
def _validator(version: str, part: str) -> Draft7Validator:
    whole = json.loads((Path(__file__).parent / f"grafana-schema-{version}.json").read_text())
    # The lowest threshold is -Infinity, which JSON has as null, as the package's own comment on it says.
    whole["definitions"]["Threshold"]["properties"]["value"]["type"] = ["number", "null"]
    return Draft7Validator({**whole["properties"][part], "definitions": whole["definitions"]})


def faults(dashboard: dict[str, Any], version: str) -> list[str]:
    """Where a dashboard is not what the schema says; its panels' options and fields too."""
    found = [_said("dashboard", error) for error in _validator(version, "dashboard").iter_errors(dashboard)]
    for panel in dashboard["panels"]:
        if panel["type"] == "row":
            continue
        options, fields = _PARTS[panel["type"]]
        pieces = [(options, panel["options"])]
        if fields is not None:
            pieces.append((fields, panel["fieldConfig"]["defaults"]["custom"]))
        for part, piece in pieces:
            where = f"panel {panel.get('id')} {part}"
            found += [_said(where, error) for error in _validator(version, part).iter_errors(piece)]
    return found


def _said(where: str, error: Any) -> str:
    best = best_match([error]) or error
    return f"{where}: {'/'.join(map(str, best.absolute_path))}: {best.message[:200]}"

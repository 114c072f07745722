"""The catalogue keeps its own laws, and everything in it has somebody who sets it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from roadstead.infra.processes import ProcessFailed
from roadstead.infra.prometheus_server import binary
from roadstead.metrics import catalogue, table
from roadstead.metrics.catalogue import AS_THEY_COME, BY_NAME, CATALOGUE, LABELS, PREFIX, UNITS, Metric
from roadstead.metrics.registry import Metrics

ROOT = Path(__file__).parents[3]
ROLES = ("orchestrator", "ledger", "rollout", "train")


@pytest.mark.parametrize("metric", CATALOGUE, ids=lambda metric: metric.name)
def test_a_metric_is_named_by_convention_and_explained(metric: Metric) -> None:
    assert re.fullmatch(r"roadstead_[a-z][a-z0-9_]*", metric.name) and metric.name.startswith(PREFIX)
    assert metric.unit in UNITS
    stem = metric.name.removesuffix("_total")
    assert not metric.unit or stem.endswith(f"_{metric.unit}"), "the unit is in the name, before _total"
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    assert not re.search(r"_(count|sum|bucket|created|info)$", stem), "suffixes that Prometheus makes itself"
    assert metric.help.endswith(".") and len(metric.help) > 15
    assert set(metric.labels) <= LABELS, "few labels, and none of a step, a group or a prompt"
    assert bool(metric.buckets) == (metric.kind == "histogram") and list(metric.buckets) == sorted(metric.buckets)


def test_names_are_unique_and_the_cardinality_is_low() -> None:
    assert len(BY_NAME) == len(CATALOGUE)
    for metric in CATALOGUE:
        known = [len(values) for values in metric.labels.values() if values is not AS_THEY_COME]
        assert all(n <= 16 for n in known), metric.name


def used() -> dict[str, set[str]]:
    """Constant of the catalogue to the files of the package that set it."""
    found: dict[str, set[str]] = {}
    for file in (ROOT / "roadstead").rglob("*.py"):
        for line in file.read_text().splitlines():
            if "begin(" not in line:
                for name in re.findall(r"catalogue\.([A-Z][A-Z0-9_]+)\b(?!\.labels)", line):
                    found.setdefault(name, set()).add(str(file.relative_to(ROOT)))
    return found


def test_every_metric_of_the_catalogue_is_set_somewhere() -> None:
    names = {name for name, value in vars(catalogue).items() if isinstance(value, Metric)}
    assert names - set(used()) == set(), "declared and never set"


def test_the_page_has_what_the_catalogue_has() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    assert page == table.written(page), "make it anew: python -m roadstead.metrics.table docs/metrics.md"
    assert all(f"`{metric.name}`" in page for metric in CATALOGUE)
    with pytest.raises(ValueError, match="two lines"):
        table.written("a page without marks")


def full(role: str) -> str:
    """The text that a process of that role serves when everything has a value."""
    metrics = Metrics(role)
    for metric in CATALOGUE:
        if metric.role in {role, "every"}:
            labels = {name: values[0] if values else "x" for name, values in metric.labels.items()}
            match metric.kind:
                case "counter":
                    metrics.add(metric, 1.0, **labels)
                case "gauge":
                    metrics.set(metric, 1.0, **labels)
                case "histogram":
                    metrics.observe(metric, 1.0, **labels)
    return metrics.text()


@pytest.mark.parametrize("role", ROLES)
def test_prometheus_own_linter_has_nothing_to_say(role: str) -> None:
    try:
        promtool = binary("promtool")
    except ProcessFailed as absent:
        pytest.skip(str(absent))
    answer = subprocess.run(
        [promtool, "check", "metrics"], input=full(role), capture_output=True, text=True, timeout=60
    )
    assert (answer.returncode, answer.stdout + answer.stderr) == (0, "")

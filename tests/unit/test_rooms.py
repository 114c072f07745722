"""The architecture holds: imports run downwards only, and light things stay light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "roadstead"

# What a room may import, besides itself. `roadstead.config`, `process` and `metrics` are below all of them.
ALLOWED: dict[str, set[str]] = {
    "staleness": set(),
    "metrics": set(),
    "storage": {"staleness", "config"},
    "environments": {"config"},
    "inference": {"storage", "staleness", "config", "process", "metrics"},
    "training": {"storage", "staleness", "config", "process", "metrics"},
    "trackers": {"storage", "config"},
    "workflows": {"activities", "storage", "staleness"},
    "activities": {
        *("workflows", "inference", "training", "environments", "storage", "staleness", "config", "metrics"),
    },
    "workers": {
        *("workflows", "activities", "inference", "training", "environments", "storage", "config"),
        *("metrics", "trackers"),
    },
    "infra": {"workers", "workflows", "training", "storage", "config", "process", "metrics"},
    "benchmarks": {"staleness", "storage"},
    "dashboards": {"storage", "staleness", "metrics"},
    "cli": {
        *("infra", "workers", "workflows", "environments", "storage", "config", "benchmarks", "dashboards", "metrics"),
    },
    "config": set(),
    "process": set(),
}


def imports(path: Path) -> set[str]:
    """Rooms of ours that a file imports."""
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
            if node.module == "roadstead":
                names = [f"roadstead.{alias.name}" for alias in node.names]
        rooms |= {name.split(".")[1] for name in names if name.startswith("roadstead.")}
    return rooms


def files() -> list[Path]:
    return sorted(p for p in ROOT.rglob("*.py") if p.parent != ROOT or p.name != "__init__.py")


@pytest.mark.parametrize("path", files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_a_file_imports_only_rooms_below_its_own(path: Path) -> None:
    room = path.relative_to(ROOT).parts[0].removesuffix(".py")
    assert imports(path) - {room} <= ALLOWED[room]


def test_activities_are_the_only_way_from_workflows_to_the_rooms_below() -> None:
    for path in (ROOT / "workflows").glob("*.py"):
        text = path.read_text()
        assert "import boto3" not in text and "import httpx" not in text and "open(" not in text


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_every_module_says_what_it_owns(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text())) or not path.read_text().strip()


def test_the_workflow_worker_does_not_import_torch() -> None:
    """torch in a workflow module makes the worker fail to start, and costs seconds and hundreds of MB."""
    code = (
        "import sys, roadstead.workers.orchestrator, roadstead.workers.ledger, roadstead.workers.train\n"
        "import roadstead.workers.rollout, roadstead.cli.main\n"
        "print(sorted({'torch', 'transformers', 'vllm', 'deepspeed'} & set(sys.modules)))"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert answer.stdout.strip() == "[]"


def test_the_ledger_is_pure() -> None:
    forbidden = {"temporalio", "time", "datetime", "random", "os", "pathlib", "socket", "asyncio", "threading"}
    for path in (ROOT / "staleness").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert not {a.name.split(".")[0] for a in node.names} & forbidden, path
            elif isinstance(node, ast.ImportFrom) and node.module:
                assert node.module.split(".")[0] not in forbidden, path

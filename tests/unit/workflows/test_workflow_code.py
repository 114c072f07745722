"""Rules of workflow code that no run shows reliably."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import roadstead.workflows

FILES = sorted(Path(roadstead.workflows.__path__[0]).glob("*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_no_finally(file: Path) -> None:
    """A `finally` also runs when an evicted workflow is garbage-collected, inside whatever other workflow runs then:
    a command in it lands in a stranger's history, which no longer replays."""
    tries = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Try)]
    assert not [node.lineno for node in tries if node.finalbody]


def test_there_are_files() -> None:
    assert {"training_run.py", "training_step.py"} <= {file.name for file in FILES}

"""docs/known-faults.md names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_every_named_test_exists() -> None:
    text = (TESTS.parent / "docs" / "known-faults.md").read_text()
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", text)
    assert len(named) > 30
    for file, test in named:
        found = [path for path in TESTS.rglob(file) if re.search(rf"def {test}\(", path.read_text())]
        assert found, f"{file}::{test}"

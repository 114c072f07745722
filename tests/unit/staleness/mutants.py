"""Mutants of the ledger: each is one small mistake, and the tests of this folder must notice it.

    python -m pytest tests/unit/staleness/mutants.py -m mutation

A mutant is (file, old text, new text); the old text must stand exactly once in the file. Each is applied to a copy
of the package, and this folder's tests run against the copy. Slow (minutes), hence not collected by default.
"""

# ruff: noqa: E501 - a mutant is easier to compare on one line.

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PACKAGE = HERE.parents[2] / "roadstead" / "staleness"

QUICKEST_FIRST = ["unit/staleness/test_ledger.py", "unit/staleness/test_search.py", "unit"]

MUTANTS = [
    # Which slots are legal.
    ("window.py", "max(0, deadline + 1 - self.first)", "max(0, deadline + 2 - self.first)"),
    ("window.py", "max(0, deadline + 1 - self.first)", "max(0, deadline - self.first)"),
    ("window.py", "stays = group.buffer <= deadline", "stays = group.buffer <= deadline + 1"),
    ("ledger.py", "end = self._version + self._max_staleness + 1", "end = self._version + self._max_staleness + 2"),
    ("ledger.py", "end = self._version + self._max_staleness + 1", "end = self._version + self._max_staleness"),
    ("ledger.py", "end if self._step_target is None else min(end, self._step_target)", "end"),
    ("ledger.py", "min(version, self._version)", "version"),
    ("ledger.py", "version + self._max_staleness)\n        if not kept", "version + self._max_staleness + 1)\n        if not kept"),
    ("ledger.py", "group is None or version >= group.version", "group is None or version == group.version"),
    # Reserve.
    ("window.py", "for row in reversed(rows):", "for row in rows:"),
    ("window.py", "any(row.empty and row.need for row in", "any(row.empty for row in"),
    ("window.py", "sum(row.empty for row in self._rows[start:])", "sum(row.empty for row in self._rows)"),
    ("buffer.py", "return self.occupied + self.empty", "return self.occupied"),
    # Occupy and the moves it makes.
    ("window.py", "self._refill(row, row.lift(group), moves)\n        rows", "row.close(row.lift(group))\n        rows"),
    ("window.py", "free = free or row.empty > 0", "free = True"),
    ("window.py", "if free and row.need:", "if free:"),
    ("window.py", "if earlier.latest > reach:", "if earlier.latest > reach + 1:"),
    ("window.py", "        while candidates and candidates[-1].latest >= row.number:\n            source =", "        while candidates and candidates[-1].latest > row.number:\n            source ="),
    ("window.py", "            while candidates and candidates[-1].latest >= row.number:\n                source = candidates.pop()\n", ""),
    ("window.py", "            row, gap = source, left\n        head", "            row, gap = source, left\n            candidates.clear()\n        head"),
    ("buffer.py", "index = min((m", "index = max((m"),
    ("buffer.py", "if d >= buffer)", "if d > buffer)"),
    ("buffer.py", "if deadline > self.latest:", "if deadline < self.latest:"),
    ("buffer.py", "self.latest = max(self._due, default=-1)", "self.latest = -1"),
    ("buffer.py", "self.latest = max(self._due, default=-1)", "pass"),
    # Discard and evict.
    ("window.py", "        self._settle(row, moves)\n        self._drop_surplus()\n        return moves", "        self._drop_surplus()\n        return moves"),
    ("window.py", "            row = self._refill(row, row.lift(group), moves)\n        self._settle", "            row.close(row.lift(group))\n        self._settle"),
    ("window.py", "            row = source\n        return row", "            return source\n        return row"),
    ("window.py", "            row = self._pull(row, moves)\n", ""),
    ("window.py", "            self._refill(row, row.widen(), moves)\n", ""),
    ("window.py", "        if row.empty:\n            row = self._pull", "        if True:\n            row = self._pull"),
    ("window.py", "while row.empty and row.need:", "while row.empty:"),
    ("buffer.py", "        last.index = group.index\n", ""),
    ("buffer.py", "        self.need += 1\n", ""),
    ("ledger.py", "if group.occupied != occupied:", "if False:"),
    # Lower.
    ("window.py", "            stays = self._reserve(group, self._until(deadline))\n            self._settle(row, moves)\n", "            stays = self._reserve(group, self._until(deadline))\n"),
    ("window.py", "            row = self._refill(row, gap, moves)\n            stays", "            row.close(gap)\n            stays"),
    ("window.py", "stays = self._reserve(group, self._until(deadline))", "stays = self.admit(group)"),
    ("window.py", "        self._drop_surplus()\n        return stays and group not in self.surplus", "        return stays"),
    ("window.py", "return stays and group not in self.surplus", "return stays"),
    # Over-sampling.
    ("window.py", "self._earliest(rows) or self._completed(rows)", "self._earliest(rows)"),
    ("window.py", "if target is None or target.need > 1:", "if target is None or target.need > 2:"),
    ("window.py", "        if not target.empty:\n            self._displace(target)\n", ""),
    ("window.py", "for earlier in reversed(self._rows[: row.number - self.first]):", "for earlier in self._rows[: row.number - self.first]:"),
    ("window.py", "        if self.slots > self.batch_size:\n            self._drop_surplus()\n        return True", "        return True"),
    ("window.py", "if row.need and row is not completed", "if row.need"),
    ("window.py", "        self.surplus += row.reserved()\n", ""),
    ("buffer.py", "if group.deadline < buffer]", "if group.deadline <= buffer]"),
    ("ledger.py", "                self._surplus.append(group.id)\n", ""),
    # Retries and the order of training.
    ("ledger.py", "if group is None or group.occupied:\n            return self.where", "if group is None:\n            return self.where"),
    ("ledger.py", "if self._ended(group_id) or group_id in self._groups:", "if group_id in self._groups:"),
    ("ledger.py", "window.first != self._version or not", "not"),
    ("ledger.py", "if version <= self._version:", "if version < self._version:"),
    ("ledger.py", "if version != self._window.first:", "if version > self._version + 1:"),
    ("ledger.py", "        self._window.extend(self._end())\n\n", "\n"),
    ("history.py", "if b <= buffer - self.depth]:\n            for", "if b < buffer - self.depth]:\n            for"),
    ("history.py", "for g, b in self.dropped.items() if b <= buffer - self.depth", "for g, b in self.dropped.items() if b < buffer - self.depth"),
    ("history.py", "if len(self.dropped) > self.depth * self.slots * _DROPPED_A_SLOT:", "if False:"),
    # Targets, bounds and the dictionary.
    ("ledger.py", "batches = -(-len(self._groups) // self._batch_size)", "batches = len(self._groups) // self._batch_size"),
    ("ledger.py", "for groups in (finished, unfinished):", "for groups in (unfinished, finished):"),
    ("ledger.py", "key=lambda group: group.deadline", "key=lambda group: -group.deadline"),
    ("ledger.py", "            group.deadline = group.version + max_staleness\n", "            pass\n"),
    ("ledger.py", "self._relay() if self._end() != self._window.end else ()", "()"),
    ("ledger.py", "(row.reserve, reversed(reserved))", "(row.reserve, reserved)"),
    ("ledger.py", "or row.number > group.deadline", ""),
    ("ledger.py", "self._surplus = list(state[\"surplus\"])", "pass"),
]  # fmt: skip

pytestmark = pytest.mark.mutation


def run_tests(root: Path, mutant: tuple[str, str, str] | None) -> subprocess.CompletedProcess[str]:
    """The tests of this folder against a copy of the package under `root`, with the mutant applied."""
    shutil.copytree(PACKAGE, root / "roadstead" / "staleness", ignore=shutil.ignore_patterns("__pycache__"))
    (root / "roadstead" / "__init__.py").touch()
    shutil.copytree(HERE, root / "unit" / "staleness", ignore=shutil.ignore_patterns("__pycache__"))
    if mutant is not None:
        name, old, new = mutant
        path = root / "roadstead" / "staleness" / name
        source = path.read_text()
        assert source.count(old) == 1, f"{name} has {source.count(old)} times {old!r}; correct the mutant"
        path.write_text(source.replace(old, new))
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-q", "--tb=line", "-p", "no:cacheprovider", *QUICKEST_FIRST],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_without_a_mutant_the_copy_passes(tmp_path: Path) -> None:
    result = run_tests(tmp_path, None)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("mutant", MUTANTS, ids=[f"{i:02}-{name}" for i, (name, _, _) in enumerate(MUTANTS)])
def test_the_mutant_is_killed(mutant: tuple[str, str, str], tmp_path: Path) -> None:
    result = run_tests(tmp_path, mutant)
    # 1: tests failed. Anything else would be a mutant that was never tested.
    assert result.returncode == 1, f"survived: {mutant}\n{result.stdout}"

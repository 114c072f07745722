"""Audit: what of a run's log is broken, or looks wrong, and which rows it is.

Owns: the order of work: read and prove everything once, ask every check, rank. Never touches: the log; it writes
nothing.
Invariant: a report is a function of the run's objects alone; auditing again gives the same report.
A crash leaves: nothing.

    from roadstead.storage.audit import audit, verify
    report = audit(store, keys, steps=range(10, 20))
    for finding in report.findings: print(finding.severity, finding.title, finding.rows)
"""

from __future__ import annotations

from collections.abc import Callable

from roadstead.storage.audit.report import Finding, Report, RowRef
from roadstead.storage.audit.verify import Problem, Verdict, verify
from roadstead.storage.keys import RunKeys
from roadstead.storage.objects import ObjectStore

__all__ = ["Finding", "Problem", "Report", "RowRef", "Verdict", "audit", "verify"]


def audit(
    store: ObjectStore,
    keys: RunKeys,
    steps: range | None = None,
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Report:
    """Check steps `steps` of a run, default all, and rank what is found. `progress`: (steps read, steps in all).

    Raises ObjectMissing without such a run, ValueError without such steps, StoreError when the store does not answer.
    """
    # Only here: pandas takes half a second to import, which every other command of the CLI would pay.
    from roadstead.storage.audit.checks import CHECKS
    from roadstead.storage.audit.evidence import read_evidence

    evidence = read_evidence(store, keys, steps, progress)
    checks = CHECKS if len(evidence.rows) else CHECKS[:1]
    notes = list(evidence.notes)
    if not len(evidence.rows):
        notes.append("no batch could be read: only the digests were checked")
    if not evidence.whole:
        notes.append("a window of steps: whether prompts were skipped is only known of a whole run")
    return Report.ranked(
        (finding for check in checks for finding in check.look(evidence)),
        run_id=keys.run_id,
        steps=tuple(e.step for e in evidence.steps),
        rows=len(evidence.rows),
        checks=tuple(check.name for check in checks),
        notes=tuple(notes),
    )

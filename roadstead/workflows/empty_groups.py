"""The guard against training on nothing.

Owns: the count of groups in a row that hold nothing to learn from, and the words in which a run stops because of them.
Never touches: Temporal, the ledger. Pure.
Invariant: one group that can be learned from ends the count.
A crash leaves: nothing; the count travels as `EmptyGroups`.

Without it a broken environment or reward burns hours and raises no error (open-instruct #1224, TRL #3452).
"""

from __future__ import annotations

from roadstead.storage.references import StagedGroup
from roadstead.workflows.messages import EmptyGroups

_NOTES = 20
"""Different reasons kept: an environment may put a number into each, and the count travels with the run's state."""
_TOLD = 3
"""Reasons a person is told."""
_OTHER = "other reasons"


def count(empty: EmptyGroups, report: StagedGroup, version: int) -> EmptyGroups:
    """The count after one more finished group. version: the policy's, now."""
    if report.trainable and report.filtered is None:
        return EmptyGroups()
    note = report.note or f"filtered by {report.filtered}"
    if note not in empty.notes and len(empty.notes) >= _NOTES:
        note = _OTHER
    return EmptyGroups(
        count=empty.count + 1,
        since_version=empty.since_version if empty.count else version,
        notes={**empty.notes, note: empty.notes.get(note, 0) + 1},
    )


def verdict(empty: EmptyGroups, groups_per_batch: int, batches: int) -> str | None:
    """Why the run must stop, in words to act on; None: it may go on."""
    if empty.count < groups_per_batch * batches:
        return None
    notes = sorted(empty.notes.items(), key=lambda item: (-item[1], item[0]))
    told = "; ".join(f"{note} in {times} of {empty.count} groups" for note, times in notes[:_TOLD])
    rest = len(notes) - _TOLD
    return (
        f"nothing to learn from in {empty.count} groups in a row, {batches} batches' worth, since step "
        f"{empty.since_version}: {told}{f' and {rest} reasons more' if rest > 0 else ''}. Look at them with "
        "`roadstead groups`, mend the environment, the reward or the filters, then resume; "
        "filters.empty_batches sets the limit"
    )

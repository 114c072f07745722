"""Groups that ended untrained: which, how, when, and why.

Owns: the join of the records that say so. Never touches: the ledger; it writes nothing.
Invariant: read from records alone: step records, attempt records and ends, dead letters, staged groups. What is on
record nowhere yet (groups that ended after the last batch of a run that goes on) is not listed.
A crash leaves: nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from roadstead.staleness import TerminalState
from roadstead.storage import dead_letters, groups, runs, steps
from roadstead.storage.dead_letters import DeadLetter
from roadstead.storage.keys import RunKeys
from roadstead.storage.objects import ObjectStore
from roadstead.storage.references import StagedGroup


@dataclass(frozen=True)
class Untrained:
    group_id: str
    state: TerminalState
    step: int | None
    """It ended before the batch of this step was taken; None: after the last batch of its attempt."""
    attempt: int
    """Of the run, on whose record it is."""
    staged: StagedGroup | None
    """What was generated, if it was finished."""
    letter: DeadLetter | None

    @property
    def reason(self) -> str:
        """In words, as far as they are on record."""
        if self.letter is not None:
            return self.letter.reason
        if self.staged is None:
            return "" if self.state == "dead-lettered" else "not finished: stuck, overdue or surplus"
        return self.staged.filtered or self.staged.note or ""


def untrained(
    store: ObjectStore, keys: RunKeys, states: Collection[TerminalState] = (), last: int | None = None
) -> list[Untrained]:
    """The run's untrained groups in the order in which they ended. states: only these; last: only so many of the
    newest. Raises ObjectCorrupt."""
    found = [entry for entry in _ended(store, keys) if entry[1] != "trained" and (not states or entry[1] in states)]
    chosen = found if last is None else found[-last:] if last else []
    letters = {letter.group_id: letter for letter in dead_letters.all_of(store, keys)}
    return [
        Untrained(
            group_id=group,
            state=state,
            step=step,
            attempt=attempt,
            staged=None if state == "dead-lettered" else _staged(store, keys, group, attempt),
            letter=letters.get(group) if state == "dead-lettered" else None,
        )
        for group, state, step, attempt in chosen
    ]


def _ended(store: ObjectStore, keys: RunKeys) -> Iterator[tuple[str, TerminalState, int | None, int]]:
    records = steps.all_of(store, keys)
    for attempt in runs.attempts(store, keys):
        for group, state in attempt.terminal.items():
            yield group, state, None, attempt.attempt
        for record in records:
            if record.attempt == attempt.attempt:
                for group, state in record.terminal.items():
                    yield group, state, record.step, attempt.attempt
        if (end := runs.find_end(store, keys, attempt.attempt)) is not None:
            for group, state in end.terminal.items():
                yield group, state, None, attempt.attempt


def _staged(store: ObjectStore, keys: RunKeys, group: str, attempt: int) -> StagedGroup | None:
    """As staged by that attempt, or by an earlier one from which it was adopted."""
    for candidate in range(attempt, 0, -1):
        if (staged := groups.find(store, keys, group, candidate)) is not None:
            return staged
    return None

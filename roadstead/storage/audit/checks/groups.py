"""Invariants: every group ends in exactly one way, no group and no batch is trained twice, no prompt is skipped.

Owns: the run's accounts: rows of batches, `terminal` of step records, attempts and attempt ends, and the prompt
cursor. Confidence is 1: nothing here is estimated. Accounts over the cursor need the whole run.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

from roadstead.storage.audit.checks.base import listed
from roadstead.storage.audit.evidence import Evidence
from roadstead.storage.audit.report import Finding
from roadstead.storage.references import group_id, position_of


class TrainedTwice:
    name = "trained-twice"

    def look(self, evidence: Evidence) -> Iterator[Finding]:
        rows = evidence.rows
        places = rows[["group_id", "step", "slot"]].drop_duplicates().sort_values(["group_id", "step", "slot"])
        places = places[places.duplicated("group_id", keep=False)]
        twice = {
            str(group): [(int(step), int(slot)) for step, slot in zip(own["step"], own["slot"], strict=True)]
            for group, own in places.groupby("group_id")
        }
        if twice:
            again = min(place[1][0] for place in twice.values())
            found = rows[rows["group_id"].isin(twice)].sort_values(["group_id", "step", "slot"])
            yield evidence.finding(
                self.name,
                "critical",
                1.0,
                f"{len(twice)} group(s) trained more than once",
                listed(
                    [
                        f"{group} in " + " and ".join(f"step {step} slot {slot}" for step, slot in place)
                        for group, place in sorted(twice.items())
                    ]
                ),
                found,
                first_step=again,
            )
        steps: dict[str, list[int]] = defaultdict(list)
        for step in evidence.steps:
            if step.commit:
                steps[step.commit.digest].append(step.step)
        for digest, numbers in steps.items():
            if len(numbers) > 1:
                yield evidence.finding(
                    self.name,
                    "critical",
                    1.0,
                    f"one batch was trained in steps {listed([str(n) for n in numbers])}",
                    f"batch {digest} is committed for each of them",
                    rows[rows["step"].isin(numbers)],
                    first_step=numbers[1],
                )


class TerminalStates:
    name = "terminal-states"

    def look(self, evidence: Evidence) -> Iterator[Finding]:
        ended: dict[str, list[tuple[str, str, int | None]]] = defaultdict(list)
        for step in evidence.steps:
            terminal = step.record.terminal if step.record else _cut(step).get("terminal", {})
            for group, state in terminal.items():
                ended[group].append((state, f"step {step.step}", step.step))
        if evidence.whole:
            for name, records in (("attempt", evidence.attempts), ("end of attempt", evidence.ends)):
                for record in records:
                    for group, state in record.terminal.items():
                        ended[group].append((state, f"{name} {record.attempt}", None))
        rows = evidence.rows
        seen = set(rows["group_id"])
        double = {group: places for group, places in ended.items() if len(places) > 1}
        if double:
            first = min((step for places in double.values() for *_, step in places if step is not None), default=None)
            yield evidence.finding(
                self.name,
                "critical",
                1.0,
                f"{len(double)} group(s) ended more than once",
                listed([f"{g}: " + ", ".join(f"{s} in {w}" for s, w, _ in p) for g, p in sorted(double.items())]),
                rows[rows["group_id"].isin(double)],
                first_step=first,
            ).model_copy(update={"groups": tuple(sorted(double))})
        wrong = {
            g: places[0] for g, places in ended.items() if g in seen and not any(s == "trained" for s, *_ in places)
        }
        if wrong:
            yield evidence.finding(
                self.name,
                "critical",
                1.0,
                f"{len(wrong)} group(s) were trained and are recorded as ended otherwise",
                listed([f"{group}: {state} in {where}" for group, (state, where, _) in sorted(wrong.items())]),
                rows[rows["group_id"].isin(wrong)],
            )
        unread = {e.step for e in evidence.steps if e.data_rows == 0}
        ghosts = {
            group: places[0]
            for group, places in ended.items()
            if places[0][0] == "trained" and group not in seen and places[0][2] not in unread
        }
        if ghosts:
            yield Finding(
                check=self.name,
                severity="critical",
                confidence=1.0,
                title=f"{len(ghosts)} group(s) are recorded as trained and are in no batch",
                why=listed([f"{group} by {where}" for group, (_, where, _) in sorted(ghosts.items())]),
                first_step=min(step for *_, step in ghosts.values() if step is not None),
                groups=tuple(sorted(ghosts)),
            )
        nameless = seen - set(ended)
        recorded = {e.step for e in evidence.steps if e.record}
        nameless_rows = rows[rows["group_id"].isin(nameless) & rows["step"].isin(recorded)]
        if len(nameless_rows):
            yield evidence.finding(
                self.name,
                "critical",
                1.0,
                f"{nameless_rows['group_id'].nunique()} group(s) were trained and no record says how they ended",
                listed(sorted(set(nameless_rows["group_id"]))),
                nameless_rows,
            )


class Prompts:
    """Positions below the cursor are ended, or wait in the last ledger, backlog or carried list; none is missing."""

    name = "prompts"

    def look(self, evidence: Evidence) -> Iterator[Finding]:
        yield from self._doubled(evidence)
        recorded = [e for e in evidence.steps if e.record]
        if not evidence.whole or not recorded:
            return
        last = recorded[-1]
        assert last.record is not None
        ended = {group for e in recorded if e.record for group in e.record.terminal}
        waiting = {group_id(position) for position in last.record.backlog} | _held(last.record.ledger)
        for attempt in evidence.attempts:
            ended |= set(attempt.terminal)
            waiting |= {group.group_id for group in attempt.carried}
        for end in evidence.ends:
            ended |= set(end.terminal)
            waiting |= set(end.carried)
        for open_step in evidence.steps:  # committed, not recorded yet
            if open_step.record is None:
                ended |= set(_cut(open_step).get("terminal", {}))
        missing = [
            group_id(position)
            for position in range(last.record.cursor)
            if group_id(position) not in ended and group_id(position) not in waiting
        ]
        if missing:
            drawn = [e.step for e in recorded if e.record and e.record.cursor > position_of(missing[0])]
            yield Finding(
                check=self.name,
                severity="critical",
                confidence=1.0,
                title=f"{len(missing)} prompt(s) were drawn and vanished",
                why=f"cursor positions {listed([str(position_of(g)) for g in missing])} are below the cursor "
                f"{last.record.cursor} of step {last.step}; their groups are in no batch, have no terminal state and "
                "wait nowhere",
                first_step=drawn[0] if drawn else last.step,
                groups=tuple(missing),
            )
        beyond = [group for group in ended if position_of(group) >= max(_cursors(evidence))]
        if beyond:
            yield Finding(
                check=self.name,
                severity="critical",
                confidence=1.0,
                title=f"{len(beyond)} group(s) ended whose prompts were never drawn",
                why=f"{listed(sorted(beyond))} lie past the run's cursor {max(_cursors(evidence))}",
                first_step=None,
                groups=tuple(sorted(beyond)),
            )

    def _doubled(self, evidence: Evidence) -> Iterator[Finding]:
        """A prompt served twice in one epoch: two positions of the epoch with the same prompt id."""
        rows, size = evidence.rows, evidence.run.dataset_rows
        if rows.empty or size < 1:
            return
        drawn = rows.drop_duplicates("group_id")
        epoch = drawn["group_id"].map(position_of) // size
        count = Counter(zip(epoch, drawn["prompt_id"], strict=True))
        doubled = {pair for pair, n in count.items() if n > 1}
        if doubled:
            mask = [pair in doubled for pair in zip(epoch, drawn["prompt_id"], strict=True)]
            groups = set(drawn[mask]["group_id"])
            yield evidence.finding(
                self.name,
                "critical",
                1.0,
                f"{len(doubled)} prompt(s) were served twice in one epoch",
                f"{listed(sorted({prompt for _, prompt in doubled}))}: an epoch is {size} positions of the cursor, "
                "each another row of the dataset",
                rows[rows["group_id"].isin(groups)].sort_values(["prompt_id", "step"]),
            )


def _cut(step: Any) -> dict[str, Any]:
    cut = step.commit.cut if step.commit else None
    return cut.model_dump() if cut else {}


def _held(ledger: dict[str, Any]) -> set[str]:
    """Groups that the ledger holds: reserved or occupied in a buffer that was not taken."""
    return {group for row in ledger.get("buffers", []) for part in row for group, _ in part}


def _cursors(evidence: Evidence) -> list[int]:
    found = [e.record.cursor for e in evidence.steps if e.record]
    found += [int(_cut(e).get("cursor", 0)) for e in evidence.steps]
    return found + [end.cursor for end in evidence.ends] or [0]

"""How fast a run goes: from what was watched, or from the times of the rows on S3.

Invariant: a rate spans whole steps only; with fewer than two known moments there is none.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import pyarrow.compute as pc

from roadstead.storage import batches, steps
from roadstead.storage.keys import RunKeys
from roadstead.storage.objects import ObjectStore

_SPAN = 10
"""Steps that a rate is taken over: long enough to even out a straggler, short enough to show a change."""


@dataclass
class Pace:
    """`note` it whenever the run may have moved on; the clock is the caller's, in seconds."""

    _marks: deque[tuple[float, int, int]] = field(default_factory=lambda: deque(maxlen=_SPAN + 1))
    """(when, steps done, response tokens in them since the first mark)."""

    def note(self, now: float, done: int, tokens: int) -> None:
        """`done` steps are finished at `now`, with `tokens` response tokens since watching began."""
        if not self._marks or done > self._marks[-1][1]:
            self._marks.append((now, done, tokens))

    @property
    def steps_per_hour(self) -> float | None:
        return self._rate(1, 3600.0)

    @property
    def tokens_per_second(self) -> float | None:
        return self._rate(2, 1.0)

    def seconds_for(self, steps: int) -> float | None:
        """Seconds until so many more steps are done."""
        rate = self.steps_per_hour
        return steps / rate * 3600 if rate else None

    def _rate(self, what: int, per: float) -> float | None:
        if len(self._marks) < 2 or self._marks[-1][0] <= self._marks[0][0]:
            return None
        first, last = self._marks[0], self._marks[-1]
        return (last[what] - first[what]) / (last[0] - first[0]) * per


def recorded_pace(store: ObjectStore, keys: RunKeys) -> Pace:
    """Of the last recorded steps: a batch is timed by the moment when its last group was finished and placed.

    Raises StoreError.
    """
    pace, tokens, done = Pace(), 0, steps.count(store, keys)
    for step in range(max(0, done - _SPAN - 1), done):
        commit = batches.find(store, keys, step)
        if commit is None:
            continue
        ready = pc.max(batches.read_stats(store, commit)["occupied_at"]).as_py()
        tokens += commit.response_tokens
        pace.note(ready.timestamp(), step + 1, tokens)
    return pace

"""The STUCK clock: how long an idle trainer has waited for a buffer that nobody can be admitted to.

Owns: the moment at which the waiting began. Never touches: the ledger, timers (the run's loop waits until `due`). Pure.
Invariant: it runs only while it is told that the buffer is stuck, and begins anew after it has struck.
A crash leaves: nothing; after continue-as-new it begins anew.
"""

from __future__ import annotations

from datetime import datetime, timedelta


class StuckClock:
    def __init__(self, limit_s: float | None) -> None:
        """limit_s: rollout.stuck_timeout_s; None: it never strikes."""
        self._limit = None if limit_s is None else timedelta(seconds=limit_s)
        self.since: datetime | None = None

    @property
    def due(self) -> datetime | None:
        """When it strikes if nothing changes."""
        return None if self.since is None or self._limit is None else self.since + self._limit

    def look(self, now: datetime, *, stuck: bool) -> bool:
        """Whether it strikes now."""
        if not stuck:
            self.since = None
            return False
        self.since = self.since or now
        if self.due is None or now < self.due:
            return False
        self.since = None
        return True

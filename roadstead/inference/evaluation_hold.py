"""The first engine's way through the versions when some of them are to be evaluated.

Owns: which version that engine loads next. Never touches: requests, weights, the evaluation itself.
Invariant: on its way to the newest version the engine stops at each one that is due and not on record yet, and leaves
it when its summary is there, or timeout_s later. So an evaluation meets its exact version while training goes on, and
one that hangs or never begins holds the engine for a bounded time.
A crash leaves: nothing but a clock that starts anew; an engine that was restarted begins at the newest version.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog

from roadstead.inference.engine import EngineError
from roadstead.storage.evals import is_due

log = structlog.get_logger(__name__)


class VersionPassed(EngineError):
    """The engine serves a newer version already, and engines never go back."""


class EvaluationHold:
    """A weight watcher's `choose`. One a watcher.

    `on_record`: whether a version's evaluation is closed. It may read the store, whose errors go through.
    """

    def __init__(
        self,
        on_record: Callable[[int], bool],
        every: int,
        target: int,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._on_record = on_record
        self._every, self._target, self._timeout_s, self._clock = every, target, timeout_s, clock
        self._last: int | None = None
        self._since = 0.0

    def choose(self, current: int | None, newest: int) -> int | None:
        """The version to load next; None to stay. current: None while an update is broken off half-way."""
        if current is not None and current != self._last:
            self._last, self._since = current, self._clock()
        if current is not None and (newest <= current or self._holds(current)):
            return None
        if self._last is None:
            return newest
        return next((v for v in range(self._last + 1, newest) if self._waits_for(v)), newest)

    def _holds(self, version: int) -> bool:
        if not self._waits_for(version):
            return False
        waited = self._clock() - self._since
        if waited >= self._timeout_s:
            log.warning("evaluation.given_up", version=version, waited_s=round(waited, 1), limit_s=self._timeout_s)
            return False
        return True

    def _waits_for(self, version: int) -> bool:
        return is_due(version, self._every, self._target) and not self._on_record(version)

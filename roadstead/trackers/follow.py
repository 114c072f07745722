"""From the run's records to a tracker, as they appear.

Owns: which point comes next, and what becomes of a tracker that fails. Never touches: the run; it only reads S3.
Invariant: step records are sent in order, and every point once: what the tracker has is asked of it when it is
opened, and again after every failure, because a request whose answer was lost may have arrived.
A crash leaves: points that the tracker has; the next follower begins behind them.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator

import structlog

from roadstead.storage import evals, runs, steps
from roadstead.storage.keys import RunKeys
from roadstead.storage.objects import ObjectStore
from roadstead.trackers.tracker import Tracker, run_name
from roadstead.trackers.values import EVALUATION_MARKER, STEP_MARKER, evaluation_values, step_values

POLL_S = 5.0
_RETRY_S, _RETRY_MOST_S = 10.0, 300.0
"""After a failure, doubled while it lasts: a server that is down for a night is not asked every second."""
_REASON_CHARS = 500

log = structlog.get_logger()


class Follower:
    """Sends one run's points to one tracker. name: of the tracker, in warnings."""

    def __init__(self, name: str, tracker: Tracker, store: ObjectStore, keys: RunKeys) -> None:
        self._name, self._tracker = name, tracker
        self._store, self._keys = store, keys
        self._retry_s = _RETRY_S

    def run(self, stop: threading.Event, poll_s: float = POLL_S) -> None:
        """Until `stop` is set, and then what is on record by then. Raises nothing: failures are logged and retried."""
        while True:
            last = stop.is_set()
            try:
                self._follow(stop, poll_s)
                return
            except (Exception, SystemExit) as error:  # whatever somebody else's library raises: the run must not notice
                reason = f"{type(error).__name__}: {error}"[:_REASON_CHARS]
                log.warning(
                    "tracker failed", tracker=self._name, reason=reason, again_in_s=None if last else self._retry_s
                )
            if last:
                return
            stop.wait(self._retry_s)
            self._retry_s = min(2 * self._retry_s, _RETRY_MOST_S)

    def _follow(self, stop: threading.Event, poll_s: float) -> None:
        try:
            self._tracker.open(run_name(self._store, self._keys), runs.current_config(self._store, self._keys))
            trained, evaluated = (self._tracker.logged(marker) for marker in (STEP_MARKER, EVALUATION_MARKER))
            while True:
                last = stop.is_set()
                self._send_steps(trained)
                self._send_evaluations(evaluated)
                self._retry_s = _RETRY_S
                if last:
                    return
                stop.wait(poll_s)
        finally:
            self._tracker.close()

    def _send_steps(self, sent: set[int]) -> None:
        for step in itertools.count():
            if step in sent:
                continue
            record = steps.find(self._store, self._keys, step)
            if record is None:
                return
            self._tracker.log(step, step_values(record))
            sent.add(step)

    def _send_evaluations(self, sent: set[int]) -> None:
        for version in self._evaluated():
            if version not in sent and (summary := evals.find(self._store, self._keys, version)) is not None:
                self._tracker.log(version, evaluation_values(summary))
                sent.add(version)

    def _evaluated(self) -> Iterator[int]:
        """Versions with an evaluation, closed or not. Listed: one may close after a later one."""
        return (int(name.removeprefix("v=")) for name in sorted(self._store.folders(self._keys.evals)))

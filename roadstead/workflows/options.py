"""Deadlines and retries of every activity, in one place.

Invariant: every activity has a heartbeat timeout or a start-to-close near its real duration. One without (five
minutes, no heartbeat) stood still for the five minutes when its worker was killed inside a millisecond window.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TypedDict

from temporalio.common import RetryPolicy

from roadstead.workflows.messages import DISCARDED

# A disagreement about content is not cured by trying again.
_FATAL = [
    "ObjectConflict",
    "BatchConflict",
    "Fenced",
    "SchemaError",
    "BoundExceeded",
    "DatasetError",
    "ValidationError",
]
_FATAL_TRAINING = [*_FATAL, "TrainerConflict", "TrainerOutOfOrder", "TrainerBadBatch", "ReplayMismatch"]

_HEARTBEAT = timedelta(seconds=15)
"""Detection of a dead worker; six times the beat, so that a busy machine is not taken for a dead one."""


_AFTER_TIMEOUT = 1.25
"""Start-to-close of a rollout beside its own time-out: rewards of a truncated group, and the upload."""


class Options(TypedDict, total=False):
    task_queue: str
    start_to_close_timeout: timedelta
    schedule_to_close_timeout: timedelta
    heartbeat_timeout: timedelta
    retry_policy: RetryPolicy


def _retry(attempts: int, fatal: list[str]) -> RetryPolicy:
    return RetryPolicy(
        initial_interval=timedelta(milliseconds=300),
        backoff_coefficient=1.6,
        maximum_interval=timedelta(seconds=20),
        maximum_attempts=attempts,
        non_retryable_error_types=fatal,
    )


def queue(run_id: str, role: str) -> str:
    """Task queue of a role: `<run>-<role>`."""
    return f"{run_id}-{role}"


def ledger(run_id: str) -> Options:
    """Updates to the run: milliseconds. Unlimited retries, because a finished group must not be lost."""
    return Options(
        task_queue=queue(run_id, "ledger"),
        start_to_close_timeout=timedelta(seconds=20),
        retry_policy=_retry(0, ["RunGone", "UnknownGroup"]),
    )


def rollout(run_id: str, timeout_s: float, attempts: int) -> Options:
    """The activity keeps timeout_s itself, and needs some more to judge and stage what it has by then."""
    return Options(
        task_queue=queue(run_id, "rollout"),
        start_to_close_timeout=timedelta(seconds=timeout_s * _AFTER_TIMEOUT),
        heartbeat_timeout=_HEARTBEAT,
        retry_policy=_retry(attempts, [*_FATAL, "BadRequest", DISCARDED]),
    )


def dead_letter(run_id: str) -> Options:
    """On the rollout queue, where the prompts are known. A record for people: worth some tries, not a wait."""
    return Options(
        task_queue=queue(run_id, "rollout"),
        start_to_close_timeout=timedelta(seconds=30),
        schedule_to_close_timeout=timedelta(minutes=2),
        retry_policy=_retry(5, _FATAL),
    )


def opening(run_id: str, timeout_s: float) -> Options:
    """The activity keeps timeout_s itself; tried again only when its worker is lost."""
    limit = timedelta(seconds=timeout_s) + _HEARTBEAT
    return Options(
        task_queue=queue(run_id, "evaluation"),
        start_to_close_timeout=limit,
        schedule_to_close_timeout=limit,
        heartbeat_timeout=_HEARTBEAT,
        retry_policy=_retry(0, [*_FATAL, "VersionPassed", "EngineStalled"]),
    )


def evaluating(run_id: str, timeout_s: float, attempts: int) -> Options:
    """All orders of an evaluation are given at once, so this is the time-out of the whole of it.

    On a queue of their own: rollouts that wait for newer weights would else hold the slots that must be free for the
    engine to get them.
    """
    limit = timedelta(seconds=timeout_s)
    return Options(
        task_queue=queue(run_id, "evaluation"),
        start_to_close_timeout=limit,
        schedule_to_close_timeout=limit,
        heartbeat_timeout=_HEARTBEAT,
        retry_policy=_retry(attempts, [*_FATAL, "VersionPassed", "BadRequest"]),
    )


def store(run_id: str) -> Options:
    """Reads and writes of S3: twenty attempts outlast an outage of about five minutes, then the run says so."""
    return Options(
        task_queue=queue(run_id, "orchestrator"),
        start_to_close_timeout=timedelta(minutes=30),
        heartbeat_timeout=_HEARTBEAT,
        retry_policy=_retry(20, _FATAL),
    )


def closing(run_id: str) -> Options:
    """The last word of an attempt: worth some tries, not worth keeping an ending run open for a store that is down."""
    return Options(
        task_queue=queue(run_id, "orchestrator"),
        start_to_close_timeout=timedelta(seconds=10),
        schedule_to_close_timeout=timedelta(seconds=20),
        retry_policy=_retry(3, _FATAL),
    )


def train(run_id: str) -> Options:
    """The heartbeat bounds a lost trainer, not the day that a large step may take."""
    return Options(
        task_queue=queue(run_id, "train"),
        start_to_close_timeout=timedelta(hours=24),
        heartbeat_timeout=_HEARTBEAT,
        retry_policy=_retry(20, _FATAL_TRAINING),
    )


def checkpoint(run_id: str) -> Options:
    """Worth waiting for, not worth failing a drained run: what it saves can be replayed."""
    return Options(
        task_queue=queue(run_id, "train"),
        start_to_close_timeout=timedelta(minutes=30),
        schedule_to_close_timeout=timedelta(hours=1),
        heartbeat_timeout=_HEARTBEAT,
        retry_policy=_retry(5, _FATAL_TRAINING),
    )

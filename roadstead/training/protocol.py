"""What the trainer and its clients say to each other: JSON lines over a unix socket, and the errors.

Owns: the names on the wire. Never touches: sockets, torch.
Invariant: an error keeps its type across the socket; a type that is not in `ERRORS` reads as TrainerUnavailable,
which may be tried again, while those in it may not.
A crash leaves: nothing.

    {"op": "status"}                             -> Status
    {"op": "train", "step": 4, "digest": "..."}  -> {"result": TrainResult, "seconds": {phase: s}}
    {"op": "checkpoint", "version": 5}           -> {"version": 5}: it is complete on S3
    {"op": "quit"}                               -> {"quitting": true}
    whatever goes wrong                          -> {"error": type, "message": text}
"""

from __future__ import annotations

from typing import TypedDict


class TrainerError(RuntimeError):
    """The trainer did not do what it was asked."""


class TrainerUnavailable(TrainerError):
    """The trainer can't be reached, restarts, or hangs. Ask again: training a step is idempotent."""


class TrainerConflict(TrainerError):
    """The step belongs to another batch. Both digests are named; asking again can't help."""


class TrainerOutOfOrder(TrainerError):
    """The trainer is past that step without having trained this batch, or can't get up to it."""


class TrainerBadBatch(TrainerError):
    """The batch does not verify: missing, damaged, tampered with or malformed. Nothing was trained."""


class ReplayMismatch(TrainerError):
    """Replaying a committed batch gave other weights than it gave the first time."""


ERRORS: dict[str, type[TrainerError]] = {
    "Conflict": TrainerConflict,
    "OutOfOrder": TrainerOutOfOrder,
    "BadBatch": TrainerBadBatch,
    "ReplayMismatch": ReplayMismatch,
}


def wire_name(error: BaseException) -> str:
    """The `error` field for an exception."""
    return next((name for name, kind in ERRORS.items() if type(error) is kind), type(error).__name__)


class Status(TypedDict):
    """Answer of `status`; it is given during boot and during a step."""

    version: int | None
    """Policy version held, the steps applied or attempted so far; null while booting."""
    busy_step: int | None
    phase: str
    """What the trainer is doing; a wait names what it waits for."""
    since: float
    """Unix seconds at which the phase began."""
    pid: int
    """Of rank 0."""
    incarnation: int
    """Restarts of the process group under its launcher."""
    boot_seconds: float | None
    """From process start to ready; null while booting."""
    last_failure: str | None
    """Why the previous incarnation ended, if rank 0 could still say."""
    silence: dict[str, float]
    """Seconds since the last sign of life of each rank that has given one."""

"""Failures of activities, sorted into the few kinds that are counted.

Owns: which exception is of which kind. Never touches: what becomes of the activity.
Invariant: every exception has exactly one kind of the catalogue's; what nobody thought of is `other`.
A crash leaves: nothing, it is pure.
"""

from __future__ import annotations

from pydantic import ValidationError
from temporalio.exceptions import ApplicationError

from roadstead.activities.persist import BoundExceeded
from roadstead.activities.trajectory import NothingGenerated
from roadstead.environments.calls import CallFailed
from roadstead.environments.prompts import DatasetError
from roadstead.inference.engine import EngineDown, EngineError, EngineStalled
from roadstead.storage.objects import ObjectConflict, ObjectCorrupt, StoreError
from roadstead.storage.runs import Fenced
from roadstead.storage.schema import SchemaError
from roadstead.training.protocol import TrainerError, TrainerUnavailable

_KINDS: tuple[tuple[type[BaseException], str], ...] = (
    # A subclass stands before its base.
    (BoundExceeded, "bound_exceeded"),
    (EngineDown, "engine_down"),
    (EngineStalled, "engine_stalled"),
    (EngineError, "engine_refused"),
    (CallFailed, "environment"),
    (Fenced, "fenced"),
    (ObjectConflict, "conflict"),
    (ObjectCorrupt, "bad_data"),
    (SchemaError, "bad_data"),
    (DatasetError, "bad_data"),
    (ValidationError, "bad_data"),
    (StoreError, "store"),
    (TrainerUnavailable, "trainer_down"),
    (TrainerError, "trainer_refused"),
    (NothingGenerated, "timeout"),
    (TimeoutError, "timeout"),
)
_TYPES = {"RunGone": "run_gone", "UnknownGroup": "run_gone", "GroupOverdue": "timeout", "GroupDiscarded": "timeout"}
"""Of an ApplicationError, by its type."""


def kind_of(error: BaseException) -> str:
    if isinstance(error, ApplicationError):
        return _TYPES.get(error.type or "", "other")
    return next((kind for known, kind in _KINDS if isinstance(error, known)), "other")

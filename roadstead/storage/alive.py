"""The sign of life of whoever hosts a run.

Owns: the hint `attempts/ALIVE`. Never touches: attempt records; it fences nobody, it spares two hosts the fence.
Invariant: no clock is compared. A beat is a number; a host that reads another's beat watches whether it changes.
A crash leaves: a beat that stands still.
"""

from __future__ import annotations

from pydantic import ValidationError

from roadstead.storage.batches import Frozen
from roadstead.storage.keys import RunKeys
from roadstead.storage.objects import ObjectStore, canonical_json

BEAT_S = 5.0
SILENCE_S = 20.0
"""A beat that stands still for so long is a dead host's: four beats, so that one slow write is not taken for death."""


class Beat(Frozen):
    host: str
    pid: int
    token: str
    """Of this process: a pid that is used again is another host."""
    number: int
    ended: bool = False
    """The host left in order."""


def write(store: ObjectStore, keys: RunKeys, beat: Beat) -> None:
    store.put_hint(keys.alive, canonical_json(beat.model_dump(mode="json")))


def read(store: ObjectStore, keys: RunKeys) -> Beat | None:
    """The last beat; None when there is none, or none that can be read: a hint is not worth a refusal."""
    body = store.find(keys.alive)
    try:
        return Beat.model_validate_json(body) if body is not None else None
    except ValidationError:
        return None

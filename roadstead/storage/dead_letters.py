"""Dead letters: prompts that could not be generated, on record for a person to look at.

Owns: `dead-letters/<group>-a<attempt>.json`. Never touches: the ledger; that the group ended is in the step records.
Invariant: one object a (group, attempt), the first one stays.
A crash leaves: nothing or the whole record.
"""

from __future__ import annotations

from pydantic import ValidationError

from roadstead.storage.batches import Frozen
from roadstead.storage.keys import RunKeys
from roadstead.storage.objects import ObjectCorrupt, ObjectStore, canonical_json


class DeadLetter(Frozen):
    run_id: str
    attempt: int
    """Of the run."""
    group_id: str
    prompt_id: str
    prompt: str
    version: int
    """Policy version of the admission."""
    attempts: int
    """To generate it, at most."""
    reason: str
    """The last attempt's failure."""
    at: str
    """UTC, ISO 8601."""


def write(store: ObjectStore, keys: RunKeys, letter: DeadLetter) -> None:
    store.create(keys.dead_letter(letter.group_id, letter.attempt), canonical_json(letter.model_dump(mode="json")))


def all_of(store: ObjectStore, keys: RunKeys) -> list[DeadLetter]:
    """Every dead letter of the run, by group and attempt. Raises ObjectCorrupt."""
    letters = []
    for key in sorted(store.keys(keys.dead_letters)):
        try:
            letters.append(DeadLetter.model_validate_json(store.get(key)))
        except ValidationError as error:
            raise ObjectCorrupt(f"{store.url(key)}: not a dead letter: {error}") from error
    return letters

"""The words of the ledger: slots, moves, states and refusals.

Owns: the small values that the ledger answers with. Never touches: the arrangement itself.
Invariant: every value is immutable and compares by content.
A crash leaves: nothing, there is no state here.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal


@dataclass(frozen=True, order=True, slots=True)
class Slot:
    """A place in a batch: `buffer` b trains version b -> b+1, `index` counts from 0 inside it. Earlier is less."""

    buffer: int
    index: int


@dataclass(frozen=True, slots=True)
class Move:
    """One group changed its place. Moves listed in order replay the change of the table."""

    group_id: str
    source: Slot
    target: Slot


class SlotState(StrEnum):
    """What one slot holds: nothing, a group that is being generated, a finished group."""

    EMPTY = "empty"
    RESERVED = "reserved"
    OCCUPIED = "occupied"


class BufferState(StrEnum):
    """PENDING: not full, slots are Empty. STUCK: none is Empty, waits for Reserved. READY: batch_size Occupied."""

    PENDING = "pending"
    STUCK = "stuck"
    READY = "ready"


class GroupState(StrEnum):
    """Where a group stands. TRAINED: handed out by `take`. DROPPED: discarded, evicted, surplus or too old."""

    RESERVED = "reserved"
    OCCUPIED = "occupied"
    TRAINED = "trained"
    DROPPED = "dropped"


TerminalState = Literal["trained", "filtered", "discarded", "expired", "dead-lettered"]
"""How a group ends, exactly one: in a batch; by a filter; not wanted any more; too old; given up on."""


class UnknownGroup(LookupError):
    """The ledger never admitted this group, or ended it so long ago that it has forgotten."""


class OutOfOrder(ValueError):
    """A version was published whose batch was not taken, or which is not the next one."""

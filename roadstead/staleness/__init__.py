"""The Reserve-Occupy ledger, version spans, age statistics.

Owns: which group may start and where it is trained; which tokens came from which version; how old they were.
Never touches: I/O, the clock, randomness, any other room.
Invariant: the same calls give the same answers, so all of it may run inside a workflow.
A crash leaves: nothing; the ledger travels as the dictionary that it writes.
"""

from roadstead.staleness.ages import AgeStatistics
from roadstead.staleness.ledger import Ledger
from roadstead.staleness.slots import (
    BufferState,
    GroupState,
    Move,
    OutOfOrder,
    Slot,
    SlotState,
    TerminalState,
    UnknownGroup,
)
from roadstead.staleness.spans import (
    VersionSpan,
    check_cover,
    clip_spans,
    head_version,
    merge_spans,
    shift_spans,
    spans_of_tokens,
    tail_version,
    versions_of_spans,
)

__all__ = [
    "AgeStatistics",
    "BufferState",
    "GroupState",
    "Ledger",
    "Move",
    "OutOfOrder",
    "Slot",
    "SlotState",
    "TerminalState",
    "UnknownGroup",
    "VersionSpan",
    "check_cover",
    "clip_spans",
    "head_version",
    "merge_spans",
    "shift_spans",
    "spans_of_tokens",
    "tail_version",
    "versions_of_spans",
]

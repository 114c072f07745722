"""The Reserve-Occupy ledger: it decides which group may start, and in which batch each finished group is trained.

Owns: the policy version, the window of buffers, the ends of groups as far as a retry may ask for them.
Never touches: I/O, the clock, randomness, prompts, payloads; it knows groups by id and version only.
Invariant: b <= v + S for every held group of version v in buffer b, hence for every group that is ever trained.
A crash leaves: whatever the caller last kept of `to_dict`; `from_dict` continues exactly there.

The protocol comes from PSRL/StaleFlow (arXiv 2601.12784): a group reserves the latest legal place when it starts,
and when it finishes occupies the earliest place that costs no other group its own.

Why the bound holds. Let d = v + S be the deadline of a group; buffers f..d are legal, f being the first not taken.
 1. All legal ranges begin at f, so by Hall's theorem the held groups fit iff for every d the groups with deadlines
    <= d are no more than the slots of f..d. A table in which each group stands legally is a witness of that.
 2. reserve gives a new group an Empty slot f <= b <= d, or refuses: the table stays a witness.
 3. occupy, discard, evict only move Reserved into Empty slots not later than their deadlines, and finished groups
    to slots that are Empty and legal: still a witness.
 4. lower reduces one d. The group then gets an Empty slot within the new d or is dropped and reported.
 5. publish adds a buffer at the end and changes no deadline.
 6. take hands out f only while f is the published version, so the age is f - v <= d - v = S. At batch_size slots a
    READY buffer is all Occupied and f + 1 leaves nobody behind; with more slots its Reserved are dropped, not delayed.
So the bound needs no check when a batch is trained. Why a refusal or a late place is never needless: window.py.
"""

from __future__ import annotations

from typing import Any, Self

from roadstead.staleness.buffer import Buffer, Group
from roadstead.staleness.history import History
from roadstead.staleness.slots import BufferState, GroupState, Move, OutOfOrder, Slot, SlotState, UnknownGroup
from roadstead.staleness.window import Window

_FORMAT = 1

_REMEMBERED = 3
"""Buffers beyond max_staleness whose ended groups are remembered: a call about a group is retried for at most the
window in which it lived, the step in training, the one being published and one more for an answer that was lost."""


class Ledger:
    """One ledger a run; the run is its only writer. Calls are deterministic and cost O(max_staleness)."""

    def __init__(
        self,
        *,
        batch_size: int,
        max_staleness: int,
        slots_per_buffer: int | None = None,
        version: int = 0,
        step_target: int | None = None,
    ) -> None:
        """An empty ledger at policy version `version`, with buffers version..version + max_staleness.

        batch_size: groups a batch. max_staleness: S, in versions. slots_per_buffer: more than batch_size over-samples;
        None is batch_size. step_target: no group is placed in this buffer or a later one; None is no limit.
        Raises ValueError on a configuration that can never train.
        """
        slots = batch_size if slots_per_buffer is None else slots_per_buffer
        if batch_size < 1:
            raise ValueError(f"batch_size: {batch_size} groups can't be trained on; use at least 1")
        if slots < batch_size:
            raise ValueError(
                f"slots_per_buffer: {slots} slots never fill batch_size: {batch_size}; raise it, or leave it out"
            )
        if version < 0:
            raise ValueError(f"version: {version} is before the first policy version; use 0 or later")
        _check_staleness(max_staleness)
        _check_target(step_target, version)
        self._batch_size = batch_size
        self._max_staleness = max_staleness
        self._slots = slots
        self._version = version
        self._step_target = step_target
        self._groups: dict[str, Group] = {}
        self._surplus: list[str] = []
        self._window = Window(version, self._end(), batch_size, slots)
        self._history = History(max_staleness + _REMEMBERED, slots)

    @property
    def version(self) -> int:
        """The published policy version, which new groups get."""
        return self._version

    @property
    def taken(self) -> int:
        """Buffers before this one are taken; it is the next for the trainer, `version` or `version` + 1."""
        return self._window.first

    @property
    def buffers(self) -> range:
        """The buffers of the window, from `taken` on."""
        return range(self._window.first, self._window.end)

    @property
    def batch_size(self) -> int:
        return self._batch_size

    @property
    def slots_per_buffer(self) -> int:
        return self._slots

    @property
    def max_staleness(self) -> int:
        return self._max_staleness

    @property
    def step_target(self) -> int | None:
        return self._step_target

    @property
    def in_flight(self) -> int:
        """Reserved groups, the ones being generated."""
        return len(self._groups) - self.occupied

    @property
    def occupied(self) -> int:
        """Finished groups that wait for training."""
        return sum(row.occupied for row in self._window.rows)

    @property
    def drain_target(self) -> int:
        """The earliest step target that still trains every held group; its last batch may need a few new ones."""
        batches = -(-len(self._groups) // self._batch_size)
        return min(self._window.first + batches, self._window.end)

    def capacity(self) -> int:
        """How many groups of the published version `reserve` would admit now, one after another."""
        return self._window.capacity()

    def reserve(self, group_id: str, version: int | None = None) -> Slot | None:
        """Admit a group before it starts: the latest legal buffer, its last Empty slot; None is "not now".

        version: of the engine that will generate, when it lags behind the published one, which is the default. An
        engine that is ahead of it counts as the published one: a version is only ever taken lower.
        A repeated call changes nothing: a held or trained group answers its place, a dropped one None.
        """
        if self._ended(group_id) or group_id in self._groups:
            return self.where(group_id)
        admitted = self._version if version is None else min(version, self._version)
        group = Group(group_id, admitted, admitted + self._max_staleness)
        if not self._window.admit(group):
            return None
        self._groups[group_id] = group
        return Slot(group.buffer, group.index)

    def occupy(self, group_id: str) -> Slot | None:
        """A group finished: the earliest buffer that leaves every Reserved a legal slot, its first Empty slot.

        Never later than the reserved place, unless over-sampling made that buffer READY without the group.
        None: the group is not wanted (any more), whether dropped before or surplus just now.
        A repeated call changes nothing and answers the place that the group has or was trained in.
        Raises UnknownGroup.
        """
        group = self._groups.get(group_id)
        if group is None or group.occupied:
            return self.where(group_id)
        if not self._window.occupy(group):
            self._forget(group)
            return None
        self._note_surplus()
        return Slot(group.buffer, group.index)

    def discard(self, group_id: str) -> list[Move]:
        """Drop a Reserved: failed, timed out, aborted. Returns the moves that its place made possible, in order.

        Changes nothing and returns [] for a group that is Occupied (finished data is not lost to a late timeout; see
        `evict`) or ended. Raises UnknownGroup.
        """
        return self._remove(group_id, occupied=False)

    def evict(self, group_id: str) -> list[Move]:
        """Drop an Occupied that must not be trained; later Occupied are pulled forward. Returns the moves in order.

        A READY buffer may become PENDING again. Changes nothing and returns [] for a group that is Reserved or ended,
        in particular one that was taken. Raises UnknownGroup.
        """
        return self._remove(group_id, occupied=True)

    def lower(self, group_id: str, version: int) -> Slot | None:
        """The engine reports a token of an older version: the group's version and deadline fall, never rise.

        Returns the group's place, an earlier one if the old became illegal. None: no legal slot is left, the group
        is dropped (or was before). An ended group is not changed. Raises UnknownGroup.
        """
        group = self._groups.get(group_id)
        if group is None or version >= group.version:
            return self.where(group_id)
        kept = self._window.lower(group, version, version + self._max_staleness)
        if not kept:
            self._forget(group)
        self._note_surplus()
        return Slot(group.buffer, group.index) if kept else None

    def take(self) -> tuple[str, ...] | None:
        """Hand the batch of the published version to the trainer: its group ids in slot order.

        None while it is not READY, and until `publish` once it is taken: no batch is handed out twice.
        """
        window = self._window
        if window.first != self._version or not window.rows or window.rows[0].need:
            return None
        buffer = window.first
        batch = window.advance()
        for group in batch:
            del self._groups[group.id]
        self._history.add_batch(buffer, [group.id for group in batch])
        self._note_surplus()
        return self._history.batches[buffer]

    def batch(self, buffer: int) -> tuple[str, ...] | None:
        """What `take` handed out for this buffer, None when it did not or when that is forgotten."""
        return self._history.batches.get(buffer)

    def publish(self, version: int) -> None:
        """Training of the taken batch is done and `version` is public: the window moves by one buffer.

        A version already published changes nothing. Raises OutOfOrder unless it is the next and its batch was taken.
        """
        if version <= self._version:
            return
        if version != self._window.first:
            raise OutOfOrder(
                f"version: {version} can't be published at version {self._version} with buffer {self.taken} next; "
                f"take buffer {self._version} and publish {self._version + 1} first"
            )
        self._version = version
        self._window.extend(self._end())

    def set_step_target(self, step_target: int | None) -> tuple[str, ...]:
        """Change the step target, as a drain does; returns the groups dropped because no buffer before it has room.

        Groups at or past it move forward. None are dropped at `drain_target` or later, except surplus of over-sampling.
        Raises ValueError when a buffer at or past it is already taken.
        """
        _check_target(step_target, self._window.first)
        self._step_target = step_target
        return self._relay() if self._end() != self._window.end else ()

    def set_max_staleness(self, max_staleness: int) -> tuple[str, ...]:
        """Change the bound, as a resumed run may; returns the groups that the new bound leaves no place.

        Raises ValueError when it is negative.
        """
        _check_staleness(max_staleness)
        if max_staleness == self._max_staleness:
            return ()
        self._max_staleness = max_staleness
        self._history.depth = max_staleness + _REMEMBERED
        for group in self._groups.values():
            group.deadline = group.version + max_staleness
        return self._relay()

    def collect_surplus(self) -> tuple[str, ...]:
        """Over-sampling: the Reserved dropped since the last call, of no use to any buffer; stop generating them."""
        surplus = tuple(self._surplus)
        self._surplus.clear()
        return surplus

    def state(self, buffer: int) -> BufferState:
        """State of a buffer of the window; raises ValueError outside it."""
        row = self._row(buffer)
        if not row.need:
            return BufferState.READY
        return BufferState.PENDING if row.empty else BufferState.STUCK

    def slots(self, buffer: int) -> tuple[tuple[SlotState, str | None], ...]:
        """State and group id of each slot of a buffer of the window; raises ValueError outside it."""
        return tuple(
            (SlotState.EMPTY, None)
            if group is None
            else (SlotState.OCCUPIED if group.occupied else SlotState.RESERVED, group.id)
            for group in self._row(buffer).slots
        )

    def where(self, group_id: str) -> Slot | None:
        """The place of a held group, the place where a trained one was, None for a dropped one.

        Raises UnknownGroup.
        """
        group = self._groups.get(group_id)
        if group is not None:
            return Slot(group.buffer, group.index)
        if not self._ended(group_id):
            raise UnknownGroup(
                f"group_id: {group_id!r} was never admitted, or ended before buffer "
                f"{self.taken - self._history.depth}; reserve it first"
            )
        return self._history.trained(group_id)

    def group_state(self, group_id: str) -> GroupState:
        """Where a group stands. Raises UnknownGroup."""
        group = self._groups.get(group_id)
        if group is not None:
            return GroupState.OCCUPIED if group.occupied else GroupState.RESERVED
        return GroupState.DROPPED if self.where(group_id) is None else GroupState.TRAINED

    def version_of(self, group_id: str) -> int:
        """Version of a held group: the oldest of any of its tokens. Raises UnknownGroup for any other."""
        group = self._groups.get(group_id)
        if group is None:
            raise UnknownGroup(f"group_id: {group_id!r} is not held; ask before it is taken or dropped")
        return group.version

    def to_dict(self) -> dict[str, Any]:
        """The whole ledger as JSON types; `from_dict` of it behaves the same for ever."""
        return {
            "format": _FORMAT,
            "batch_size": self._batch_size,
            "max_staleness": self._max_staleness,
            "slots_per_buffer": self._slots,
            "step_target": self._step_target,
            "version": self._version,
            "taken": self._window.first,
            "buffers": [
                [[[g.id, g.version] for g in row.slots if g and g.occupied == done] for done in (True, False)]
                for row in self._window.rows
            ],
            "batches": [[buffer, list(ids)] for buffer, ids in self._history.batches.items()],
            "dropped": [[group_id, buffer] for group_id, buffer in self._history.dropped.items()],
            "surplus": list(self._surplus),
        }

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> Self:
        """The ledger that `to_dict` wrote. Raises ValueError on another format, or a table that breaks a rule."""
        if state.get("format") != _FORMAT:
            raise ValueError(
                f"format: {state.get('format')!r} is not a ledger of format {_FORMAT}; "
                "read it with the release that wrote it"
            )
        ledger = cls(
            batch_size=state["batch_size"],
            max_staleness=state["max_staleness"],
            slots_per_buffer=state["slots_per_buffer"],
            version=state["version"],
            step_target=state["step_target"],
        )
        ledger._restore(state)
        return ledger

    def _restore(self, state: dict[str, Any]) -> None:
        first = state["taken"]
        if first not in (self._version, self._version + 1) or len(state["buffers"]) != max(0, self._end() - first):
            raise ValueError(
                f"buffers: {len(state['buffers'])} from taken: {first} on do not fit version: {self._version}; "
                "restore an undamaged copy"
            )
        self._window = Window(first, self._end(), self._batch_size, self._slots)
        for row, (occupied, reserved) in zip(self._window.rows, state["buffers"], strict=True):
            if len(occupied) > self._batch_size or len(occupied) + len(reserved) > self._slots:
                raise ValueError(f"buffers: buffer {row.number} is overfull; restore an undamaged copy")
            for place, groups in ((row.occupy, occupied), (row.reserve, reversed(reserved))):
                for group_id, version in groups:
                    group = Group(group_id, version, version + self._max_staleness)
                    if group_id in self._groups or row.number > group.deadline:
                        raise ValueError(
                            f"buffers: group {group_id!r} of version {version} is twice in the table, or too old for "
                            f"buffer {row.number}; restore an undamaged copy"
                        )
                    self._groups[group_id] = group
                    place(group)
        for buffer, ids in state["batches"]:
            self._history.add_batch(buffer, ids)
        for group_id, buffer in state["dropped"]:
            self._history.add_dropped(group_id, buffer)
        self._surplus = list(state["surplus"])

    def _end(self) -> int:
        end = self._version + self._max_staleness + 1
        return end if self._step_target is None else min(end, self._step_target)

    def _row(self, buffer: int) -> Buffer:
        if buffer not in self.buffers:
            raise ValueError(
                f"buffer: {buffer} is not in the window {self.buffers.start}..{self.buffers.stop - 1}; "
                "ask for one of `buffers`"
            )
        return self._window.rows[buffer - self._window.first]

    def _ended(self, group_id: str) -> bool:
        return group_id in self._history.dropped or self._history.trained(group_id) is not None

    def _remove(self, group_id: str, occupied: bool) -> list[Move]:
        group = self._groups.get(group_id)
        if group is None:
            self.where(group_id)
            return []
        if group.occupied != occupied:
            return []
        steps = self._window.remove(group)
        self._forget(group)
        self._note_surplus()
        return [Move(moved, Slot(b, i), Slot(to, at)) for moved, b, i, to, at in steps]

    def _forget(self, group: Group) -> None:
        del self._groups[group.id]
        self._history.add_dropped(group.id, self._window.first)

    def _note_surplus(self) -> None:
        for group in self._window.surplus:
            # `lower` has already answered for the group that it was asked about.
            if group.id in self._groups:
                self._forget(group)
                self._surplus.append(group.id)
        self._window.surplus.clear()

    def _relay(self) -> tuple[str, ...]:
        """Lay all held groups anew under a changed bound or target; return the ids that have no place.

        Finished groups are placed before unfinished ones, older before newer: the least work is lost.
        """
        held = list(self._window.groups())
        finished = [group for group in held if group.occupied]
        # A row fills its tail backwards, so going backwards keeps the order of the slots.
        unfinished = [group for group in reversed(held) if not group.occupied]
        self._window = Window(self._window.first, self._end(), self._batch_size, self._slots)
        lost: list[Group] = []
        for groups in (finished, unfinished):
            for group in sorted(groups, key=lambda group: group.deadline):
                group.occupied = False
                if not self._window.admit(group):
                    lost.append(group)
        for group in finished:
            if group not in lost and group not in self._window.surplus and not self._window.occupy(group):
                lost.append(group)
        lost += self._window.surplus
        self._window.surplus.clear()
        for group in lost:
            self._forget(group)
        return tuple(group.id for group in lost)


def _check_staleness(max_staleness: int) -> None:
    if max_staleness < 0:
        raise ValueError(f"max_staleness: {max_staleness} forbids every batch; use 0 (synchronous) or more")


def _check_target(step_target: int | None, first: int) -> None:
    if step_target is not None and step_target < first:
        raise ValueError(
            f"step_target: {step_target} is before buffer {first}, which is next; use {first} or later, or None"
        )

"""The post's demonstration of three batches, event by event: bound 1, four slots a buffer, six groups in flight.

After an event the next waiting groups are admitted while fewer than six are in flight and the ledger accepts. Every
table that the post's section 6 describes is here. In one sentence it differs from its own rule: it says that I is the
Reserved that moves when J finishes; by "the first Reserved that may go there" it is L, which stands before I. The
batch is the same either way.
"""

from __future__ import annotations

from collections import deque

from roadstead.staleness import BufferState, Ledger

from .tables import check, table

CONCURRENCY = 6


class Rollout:
    def __init__(self) -> None:
        self.ledger = Ledger(batch_size=4, max_staleness=1)
        self.waiting = deque("ABCDEFGHIJKL")

    def admit(self) -> str:
        """Admit what is legal; return who was admitted."""
        admitted = ""
        while self.waiting and self.ledger.in_flight < CONCURRENCY and self.ledger.reserve(self.waiting[0]):
            admitted += self.waiting.popleft()
        check(self.ledger)
        return admitted

    def finish(self, group_id: str) -> list[str]:
        assert self.ledger.occupy(group_id)
        check(self.ledger)
        return table(self.ledger)


def test_three_batches_event_by_event() -> None:
    rollout = Rollout()
    ledger = rollout.ledger

    # 6.1: A-D reserve buffer 1 from its end, E and F what is left before it.
    assert rollout.admit() == "ABCDEF"
    assert table(ledger) == [". . f e", "d c b a"]
    assert {g: ledger.version_of(g) for g in "ABCDEF"} == dict.fromkeys("ABCDEF", 0)
    assert ledger.capacity() == 2

    # 6.2: F moves to the place that A leaves, A takes the first Empty; G is admitted at once.
    assert rollout.finish("A") == ["A . . e", "d c b f"]
    assert rollout.admit() == "G"
    assert table(ledger) == ["A . g e", "d c b f"]

    # 6.3: the same with D, G and H; after C all eight slots are held, I waits although one could run.
    assert rollout.finish("D") == ["A D . e", "g c b f"]
    assert rollout.admit() == "H"
    assert table(ledger) == ["A D h e", "g c b f"]
    assert rollout.finish("C") == ["A D C e", "g h b f"]
    assert (rollout.admit(), ledger.in_flight, ledger.capacity()) == ("", 5, 0)
    assert (ledger.state(0), ledger.state(1)) == (BufferState.STUCK, BufferState.STUCK)
    assert ledger.take() is None

    # 6.4: E has nowhere else to go; the first batch is taken and trained while B, F, G, H are generated.
    assert rollout.finish("E") == ["A D C E", "g h b f"]
    assert ledger.state(0) is BufferState.READY
    assert rollout.admit() == ""
    assert ledger.take() == ("A", "D", "C", "E")
    assert rollout.finish("F") == ["F h b g"]
    assert rollout.admit() == ""
    assert rollout.finish("G") == ["F G b h"]
    assert rollout.admit() == ""
    assert ledger.in_flight == 2

    # 6.5: version 1 opens buffer 2, and the four free places in flight go to I-L.
    ledger.publish(1)
    assert table(ledger) == ["F G b h", ". . . ."]
    assert rollout.admit() == "IJKL"
    assert table(ledger) == ["F G b h", "l k j i"]
    assert {g: ledger.version_of(g) for g in "BHIJKL"} == {"B": 0, "H": 0, "I": 1, "J": 1, "K": 1, "L": 1}

    # 6.6: B and H are too old for buffer 2, so J is placed inside it.
    assert rollout.finish("J") == ["F G b h", "J k l i"]

    # 6.7: the long tails B and I complete the two batches one after the other.
    assert rollout.finish("H") == ["F G H b", "J k l i"]
    assert rollout.finish("K") == ["F G H b", "J K l i"]
    assert ledger.state(1) is BufferState.STUCK
    assert rollout.finish("B") == ["F G H B", "J K l i"]
    assert ledger.take() == ("F", "G", "H", "B")
    assert rollout.finish("L") == ["J K L i"]
    assert rollout.finish("I") == ["J K L I"]
    assert ledger.state(2) is BufferState.READY
    assert ledger.take() is None
    ledger.publish(2)
    assert ledger.take() == ("J", "K", "L", "I")
    assert (ledger.in_flight, ledger.occupied) == (0, 0)


def test_first_example_of_section_3() -> None:
    """B finishes first: F takes exactly its slot, B the first Empty of the earlier buffer."""
    rollout = Rollout()
    rollout.admit()
    assert rollout.finish("B") == ["B . . e", "d c f a"]

"""The hold: where the first engine stops on its way to the newest version, and when it goes on."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from roadstead.inference.evaluation_hold import EvaluationHold
from roadstead.storage.evals import is_due

LIMIT_S = 10.0


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def make(recorded: set[int], every: int = 4, target: int = 10) -> tuple[EvaluationHold, Clock]:
    clock = Clock()
    return EvaluationHold(recorded.__contains__, every, target, LIMIT_S, clock), clock


def test_an_engine_stops_at_each_due_version_until_it_is_on_record() -> None:
    recorded = {0}
    hold, _ = make(recorded)
    assert hold.choose(0, 3) == 3, "nothing due on the way: straight to the newest"
    assert hold.choose(3, 6) == 4, "the newest is past a due one"
    assert hold.choose(4, 6) is None and hold.choose(4, 9) is None
    recorded.add(4)
    assert hold.choose(4, 9) == 8, "and the next one is not skipped either"
    recorded.add(8)
    assert hold.choose(8, 9) == 9 and hold.choose(9, 9) is None
    assert hold.choose(9, 10) == 10 and hold.choose(10, 10) is None


def test_version_zero_is_due_and_so_is_the_target_off_the_interval() -> None:
    hold, _ = make(set())
    assert hold.choose(0, 2) is None
    assert is_due(10, 4, 10) and not is_due(10, 4, 11)


def test_a_version_is_held_for_a_bounded_time() -> None:
    hold, clock = make({0})
    assert hold.choose(4, 4) is None
    clock.now = LIMIT_S - 0.1
    assert hold.choose(4, 5) is None
    clock.now = LIMIT_S
    assert hold.choose(4, 5) == 5, "counted from when the engine came there, not from when something newer did"


def test_an_update_that_broke_off_is_repeated_at_the_version_that_was_due() -> None:
    hold, _ = make({0})
    assert hold.choose(3, 6) == 4
    assert hold.choose(None, 6) == 4, "version 3 or 4, half of each: what it was on its way to is still to be evaluated"
    assert hold.choose(4, 6) is None
    assert hold.choose(None, 6) == 6, "it was lost while it was there: it goes on, and the evaluation is told"


def test_an_engine_of_unknown_past_begins_at_the_newest() -> None:
    hold, _ = make(set())
    assert hold.choose(None, 7) == 7


def test_a_restarted_engine_is_not_taken_back() -> None:
    """It begins at the newest version; the evaluation of an older one finds it past."""
    hold, _ = make({0})
    assert hold.choose(4, 6) is None
    assert hold.choose(6, 6) is None and hold.choose(6, 7) == 7


@given(
    every=st.integers(1, 5),
    target=st.integers(1, 12),
    events=st.lists(st.one_of(st.just("publish"), st.just("close"), st.floats(0.0, LIMIT_S)), max_size=60),
)
def test_no_due_version_is_skipped_and_none_is_held_for_ever(
    every: int, target: int, events: list[str | float]
) -> None:
    """Any order of publications, closed evaluations and time: the engine visits every due version, in order, and
    leaves one only when it is on record or its time is up."""
    recorded: set[int] = set()
    hold, clock = make(recorded, every, target)
    current = newest = 0
    since, visited = 0.0, [0]

    def go() -> None:
        nonlocal current, since
        while (chosen := hold.choose(current, newest)) is not None:
            assert current < chosen <= newest
            assert not is_due(current, every, target) or current in recorded or clock.now - since >= LIMIT_S
            current, since = chosen, clock.now
            visited.append(chosen)

    for event in events:
        if event == "publish":
            newest = min(target, newest + 1)
        elif event == "close":
            recorded.add(current)
        else:
            clock.now += float(event)
        go()
    for _ in range(target + 1):
        clock.now += LIMIT_S
        go()
    assert current == newest
    assert set(visited) >= {version for version in range(newest + 1) if is_due(version, every, target)}

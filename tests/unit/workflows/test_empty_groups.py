"""The guard against training on nothing: when it speaks, and what it says."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from roadstead.storage.references import StagedGroup
from roadstead.workflows.empty_groups import count, verdict
from roadstead.workflows.messages import EmptyGroups


def group(note: str | None = None, filtered: str | None = None) -> StagedGroup:
    return StagedGroup(
        group_id="g00000000",
        attempt=1,
        digest="d",
        trajectories=2,
        tokens=2,
        oldest_version=0,
        newest_version=0,
        mean_reward=0.0,
        filtered=filtered,
        trainable=note is None,
        note=note,
    )


def test_the_words_name_the_cause_the_count_and_the_step() -> None:
    empty = EmptyGroups()
    for i in range(48):
        empty = count(empty, group("reward constant 0" if i % 4 else "no reward: calc: OSError: full"), 112 + i // 8)
        assert (verdict(empty, 16, 3) is None) == (i < 47)
    text = verdict(empty, 16, 3)
    assert text is not None
    assert "48 groups in a row, 3 batches' worth, since step 112" in text
    assert "reward constant 0 in 36 of 48 groups; no reward: calc: OSError: full in 12 of 48 groups" in text


def test_one_group_to_learn_from_ends_the_count() -> None:
    empty = count(count(EmptyGroups(), group("reward constant 0"), 3), group(), 3)
    assert empty == EmptyGroups()


def test_a_filtered_group_counts_though_it_has_advantages() -> None:
    empty = count(EmptyGroups(), group(filtered="max_tokens: a response of 99 tokens"), 7)
    assert empty.count == 1 and empty.notes == {"filtered by max_tokens: a response of 99 tokens": 1}


@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=200))
def test_reasons_that_all_differ_stay_small(numbers: list[int]) -> None:
    empty = EmptyGroups()
    for n in numbers:
        empty = count(empty, group(f"reward constant {n}"), 0)
    assert sum(empty.notes.values()) == empty.count == len(numbers) and len(empty.notes) <= 21

"""Version spans: cover, head and tail, and the arithmetic against lists of one version a token."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roadstead.staleness import (
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

VERSIONS = st.lists(st.integers(0, 4), max_size=30)


def spans(*triples: tuple[int, int, int]) -> list[VersionSpan]:
    return [VersionSpan(*triple) for triple in triples]


@pytest.mark.parametrize(("covering", "length"), [([], 0), ([(0, 0, 1)], 1), ([(3, 0, 2), (3, 2, 5), (2, 5, 6)], 6)])
def test_a_cover(covering: list[tuple[int, int, int]], length: int) -> None:
    check_cover(spans(*covering), length)


@pytest.mark.parametrize(
    ("broken", "length", "message"),
    [
        ([], 1, r"cover \[0, 0\) of \[0, 1\)"),
        ([(0, 0, 2)], 3, r"cover \[0, 2\) of \[0, 3\)"),
        ([(0, 0, 3)], 2, r"cover \[0, 3\) of \[0, 2\)"),
        ([(0, 1, 2)], 2, r"cover \[1, 2\) of \[0, 2\)"),
        ([(0, 0, 1), (0, 2, 3)], 3, r"spans\[1\].*must start at 1"),
        ([(0, 0, 2), (0, 1, 3)], 3, r"spans\[1\].*must start at 2"),
        ([(0, 0, 0)], 0, r"spans\[0\].*leave out empty"),
        ([(0, 0, 1), (-1, 1, 2)], 2, r"spans\[1\].*version >= 0"),
    ],
)
def test_not_a_cover(broken: list[tuple[int, int, int]], length: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_cover(spans(*broken), length)


def test_head_and_tail_see_only_loss_masked_tokens() -> None:
    made = spans((1, 0, 2), (3, 2, 4), (2, 4, 6))
    assert (head_version(made, [True] * 6), tail_version(made, [True] * 6)) == (1, 3)
    assert (head_version(made, [False] * 3 + [True] * 3), tail_version(made, [False] * 4 + [True] * 2)) == (2, 2)
    assert (head_version(made, [False] * 6), tail_version(made, [False] * 6)) == (None, None)


@given(VERSIONS, st.data())
def test_head_and_tail_are_those_of_the_tokens(versions: list[int], data: st.DataObject) -> None:
    mask = data.draw(st.lists(st.booleans(), min_size=len(versions), max_size=len(versions)))
    seen = [version for version, counts in zip(versions, mask, strict=True) if counts]
    made = spans_of_tokens(versions)
    assert (head_version(made, mask), tail_version(made, mask)) == (min(seen, default=None), max(seen, default=None))


@given(VERSIONS)
def test_encoding_covers_is_shortest_and_comes_back(versions: list[int]) -> None:
    made = spans_of_tokens(versions)
    check_cover(made, len(versions))
    assert versions_of_spans(made) == versions
    assert all(before.version != after.version for before, after in pairwise(made))
    assert merge_spans(made) == made


def test_merge_joins_only_what_touches() -> None:
    assert merge_spans(spans((1, 0, 2), (1, 2, 3), (1, 4, 5), (2, 5, 6))) == spans((1, 0, 3), (1, 4, 5), (2, 5, 6))


@given(VERSIONS, st.integers(0, 30), st.integers(0, 30))
def test_clip_and_rebase_is_a_slice(versions: list[int], start: int, end: int) -> None:
    clipped = clip_spans(spans_of_tokens(versions), start, end)
    assert all(start <= span.start < span.end <= end for span in clipped)
    assert versions_of_spans(clipped) == versions[start:end]
    check_cover(shift_spans(clipped, -start), max(0, min(end, len(versions)) - start))


def test_a_turn_is_appended() -> None:
    first, second = spans((1, 0, 3)), spans((1, 0, 2), (2, 2, 4))
    assert merge_spans(first + shift_spans(second, 3)) == spans((1, 0, 5), (2, 5, 7))

"""Version spans: which policy version made which response token.

Owns: the spans of one response, their check and their arithmetic. Never touches: prompts, whole groups, the ledger.
Invariant: spans are half-open ranges of response-token indexes; the spans of a response cover [0, length) in order,
without gap or overlap. Versions may fall as well as rise: an engine can restart with older weights.
A crash leaves: nothing, it is pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Response tokens start..end-1 were made by policy version `version`."""

    version: int
    start: int
    end: int


def check_cover(spans: Sequence[VersionSpan], length: int) -> None:
    """Raise ValueError, naming the span, unless the spans cover response tokens [0, length) exactly and in order."""
    for index, span in enumerate(spans):
        if span.version < 0 or span.end <= span.start:
            raise ValueError(f"spans[{index}]: {span} needs version >= 0 and start < end; leave out empty spans")
    for index, (before, span) in enumerate(pairwise(spans), start=1):
        if before.end != span.start:
            raise ValueError(f"spans[{index}]: {span} must start at {before.end}, where the one before it ends")
    start, end = (spans[0].start, spans[-1].end) if spans else (0, 0)
    if (start, end) != (0, length):
        raise ValueError(f"spans: they cover [{start}, {end}) of [0, {length}); label every response token once")


def head_version(spans: Iterable[VersionSpan], loss_mask: Sequence[bool]) -> int | None:
    """Oldest version among the tokens that the loss sees, None when it sees none.

    loss_mask: one a response token. The staleness of a trained trajectory is its buffer minus this.
    """
    return min(_seen(spans, loss_mask), default=None)


def tail_version(spans: Iterable[VersionSpan], loss_mask: Sequence[bool]) -> int | None:
    """Newest version among the tokens that the loss sees, None when it sees none."""
    return max(_seen(spans, loss_mask), default=None)


def merge_spans(spans: Iterable[VersionSpan]) -> list[VersionSpan]:
    """Join neighbours of equal version that touch: the shortest list with the same meaning."""
    merged: list[VersionSpan] = []
    for span in spans:
        if merged and merged[-1].version == span.version and merged[-1].end == span.start:
            merged[-1] = replace(merged[-1], end=span.end)
        else:
            merged.append(span)
    return merged


def clip_spans(spans: Iterable[VersionSpan], start: int, end: int) -> list[VersionSpan]:
    """What of the spans lies in [start, end), at its indexes of before; `shift_spans(..., -start)` rebases it."""
    cut = (VersionSpan(span.version, max(span.start, start), min(span.end, end)) for span in spans)
    return [span for span in cut if span.start < span.end]


def shift_spans(spans: Iterable[VersionSpan], offset: int) -> list[VersionSpan]:
    """The spans `offset` tokens later, as when a turn is appended to earlier ones."""
    return [VersionSpan(span.version, span.start + offset, span.end + offset) for span in spans]


def spans_of_tokens(versions: Iterable[int]) -> list[VersionSpan]:
    """Run-length encode the versions of the tokens 0, 1, ...; the result is merged."""
    return merge_spans(VersionSpan(version, index, index + 1) for index, version in enumerate(versions))


def versions_of_spans(spans: Iterable[VersionSpan]) -> list[int]:
    """One version a token; `spans_of_tokens` is its inverse on covering, merged spans."""
    return [span.version for span in spans for _ in range(span.start, span.end)]


def _seen(spans: Iterable[VersionSpan], loss_mask: Sequence[bool]) -> Iterable[int]:
    return (span.version for span in spans if any(loss_mask[span.start : span.end]))

"""The mini-batches of a step: which rows one optimizer step is made from.

Owns: the split of a batch over its optimizer steps. Never touches: tensors, ranks.
Invariant: a pure function of the groups' numbers, so that a replay takes the same steps; a group is never split,
because its advantages are relative to each other; a row of a batch without some rows stays in the mini-batch that it
had in the whole one.
A crash leaves: nothing, it is pure.
"""

from __future__ import annotations

from collections.abc import Sequence


def plan_minibatches(groups: Sequence[int], count: int) -> list[list[int]]:
    """Row indices of each mini-batch, in the order of the optimizer steps; none is empty, so there may be fewer.

    groups: of each row, the number of its group in the whole batch. Groups are dealt in turn, as cards are: slots
    are filled in the order of admission, and every mini-batch is to have early and late ones.
    Raises ValueError when count is below 1.
    """
    if count < 1:
        raise ValueError(f"count {count} must be at least 1")
    parts: list[list[int]] = [[] for _ in range(count)]
    for row, group in enumerate(groups):
        parts[group % count].append(row)
    return [part for part in parts if part]

"""The plan of a step: which rank passes which rows through the model together.

Owns: the split of a batch. Never touches: tensors.
Invariant: a pure function of (lengths, ranks, budget), so that a replay sums gradients in the same order; every
row stands in exactly one micro-batch; every rank has the same number of micro-batches, because ranks that differ
stop in each other's collectives (ZeRO-2 aborts, ZeRO-3 hangs until its timeout: measured).
A crash leaves: nothing, it is pure.
"""

from __future__ import annotations

from collections.abc import Sequence

Plan = list[list[list[int]]]
"""rank -> micro-batch -> row indices. An empty micro-batch is a dummy: its rank runs the model without loss."""


def plan_microbatches(lengths: Sequence[int], ranks: int, budget: int) -> Plan:
    """Split rows over `ranks`, longest first, at most `budget` tokens a micro-batch.

    lengths: tokens a row, prompt and response; the padded size of a micro-batch is rows * longest row.
    A row longer than the budget gets a micro-batch of its own: it can't be split, and dropping it would train
    another batch than the committed one. At most one dummy a rank, always its last.
    Raises ValueError when ranks or budget is below 1.
    """
    if ranks < 1 or budget < 1:
        raise ValueError(f"ranks {ranks} and budget {budget} must both be at least 1")
    most_rows = -(-len(lengths) // ranks)  # else one micro-batch could hold all rows and leave the other ranks idle
    packs: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        pack = packs[-1] if packs else None
        # Rows come longest first: the pack's first row is its width.
        if pack and len(pack) < most_rows and (len(pack) + 1) * lengths[pack[0]] <= budget:
            pack.append(row)
        else:
            packs.append([row])
    packs += [[] for _ in range(-len(packs) % ranks)]
    return [packs[rank::ranks] for rank in range(ranks)]

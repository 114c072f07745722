"""What training needs of a committed batch.

Owns: reading the batch's columns, the refusal of a row that can't be trained, the choice of some rows.
Never touches: the store, torch.
Invariant: rows keep the order of the batch; a `TrainingBatch` that exists can be trained without an index error,
so that a bad batch is refused before any rank enters a collective.
A crash leaves: nothing, it is pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import pyarrow as pa

from roadstead.training.protocol import TrainerBadBatch


@dataclass(frozen=True)
class TrainingRow:
    """What the loss needs of one trajectory. P prompt tokens, T response tokens."""

    group_id: str
    member: int
    tokens: np.ndarray
    """[P + T] int32."""
    prompt_length: int
    behavior: np.ndarray
    """[T] float32, nats."""
    mask: np.ndarray
    """[T] bool: tokens that carry loss."""
    advantage: float
    temperature: float


@dataclass(frozen=True)
class TrainingBatch:
    rows: tuple[TrainingRow, ...]

    @classmethod
    def from_table(cls, table: pa.Table, vocabulary: int) -> Self:
        """vocabulary: token ids of the model. Raises TrainerBadBatch for a row that can't be trained, naming it."""
        rows = []
        for i, row in enumerate(table.to_pylist()):
            name = f"row {i} ({row['group_id']} member {row['member']})"
            temperature = row["sampling"]["temperature"]
            if not row["prompt_token_ids"]:
                raise TrainerBadBatch(f"{name}: prompt_token_ids is empty; nothing predicts the first response token")
            if not temperature or temperature <= 0:
                raise TrainerBadBatch(
                    f"{name}: sampling.temperature is {temperature}; greedy samples have no log-probabilities to "
                    "train on, sample with a temperature above 0"
                )
            tokens = np.array(row["prompt_token_ids"] + row["response_token_ids"], dtype=np.int32)
            if tokens.min() < 0 or tokens.max() >= vocabulary:
                raise TrainerBadBatch(
                    f"{name}: token ids run from {tokens.min()} to {tokens.max()}, the model has {vocabulary}; "
                    "the batch was made with another tokenizer"
                )
            mask = np.array(row["loss_mask"], dtype=bool)
            if row["reward"] is None:
                mask[:] = False  # the reward failed: its tokens must not thin out the others' mean either
            rows.append(
                TrainingRow(
                    group_id=row["group_id"],
                    member=row["member"],
                    tokens=tokens,
                    prompt_length=len(row["prompt_token_ids"]),
                    behavior=np.array(row["behavior_logprobs"], dtype=np.float32),
                    mask=mask,
                    advantage=row["advantage"],
                    temperature=temperature,
                )
            )
        return cls(tuple(rows))

    def subset(self, indices: Sequence[int]) -> Self:
        """The batch as if only these rows had been in it: the loss is then the mean over their tokens."""
        return type(self)(tuple(self.rows[i] for i in indices))

    @property
    def lengths(self) -> list[int]:
        """Tokens a row, prompt and response."""
        return [len(row.tokens) for row in self.rows]

    @property
    def loss_tokens(self) -> int:
        return sum(int(row.mask.sum()) for row in self.rows)


def choose_rows(
    table: pa.Table, *, without: Sequence[str] = (), only: Sequence[str] = (), max_staleness: int | None = None
) -> list[int]:
    """Indices of the rows that all of the conditions keep, in the batch's order.

    without, only: a row is named by its number in the batch, by `group_id`, or by `group_id/member`; an empty
    `only` keeps all. max_staleness: rows whose `staleness` is above it are dropped.
    Raises ValueError for a name that the batch does not have, and when nothing is left to train on.
    """
    groups, members = table["group_id"].to_pylist(), table["member"].to_pylist()
    named: dict[str, set[int]] = {}
    for i, (group, member) in enumerate(zip(groups, members, strict=True)):
        for name in (group, f"{group}/{member}"):
            named.setdefault(name, set()).add(i)
    for i in range(len(groups)):
        named.setdefault(str(i), {i})  # a group that is called like a number goes first

    def rows(names: Sequence[str]) -> set[int]:
        unknown = [name for name in names if name not in named]
        if unknown:
            raise ValueError(
                f"rows: {unknown[0]!r} is not in this batch; name rows by number (0 to {len(groups) - 1}), by group "
                f"(for example {groups[0]}) or by group and member ({groups[0]}/{members[0]})"
            )
        return {i for name in names for i in named[name]}

    dropped, wanted = rows(without), rows(only) if only else set(range(len(groups)))
    ages = table["staleness"].to_pylist()
    kept = [i for i in sorted(wanted - dropped) if max_staleness is None or ages[i] <= max_staleness]
    if not kept:
        raise ValueError(f"rows: none of the batch's {len(groups)} rows is left to train on; drop fewer")
    return kept

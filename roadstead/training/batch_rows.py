"""What training needs of a committed batch.

Owns: reading the batch's columns, and the refusal of a row that can't be trained. Never touches: the store, torch.
Invariant: rows keep the order of the batch; a `TrainingBatch` that exists can be trained without an index error,
so that a bad batch is refused before any rank enters a collective.
A crash leaves: nothing, it is pure.
"""

from __future__ import annotations

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

    @property
    def lengths(self) -> list[int]:
        """Tokens a row, prompt and response."""
        return [len(row.tokens) for row in self.rows]

    @property
    def loss_tokens(self) -> int:
        return sum(int(row.mask.sum()) for row in self.rows)

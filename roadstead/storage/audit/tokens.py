"""The loss tokens of a batch as flat arrays.

Owns: flattening of the per-token columns. Never touches: the store, judgement.
Invariant: exactly the tokens that the loss saw: masked in, and of a row whose reward is there.
A crash leaves: nothing, it is pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc


@dataclass(frozen=True)
class LossTokens:
    """N loss tokens of a batch of R rows, row after row."""

    rows: int
    row: np.ndarray
    """[N] int64, index of the row."""
    position: np.ndarray
    """[N] int64, index in the response."""
    version: np.ndarray
    """[N] int64, the policy version that sampled the token."""
    behavior: np.ndarray
    """[N] float64, nats."""
    gap: np.ndarray | None
    """[N] float64, behaviour minus trainer logprob; None without train rows."""

    @classmethod
    def of(cls, data: pa.Table, train: pa.Table | None) -> Self | None:
        """None when the train rows do not have one logprob a response token."""
        lengths = lengths_of(data, "response_token_ids")
        behavior, mask = flat(data, "behavior_logprobs"), flat(data, "loss_mask").astype(bool)
        row = np.repeat(np.arange(data.num_rows), lengths)
        starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64)
        rewarded = data["reward"].is_valid().to_numpy()
        keep = mask & rewarded[row]
        gap = None
        if train is not None:
            if not np.array_equal(lengths_of(train, "trainer_logprobs"), lengths):
                return None
            gap = (behavior.astype(np.float64) - flat(train, "trainer_logprobs"))[keep]
        return cls(
            rows=data.num_rows,
            row=row[keep],
            position=(np.arange(len(row)) - starts[row])[keep],
            version=_versions(data)[keep],
            behavior=behavior.astype(np.float64)[keep],
            gap=gap,
        )

    def count(self) -> np.ndarray:
        """[R] loss tokens a row."""
        return np.bincount(self.row, minlength=self.rows)

    def sum(self, values: np.ndarray) -> np.ndarray:
        """[R] sum of [N] values a row."""
        return np.bincount(self.row, weights=values, minlength=self.rows)

    def importance_mean(self) -> np.ndarray:
        """[R] mean of exp(trainer - behaviour); 1 for a row without loss tokens, as the trainer has it."""
        assert self.gap is not None, "needs train rows"
        with np.errstate(over="ignore", invalid="ignore"):
            total, count = self.sum(np.exp(-self.gap)), self.count()
            return np.where(count > 0, total / np.maximum(count, 1), 1.0)


def flat(table: pa.Table, column: str) -> np.ndarray:
    """All items of a list column, row after row."""
    array = table[column].combine_chunks()
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks)
    return np.asarray(array.flatten().to_numpy(zero_copy_only=False))


def lengths_of(table: pa.Table, column: str) -> np.ndarray:
    """[R] items a row of a list column."""
    return np.asarray(pc.list_value_length(table[column]).to_numpy(), dtype=np.int64)


def _versions(data: pa.Table) -> np.ndarray:
    """The version of every response token; spans cover the tokens, which the schema's check has proved."""
    array = data["version_spans"].combine_chunks()
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks)
    spans = array.flatten()
    starts, ends = spans.field("start").to_numpy(), spans.field("end").to_numpy()
    return np.repeat(spans.field("version").to_numpy(), ends - starts)

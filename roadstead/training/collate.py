"""From rows to tensors.

Owns: padding of a micro-batch. Never touches: the store, the engine.
Invariant: a token's log-probability is taken at the position before it; padding stands to the right, so it never
reaches a real token's attention.
A crash leaves: nothing, it is pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from roadstead.training.batch_rows import TrainingRow


class MicroBatch(NamedTuple):
    """R rows padded to length L; their T response tokens flattened, row after row."""

    input_ids: Any
    """[R, L] int64."""
    attention_mask: Any
    """[R, L] int64."""
    rows: Any
    """[T] int64."""
    positions: Any
    """[T] int64: where the logits of a response token stand."""
    targets: Any
    """[T] int64."""
    behavior: Any
    """[T] float32."""
    mask: Any
    """[T] bool."""
    advantages: Any
    """[T] float32."""
    temperatures: Any
    """[T] float32."""
    shares: Any
    """[T] float32: 1 over the loss tokens of the token's row, with which a sum becomes the row's mean."""


def collate(rows: Sequence[TrainingRow], device: Any) -> MicroBatch:
    """Pad `rows` to the longest and put them on `device`."""
    width = max(len(row.tokens) for row in rows)
    input_ids = np.zeros((len(rows), width), dtype=np.int64)
    attention = np.zeros((len(rows), width), dtype=np.int64)
    for i, row in enumerate(rows):
        input_ids[i, : len(row.tokens)] = row.tokens
        attention[i, : len(row.tokens)] = 1
    counts = [len(row.mask) for row in rows]
    shares = np.array([1.0 / max(1, int(row.mask.sum())) for row in rows], dtype=np.float32)

    def tensor(array: np.ndarray) -> Any:
        return torch.from_numpy(array).to(device)

    return MicroBatch(
        input_ids=tensor(input_ids),
        attention_mask=tensor(attention),
        rows=tensor(np.repeat(np.arange(len(rows)), counts)),
        positions=tensor(np.concatenate([np.arange(row.prompt_length - 1, len(row.tokens) - 1) for row in rows])),
        targets=tensor(np.concatenate([row.tokens[row.prompt_length :] for row in rows]).astype(np.int64)),
        behavior=tensor(np.concatenate([row.behavior for row in rows])),
        mask=tensor(np.concatenate([row.mask for row in rows])),
        advantages=tensor(np.repeat(np.array([row.advantage for row in rows], dtype=np.float32), counts)),
        temperatures=tensor(np.repeat(np.array([row.temperature for row in rows], dtype=np.float32), counts)),
        shares=tensor(np.repeat(shares, counts)),
    )

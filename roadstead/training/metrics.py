"""Numbers of a step, from what each token gave.

Owns: the per-row columns of the train rows and the step's means. Never touches: tensors, the engine.
Invariant: the step's numbers are finite, they go into JSON: tokens whose value is not are left out of them and
stay visible in the rows.
A crash leaves: nothing, it is pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from roadstead.storage.train_rows import TrainMetrics
from roadstead.training.batch_rows import TrainingRow


class RowTokens(NamedTuple):
    """What the loss gave for the T response tokens of one row; float32."""

    logprobs: np.ndarray
    """[T] nats, before the update."""
    importance: np.ndarray
    """[T] before truncation."""
    loss: np.ndarray
    """[T] not normalised."""


def train_row(row: TrainingRow, tokens: RowTokens, cap: float, loss_tokens: int) -> dict[str, Any]:
    """One row of the train rows. A row without loss tokens gets neutral values: weight 1, no divergence."""
    weights, gaps = _masked(row, tokens)
    some = weights.size > 0
    return {
        "group_id": row.group_id,
        "member": row.member,
        "trainer_logprobs": tokens.logprobs,
        "importance_mean": float(weights.mean()) if some else 1.0,
        "importance_max": float(weights.max()) if some else 1.0,
        "capped_share": float((weights > cap).mean()) if some else 0.0,
        "kl_to_behavior": float(gaps.mean()) if some else 0.0,
        "loss": float(tokens.loss.astype(np.float64).sum()) / loss_tokens,
    }


def step_metrics(
    rows: Sequence[TrainingRow],
    tokens: Sequence[RowTokens],
    *,
    cap: float,
    loss_tokens: int,
    grad_norm: float | None,
    max_grad_norm: float,
    applied: bool,
    learning_rate: float,
) -> TrainMetrics:
    """The step's numbers over all loss tokens. `loss_tokens`: the divisor that the loss used."""
    pairs = [_masked(row, values) for row, values in zip(rows, tokens, strict=True)]
    weights = _finite(np.concatenate([weights for weights, _ in pairs]))
    gaps = _finite(np.concatenate([gaps for _, gaps in pairs]))
    losses = _finite(np.concatenate([values.loss for values in tokens]).astype(np.float64))
    norm = grad_norm if grad_norm is not None and math.isfinite(grad_norm) else None
    return TrainMetrics(
        loss=float(losses.sum()) / loss_tokens,
        grad_norm=norm,
        grad_clipped=applied and norm is not None and norm > max_grad_norm,
        applied=applied,
        learning_rate=learning_rate,
        loss_tokens=sum(int(row.mask.sum()) for row in rows),
        importance_mean=float(weights.mean()) if weights.size else 1.0,
        importance_max=float(weights.max()) if weights.size else 1.0,
        capped_share=float((weights > cap).mean()) if weights.size else 0.0,
        kl_to_behavior=float(gaps.mean()) if gaps.size else 0.0,
    )


def _masked(row: TrainingRow, tokens: RowTokens) -> tuple[np.ndarray, np.ndarray]:
    """Importance weights, and behaviour minus trainer log-probabilities, of the row's loss tokens; float64."""
    gaps = row.behavior.astype(np.float64) - tokens.logprobs
    return tokens.importance[row.mask].astype(np.float64), gaps[row.mask]


def _finite(values: np.ndarray) -> np.ndarray:
    finite: np.ndarray = values[np.isfinite(values)]
    return finite

"""Numbers of a step, from what each token gave.

Owns: the per-row columns of the train rows and the step's means. Never touches: tensors, the engine.
Invariant: the step's numbers are finite, they go into JSON: tokens whose value is not are left out of them and
stay visible in the rows. A row's importance and divergence follow from its log-probabilities, token by token, whatever
the loss options are, so that an audit can compute them again.
A crash leaves: nothing, it is pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from roadstead.config import TrainingSection
from roadstead.storage.train_rows import TrainMetrics
from roadstead.training.batch_rows import TrainingRow


class RowTokens(NamedTuple):
    """What the loss gave for the T response tokens of one row; float32 but `clipped`."""

    logprobs: np.ndarray
    """[T] nats, under the weights at the start of the step."""
    entropy: np.ndarray
    """[T] nats, under the same weights."""
    importance: np.ndarray
    """[T] of each token, before truncation."""
    weights: np.ndarray
    """[T] the same, or of the trajectory: what was truncated and used."""
    loss: np.ndarray
    """[T] not normalised."""
    clipped: np.ndarray
    """[T] bool."""
    kl: np.ndarray
    """[T] to the reference, under the weights that the row's mini-batch met."""


@dataclass(frozen=True)
class OptimizerStep:
    """What became of one mini-batch; the same on every rank."""

    rows: tuple[int, ...]
    """Indices in the batch."""
    divisor: int
    """Of the loss."""
    applied: bool
    """False: the gradient was not finite, or there was nothing to learn from."""
    grad_norm: float | None
    """Before clipping; None: not finite."""


def train_row(row: TrainingRow, tokens: RowTokens, cap: float, divisor: int) -> dict[str, Any]:
    """One row of the train rows. A row without loss tokens gets neutral values: weight 1, no divergence.

    divisor: what the row's share of the step's loss is divided by.
    """
    weights = tokens.importance[row.measured].astype(np.float64)
    gaps = _gaps(row, tokens)[row.measured]
    used = tokens.weights[row.mask]
    some = weights.size > 0
    return {
        "group_id": row.group_id,
        "member": row.member,
        "trainer_logprobs": tokens.logprobs,
        "importance_mean": float(weights.mean()) if some else 1.0,
        "importance_max": float(weights.max()) if some else 1.0,
        "capped_share": float((used > cap).mean()) if used.size else 0.0,
        "kl_to_behavior": float(gaps.mean()) if some else 0.0,
        "loss": float(tokens.loss.astype(np.float64).sum()) / divisor,
    }


def step_metrics(
    rows: Sequence[TrainingRow],
    tokens: Sequence[RowTokens],
    steps: Sequence[OptimizerStep],
    training: TrainingSection,
    learning_rate: float,
) -> TrainMetrics:
    """The step's numbers over all loss tokens; rows and tokens in the batch's order."""

    def over_loss_tokens(column: str) -> np.ndarray:
        pairs = zip(rows, tokens, strict=True)
        return _finite(np.concatenate([getattr(values, column)[row.mask] for row, values in pairs]).astype(np.float64))

    weights, kl = over_loss_tokens("weights"), over_loss_tokens("kl")
    gaps = _finite(np.concatenate([_gaps(row, values)[row.mask] for row, values in zip(rows, tokens, strict=True)]))
    rewards = _finite(np.array([row.reward for row in rows if row.reward is not None], dtype=np.float64))
    losses = [_finite(np.concatenate([tokens[i].loss for i in step.rows]).astype(np.float64)) for step in steps]
    norms = [step.grad_norm for step in steps]
    finite = [norm for norm in norms if norm is not None]
    return TrainMetrics(
        loss=sum(float(part.sum()) / step.divisor for part, step in zip(losses, steps, strict=True)) / len(steps),
        grad_norm=max(finite) if len(finite) == len(norms) else None,
        grad_clipped=any(step.applied and (step.grad_norm or 0.0) > training.max_grad_norm for step in steps),
        applied=any(step.applied for step in steps),
        optimizer_steps=sum(step.applied for step in steps),
        learning_rate=learning_rate,
        loss_tokens=sum(int(row.mask.sum()) for row in rows),
        masked_over_age=sum(int(row.over_age.sum()) for row in rows),
        trainable_rows=sum(row.trainable for row in rows),
        zero_advantage_share=sum(row.advantage == 0.0 for row in rows) / len(rows),
        reward_mean=_mean(rewards),
        reward_std=float(rewards.std()) if rewards.size else None,
        importance_mean=float(weights.mean()) if weights.size else 1.0,
        importance_max=float(weights.max()) if weights.size else 1.0,
        capped_share=float((weights > training.importance_cap).mean()) if weights.size else 0.0,
        clip_share=_mean(over_loss_tokens("clipped")),
        kl_to_behavior=float(gaps.mean()) if gaps.size else 0.0,
        kl_to_reference=_mean(kl) if training.kl_coefficient > 0 else None,
        entropy=_mean(over_loss_tokens("entropy")),
    )


def finite_norm(norm: float | None, applied: bool) -> float | None:
    """A gradient norm as it is recorded."""
    return norm if applied and norm is not None and math.isfinite(norm) else None


def _gaps(row: TrainingRow, tokens: RowTokens) -> np.ndarray:
    """[T] float64: behaviour minus trainer log-probabilities."""
    gaps: np.ndarray = row.behavior.astype(np.float64) - tokens.logprobs
    return gaps


def _finite(values: np.ndarray) -> np.ndarray:
    finite: np.ndarray = values[np.isfinite(values)]
    return finite


def _mean(values: np.ndarray) -> float | None:
    """None: there is none."""
    return float(values.mean()) if values.size else None

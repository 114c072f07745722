"""The optimizer steps of one batch, on one rank.

Owns: the order of forward passes, backward passes and optimizer steps; what becomes of a mini-batch without gradient.
Never touches: the loss's arithmetic, the policy version, the store.
Invariant: collective: all ranks run the same passes in the same order. Log-probabilities that a step is measured and
weighted by are those of the weights that it began with. A batch that gets one optimizer step gets one forward pass.
A mini-batch without gradient takes no optimizer step: Adam would move the weights by its momentum and weight decay.
A crash leaves: nothing durable; the weights may have moved, so the process must not go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from roadstead.config import TrainingSection
from roadstead.training.batch_rows import TrainingBatch
from roadstead.training.collate import MicroBatch, collate
from roadstead.training.losses import TokenLoss, chosen_logprobs, entropies, scaled_logits, token_loss
from roadstead.training.metrics import OptimizerStep, RowTokens, finite_norm
from roadstead.training.microbatches import plan_microbatches
from roadstead.training.minibatches import plan_minibatches


class _Tokens(NamedTuple):
    """Of a micro-batch's T response tokens, under the weights at the start of the step, without gradient."""

    logprobs: Any
    entropy: Any


@dataclass(frozen=True)
class _MiniBatch:
    rows: tuple[int, ...]
    """Indices in the batch."""
    micros: tuple[tuple[int, ...], ...]
    """This rank's micro-batches, indices in the batch; an empty one is a dummy."""
    divisor: int
    learns: bool


class Optimization:
    """Made for one batch. `run` is collective."""

    def __init__(
        self,
        engine: Any,
        reference: Any,
        training: TrainingSection,
        *,
        rank: int = 0,
        ranks: int = 1,
        always_step: bool = False,
    ) -> None:
        """engine: DeepSpeed's. reference: a whole, frozen model on this rank's device, or None when the loss has no
        KL term. always_step: also without gradient, as results of older releases were made."""
        self._engine, self._reference, self._training = engine, reference, training
        self._rank, self._ranks = rank, ranks
        self._always_step = always_step
        self.tokens: dict[int, RowTokens] = {}
        """Of this rank's rows, by index in the batch."""

    def run(self, batch: TrainingBatch) -> list[OptimizerStep]:
        """Train on `batch`, one optimizer step a mini-batch; fills `tokens`."""
        groups = [row.group for row in batch.rows]
        minis = [self._plan(batch, rows) for rows in plan_minibatches(groups, self._training.minibatches)]
        # The first one that learns meets these weights in its own pass; all others are asked before anything moves.
        first = next((mini for mini in minis if mini.learns), None)
        starts = [None if mini is first else self._start(batch, mini) for mini in minis]
        return [self._step(batch, mini, start) for mini, start in zip(minis, starts, strict=True)]

    def _plan(self, batch: TrainingBatch, rows: Sequence[int]) -> _MiniBatch:
        mini = batch.subset(rows)
        plan = plan_microbatches(mini.lengths, self._ranks, self._training.micro_batch_tokens)[self._rank]
        by_row = self._training.aggregation == "sequence_mean"
        gradient = any(row.trainable for row in mini.rows) or (self._training.kl_coefficient > 0 and mini.loss_rows > 0)
        return _MiniBatch(
            rows=tuple(rows),
            micros=tuple(tuple(rows[i] for i in indices) for indices in plan),
            # Without loss tokens the loss is 0, not a division by 0.
            divisor=max(1, mini.loss_rows if by_row else mini.loss_tokens),
            learns=gradient or self._always_step,
        )

    def _start(self, batch: TrainingBatch, mini: _MiniBatch) -> list[_Tokens]:
        """What the weights of now say about each micro-batch."""
        starts = []
        for micro in self._collated(batch, mini):
            with torch.no_grad():
                scaled = self._scaled(micro)
                starts.append(_Tokens(chosen_logprobs(scaled, micro.targets), entropies(scaled)))
        return starts

    def _step(self, batch: TrainingBatch, mini: _MiniBatch, start: list[_Tokens] | None) -> OptimizerStep:
        for k, (micro, indices) in enumerate(zip(self._collated(batch, mini), mini.micros, strict=True)):
            before = None if start is None else start[k]
            if mini.learns:
                before, loss = self._learn(micro, mini, before)
            else:
                assert before is not None, "only the first mini-batch that learns has none"
                loss = self._loss(micro, before.logprobs, None, None)
            self._keep(batch, indices, before, loss)
        if not mini.learns:
            return OptimizerStep(mini.rows, mini.divisor, applied=False, grad_norm=0.0)
        self._engine.step()
        applied = bool(self._engine.was_step_applied())
        norm = self._engine.get_global_grad_norm()
        return OptimizerStep(
            mini.rows, mini.divisor, applied, finite_norm(None if norm is None else float(norm), applied)
        )

    def _learn(self, micro: MicroBatch, mini: _MiniBatch, before: _Tokens | None) -> tuple[_Tokens, TokenLoss]:
        """Forward and backward pass."""
        reference = None
        if self._reference is not None:
            with torch.no_grad():
                out = self._reference(input_ids=micro.input_ids, attention_mask=micro.attention_mask, use_cache=False)
                scaled = scaled_logits(out.logits, micro.rows, micro.positions, micro.temperatures)
                reference = chosen_logprobs(scaled, micro.targets)
                del out, scaled  # as large as the policy's own, which come next
        scaled = self._scaled(micro)
        logprobs = chosen_logprobs(scaled, micro.targets)
        if before is None:
            before = _Tokens(logprobs.detach(), entropies(scaled))
        proximal = before.logprobs if self._training.minibatches > 1 else None
        loss = self._loss(micro, logprobs, proximal, reference)
        # The engine averages gradients over ranks; the loss is a sum over all of them.
        self._engine.backward(loss.total * (self._ranks / mini.divisor), scale_wrt_gas=False)
        return before, loss

    def _loss(self, micro: MicroBatch, logprobs: Any, proximal: Any, reference: Any) -> TokenLoss:
        t = self._training
        return token_loss(
            logprobs,
            micro.behavior,
            micro.advantages,
            micro.mask,
            t.importance_cap,
            proximal=proximal,
            clip=(t.clip_low, t.clip_high),
            sequences=micro.rows if t.importance_level == "sequence" else None,
            reference=reference,
            kl_coefficient=t.kl_coefficient,
            shares=micro.shares if t.aggregation == "sequence_mean" else None,
        )

    def _scaled(self, micro: MicroBatch) -> Any:
        """The policy's logits for the micro-batch's response tokens, after temperature."""
        out = self._engine(input_ids=micro.input_ids, attention_mask=micro.attention_mask, use_cache=False)
        return scaled_logits(out.logits, micro.rows, micro.positions, micro.temperatures)

    def _collated(self, batch: TrainingBatch, mini: _MiniBatch) -> list[MicroBatch]:
        """A dummy is the shortest row, without loss: the rank must run the model when the others do."""
        shortest = min((batch.rows[i] for i in mini.rows), key=lambda row: len(row.tokens))
        micros = []
        for indices in mini.micros:
            micro = collate([batch.rows[i] for i in indices] or [shortest], self._engine.device)
            micros.append(micro if indices else micro._replace(mask=torch.zeros_like(micro.mask)))
        return micros

    def _keep(self, batch: TrainingBatch, indices: Sequence[int], before: _Tokens, loss: TokenLoss) -> None:
        if not indices:
            return
        columns = {
            "logprobs": before.logprobs,
            "entropy": before.entropy,
            "importance": loss.importance,
            "weights": loss.weights,
            "loss": loss.per_token,
            "clipped": loss.clipped,
            "kl": loss.kl,
        }
        counts = [len(batch.rows[i].mask) for i in indices]
        parts = {name: column.detach().cpu().split(counts) for name, column in columns.items()}
        for k, index in enumerate(indices):
            self.tokens[index] = RowTokens(**{name: part[k].numpy() for name, part in parts.items()})

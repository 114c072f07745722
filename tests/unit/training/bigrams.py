"""A language model that a test can follow: the next token depends on the last one alone, through a table of logits.

With it an engine that looks like DeepSpeed's, and batches. Imports torch.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from roadstead.config import TrainingSection
from roadstead.storage.schema import table_from_rows
from roadstead.training.batch_rows import TrainingBatch
from tests.support.rows import group_rows

VOCABULARY = 7


class Bigrams(torch.nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.table = torch.nn.Parameter(torch.randn(VOCABULARY, VOCABULARY, generator=generator))
        self.passes: list[bool] = []
        """One a forward pass: was it for a gradient?"""

    def forward(self, input_ids: Any, attention_mask: Any, use_cache: bool) -> Any:
        self.passes.append(torch.is_grad_enabled())
        return SimpleNamespace(logits=self.table[input_ids])


class Engine:
    """The part of DeepSpeed's engine that is used. Gradients are those of one rank; its optimizer is AdamW."""

    def __init__(self, model: Bigrams, learning_rate: float = 0.05, decay: float = 0.0) -> None:
        self.model, self.device = model, "cpu"
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=decay)
        self.norms: list[float] = []
        self.before_step: Callable[[], None] = lambda: None

    def __call__(self, **inputs: Any) -> Any:
        return self.model(**inputs)

    def backward(self, loss: Any, scale_wrt_gas: bool) -> None:
        assert not scale_wrt_gas
        loss.backward()

    def step(self) -> None:
        self.before_step()
        gradient = self.model.table.grad
        assert gradient is not None
        self.norms.append(float(gradient.norm()))
        if torch.isfinite(gradient).all():
            self.optimizer.step()
        self.optimizer.zero_grad()

    def was_step_applied(self) -> bool:
        return bool(np.isfinite(self.norms[-1]))

    def get_global_grad_norm(self) -> float:
        return self.norms[-1]


def settings(**training: Any) -> TrainingSection:
    return TrainingSection(steps=1, micro_batch_tokens=20, **training)


def rows_of(
    advantages: list[list[float]], *, seed: int = 0, step: int = 3, temperature: float = 0.7, **changes: Any
) -> list[dict[str, Any]]:
    """Rows of a batch: a list of advantages a group; lengths, masks and versions vary."""
    random = np.random.default_rng(seed)
    rows = []
    for slot, group in enumerate(advantages):
        for row, advantage in zip(group_rows(f"g{slot}", members=len(group)), group, strict=True):
            n = int(random.integers(1, 7))
            split = int(random.integers(0, n))
            spans = [{"version": step - 2, "start": 0, "end": split}, {"version": step, "start": split, "end": n}]
            row |= {
                "step": step,
                "slot": slot,
                "prompt_token_ids": random.integers(0, VOCABULARY, 2).tolist(),
                "response_token_ids": random.integers(0, VOCABULARY, n).tolist(),
                "loss_mask": [True, *(random.random(n - 1) < 0.8).tolist()],
                "behavior_logprobs": (-2.0 + 0.6 * random.standard_normal(n)).astype(np.float32).tolist(),
                "version_spans": [span for span in spans if span["start"] < span["end"]],
                "head_version": step - (2 if split else 0),
                "tail_version": step,
                "staleness": 2 if split else 0,
                "advantage": advantage,
                "occupied_at": row["finished_at"],
                "sampling": row["sampling"] | {"temperature": temperature},
            }
            rows.append(row | changes)
    return rows


def batch_of(rows: list[dict[str, Any]]) -> TrainingBatch:
    return TrainingBatch.from_table(table_from_rows(rows, batch=True), VOCABULARY)

"""Symptoms: numbers that are none, and rewards that are missing.

Owns: NaN and infinity by the place where they enter (engine, environment, advantages, trainer), and null rewards.
One number that is none makes every weight of the model none, so it is critical whatever its row is.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from roadstead.storage.audit.checks.base import listed
from roadstead.storage.audit.evidence import Evidence
from roadstead.storage.audit.report import Finding


class NotNumbers:
    name = "not-a-number"

    def look(self, evidence: Evidence) -> Iterator[Finding]:
        rows = evidence.rows
        if rows.empty:
            return
        nan_reward = ~rows["reward_missing"] & ~np.isfinite(rows["reward"].astype(float))
        # In the order in which a row is made: the first that is broken is the cause, the others follow from it.
        stages = (
            ("behaviour logprobs", "the engine reported them so", rows["behavior_bad"] > 0),
            ("the reward", "the environment returned it so", nan_reward),
            (
                "the advantage",
                "rewards are finite: the arithmetic of advantages made it",
                ~np.isfinite(rows["advantage"]),
            ),
            ("trainer logprobs", "the batch is finite: the trainer's forward pass made them", rows["trainer_bad"] > 0),
            ("the loss", "all inputs are finite: the trainer made it", _broken(rows["loss"], rows["importance_mean"])),
        )
        blamed = np.zeros(len(rows), dtype=bool)
        for what, origin, broken in stages:
            mask = np.asarray(broken) & ~blamed
            blamed |= mask
            found = rows[mask]
            if len(found):
                row = found.iloc[0]
                skipped = [
                    e.step
                    for e in evidence.steps
                    if e.record and e.record.metrics.not_finite and e.step in set(found["step"])
                ]
                yield evidence.finding(
                    self.name,
                    "critical",
                    1.0,
                    f"{what} of {len(found)} row(s): NaN or infinite",
                    f"first in {row.group_id} member {row.member} (engine {row.engine_id}, environment "
                    f"{row.environment}); {origin}"
                    + (
                        f"; the update of step(s) {listed([str(s) for s in skipped])} was skipped for it"
                        if skipped
                        else ""
                    ),
                    found,
                )
        whole = {e.step for e in evidence.steps} - {int(s) for s in rows[blamed]["step"]}
        for e in evidence.steps:
            if e.step in whole and e.record and e.record.metrics.not_finite:
                yield evidence.finding(
                    self.name,
                    "critical",
                    0.9,
                    f"step {e.step}: the gradient was not finite, the update was skipped",
                    "every row of the batch and its logprobs are finite: the backward pass overflowed",
                    rows[rows["step"] == e.step].sort_values("loss", key=lambda s: -s.abs()).head(8),
                )


def _broken(loss: object, importance: object) -> np.ndarray:
    """Non-finite where there are train rows at all: rows without any carry NaN in both."""
    one, other = np.asarray(loss, dtype=float), np.asarray(importance, dtype=float)
    broken: np.ndarray = (~np.isfinite(one) | ~np.isfinite(other)) & ~(np.isnan(one) & np.isnan(other))
    return broken


class MissingRewards:
    name = "missing-reward"

    def look(self, evidence: Evidence) -> Iterator[Finding]:
        rows = evidence.rows
        missing = rows[rows["reward_missing"]] if len(rows) else rows
        for environment, found in missing.groupby("environment") if len(missing) else ():
            of = int((rows["environment"] == environment).sum())
            row = found.iloc[0]
            yield evidence.finding(
                self.name,
                "warning",
                1.0,
                f"{len(found)} row(s) of environment {environment} have no reward",
                f"null in {len(found)} of its {of} rows, first {row.group_id} member {row.member}; such a row is left "
                "out of its group's mean and of the loss, so the batch trained on fewer tokens than it holds",
                found,
            )

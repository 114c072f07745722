"""The numbers of a run's records, by the names that they have in every tracker.

Owns: the names `train/...`, `data/...`, `eval/...`. Never touches: the store, the trackers.
Invariant: the last value of a point is its marker, `train/attempt` or `eval/attempt`, and no other record has it:
where the marker is, the whole point is.
A crash leaves: nothing, it is pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from roadstead.storage.evals import EvaluationSummary
from roadstead.storage.steps import StepRecord
from roadstead.trackers.tracker import flat

STEP_MARKER, EVALUATION_MARKER = "train/attempt", "eval/attempt"

_DATA = ("mean_reward", "max_staleness", "rows", "response_tokens", "cursor")
_NOT_NUMBERS = {"format", "version", "attempt", "settings", "errors", "failures", "data"}
"""Of an evaluation's summary: what names it, and what is keyed by free text."""


def step_values(record: StepRecord) -> dict[str, float]:
    """`train/`: what the trainer measured; `data/`: the batch, and the groups that ended since the step before."""
    ended = Counter(record.terminal.values())
    data = {name: getattr(record, name) for name in _DATA} | {f"groups/{state}": n for state, n in ended.items()}
    return {
        **_named("train", record.metrics.model_dump()),
        **_named("data", data),
        STEP_MARKER: float(record.attempt),
    }


def evaluation_values(summary: EvaluationSummary) -> dict[str, float]:
    """`eval/`: of a version, whose step is the one that trains it, so that it can be laid beside that step's."""
    numbers = summary.model_dump(exclude=_NOT_NUMBERS) | {"prompts": summary.settings.prompts}
    return {**_named("eval", numbers), EVALUATION_MARKER: float(summary.attempt)}


def _named(group: str, values: Mapping[str, Any]) -> dict[str, float]:
    return {
        f"{group}/{name.replace('.', '/')}": float(value)
        for name, value in flat(values).items()
        if isinstance(value, int | float)
    }

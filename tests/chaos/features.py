"""What a run is besides the plainest one: a function of the seed alone.

Owns: the features, what they change in the configuration, how often each is drawn. Never touches: faults, processes.
Invariant: the same seed has the same features. They are drawn apart from the faults, so that a seed keeps its schedule
when a feature comes or goes, but for kinds of faults that need one.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Feature:
    share: float
    """Of the runs that are not plain. Those that cost most are rare."""
    changes: dict[str, Any]
    """Of the configuration, by `section` or `section__key`."""


FEATURES: dict[str, Feature] = {
    # 13 of 40 prompts are refilled: six of a constant reward, eight by the function, one of them both.
    "filters": Feature(
        0.35,
        {
            "data__environment": "tests.chaos.tasks:FlatEnvironment",
            "filters": {"zero_variance": True, "functions": ["tests.chaos.tasks:every_fifth"]},
        },
    ),
    "extra-member": Feature(0.3, {"rollout__extra_members": 1}),
    # Ten steps: versions 0, 4, 8 and 10. The engine is held for as long at most as a fault may take it away.
    "evaluation": Feature(
        0.35, {"evaluation": {"every": 4, "group_size": 2, "max_tokens": 40, "timeout_s": 60, "prompts": "held_out"}}
    ),
    "synchronous": Feature(0.15, {"staleness__max_staleness": 0}),
    "minibatches": Feature(0.25, {"training__minibatches": 2}),
    "dead-letters": Feature(0.2, {"data__environment": "tests.chaos.tasks:BrokenEnvironment"}),
    # Longer than a step takes, shorter than an engine that loads: what it held is given up.
    "stuck-clock": Feature(0.15, {"rollout__stuck_timeout_s": 8}),
    "two-engines": Feature(0.12, {"engine__replicas": 2}),
    "two-ranks": Feature(0.06, {"training__ranks": 2}),
}
_PLAIN = 0.3
"""Share of runs without any."""


def features(seed: int) -> tuple[str, ...]:
    choice = random.Random(f"chaos/features/l/{seed}")  # the letter gives seeds 20 to 22 half of them
    if choice.random() < _PLAIN:
        return ()
    return tuple(name for name, feature in FEATURES.items() if choice.random() < feature.share)


def changes(names: Sequence[str]) -> dict[str, Any]:
    """Of the configuration. Raises ValueError for a feature that is none."""
    for name in names:
        if name not in FEATURES:
            raise ValueError(f"--features {name}: no such feature; known: {', '.join(FEATURES)}")
    # In one order, whatever they were named in: two of them set the environment, and the last one has both.
    merged: dict[str, Any] = {}
    for name, feature in FEATURES.items():
        if name in names:
            merged.update(feature.changes)
    return merged

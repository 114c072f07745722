"""Group-relative advantages.

Owns: the arithmetic from a group's rewards to its advantages. Never touches: tensors, the batch, the store.
Invariant: the advantages of a group sum to zero (within rounding), a group whose rewards are all equal gives
zeros, and a trajectory whose reward failed neither moves the others nor gets a gradient itself.
A crash leaves: nothing, it is pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

_EPSILON = 1e-6
"""Added to the standard deviation. Rewards are of order 1: small enough to leave ordinary groups alone, large
enough that a group of nearly equal rewards can't blow rounding noise up to an advantage of order 1."""


def group_advantages(rewards: Sequence[float | None], normalize: bool) -> list[float]:
    """Advantages of one group, in the order of `rewards`: (r - mean) / (std + 1e-6), or r - mean.

    rewards: one a trajectory; None is a reward that failed, it gets 0 and is left out of mean and std.
    normalize: divide by the population standard deviation.
    Raises ValueError on NaN or infinity, naming the member.
    Source: GRPO, outcome supervision, DeepSeekMath section 4.1.2 (arXiv 2402.03300).
    """
    for member, reward in enumerate(rewards):
        if reward is not None and not math.isfinite(reward):
            raise ValueError(
                f"reward of member {member} is {reward}; an environment must return a finite number, "
                "or fail so that the reward is recorded as missing"
            )
    known = np.array([r for r in rewards if r is not None], dtype=np.float64)
    # Equal rewards are tested as such: their mean can be off by a rounding error, which dividing would blow up.
    if known.size == 0 or known.max() == known.min():
        return [0.0] * len(rewards)
    mean = float(known.mean())
    scale = float(known.std()) + _EPSILON if normalize else 1.0
    return [0.0 if r is None else (r - mean) / scale for r in rewards]

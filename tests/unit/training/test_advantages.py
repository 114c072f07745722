"""Group-relative advantages: the arithmetic, missing rewards, refusals."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roadstead.training.advantages import group_advantages

REWARDS = st.lists(st.none() | st.floats(-100, 100), min_size=1, max_size=16)


def test_normalized_by_population_deviation() -> None:
    assert group_advantages([0.0, 1.0, 1.0, 2.0], True) == pytest.approx(
        [-math.sqrt(2), 0.0, 0.0, math.sqrt(2)], abs=1e-5
    )


def test_centred_only() -> None:
    assert group_advantages([0.0, 1.0, 5.0], False) == [-2.0, -1.0, 3.0]


def test_missing_reward_is_zero_and_left_out() -> None:
    assert group_advantages([0.0, None, 2.0], False) == [-1.0, 0.0, 1.0]


@pytest.mark.parametrize("rewards", [[0.1] * 3, [0.1, None, 0.1], [7.0], [None, None], [None, 3.0]])
def test_constant_group_is_zeros(rewards: list[float | None]) -> None:
    # 3 * 0.1 / 3 is not 0.1: dividing the rounding error by the deviation would give a gradient from nothing.
    assert group_advantages(rewards, True) == [0.0] * len(rewards)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_reward_that_is_not_finite_is_refused_by_member(bad: float) -> None:
    with pytest.raises(ValueError, match="member 2"):
        group_advantages([0.0, 1.0, bad], True)


@given(REWARDS, st.booleans())
def test_sum_is_zero_and_order_is_that_of_the_rewards(rewards: list[float | None], normalize: bool) -> None:
    advantages = group_advantages(rewards, normalize)
    assert len(advantages) == len(rewards)
    assert sum(advantages) == pytest.approx(0.0, abs=1e-6)
    pairs = sorted((r, a) for r, a in zip(rewards, advantages, strict=True) if r is not None)
    assert all(a <= b for (_, a), (_, b) in itertools.pairwise(pairs))


@pytest.mark.parametrize("module", ["advantages", "client", "launcher", "protocol"])
def test_imports_without_torch(module: str) -> None:
    code = f"import sys, roadstead.training.{module}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

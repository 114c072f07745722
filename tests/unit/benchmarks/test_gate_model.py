"""The gate model of "The RL orchestrator control loop", to the digit; then its cases with the ledger."""

from __future__ import annotations

import pytest

from roadstead.benchmarks.simulator.gate_model import Formula, ReserveOccupyRule, play

BATCH = 8
BOUNDS = (0, 1, 2, 4)
UNIFORM, JITTER, WIDE = (3, 3), (1, 6), (1, 12)
UNGATED = 10**9
UNLIMITED = 10**6


@pytest.mark.parametrize("bound", BOUNDS)
def test_the_bound_of_the_formula_is_exact_and_reached_under_uniform_latency(bound: int) -> None:
    assert play(Formula(bound, BATCH)).max_age == bound


@pytest.mark.parametrize(("bound", "observed"), [(1, 2), (2, 4), (4, 7)])
def test_jitter_breaks_the_bound_of_the_formula_and_the_mean_hides_it(bound: int, observed: int) -> None:
    played = play(Formula(bound, BATCH), latency=JITTER)
    assert played.max_age == observed
    assert abs(sum(played.ages) / len(played.ages) - bound) < 1


def test_the_overshoot_grows_with_the_spread() -> None:
    narrow, wide = (play(Formula(2, BATCH), latency=latency).max_age for latency in ((1, 3), WIDE))
    assert narrow < wide


@pytest.mark.parametrize("concurrency", [16, 32, 64, 128, 256])
def test_without_the_term_concurrency_sets_the_age_and_with_it_the_smaller_binds(concurrency: int) -> None:
    ungated = concurrency // BATCH - 1
    assert play(Formula(UNGATED, BATCH), ticks=80, concurrency=concurrency).max_age == ungated
    assert play(Formula(2, BATCH), ticks=80, concurrency=concurrency).max_age == min(2, ungated)


def test_a_resume_without_the_accepted_count_bursts() -> None:
    burst = play(Formula(2, BATCH, version=40), concurrency=UNLIMITED)
    right = play(Formula(2, BATCH, version=40, accepted=40 * BATCH), concurrency=UNLIMITED)
    assert (burst.admitted[0], right.admitted[0]) == (344, 24)
    assert (burst.max_age, right.max_age) == (42, 2)


def test_a_limit_of_concurrency_clips_the_burst_and_not_the_age() -> None:
    clipped = play(Formula(2, BATCH, version=40), concurrency=64)
    assert (clipped.admitted[0], clipped.max_age) == (64, 7)


@pytest.mark.parametrize("version", [0, 40])
@pytest.mark.parametrize("concurrency", [16, 64, 256, UNLIMITED])
@pytest.mark.parametrize("latency", [UNIFORM, JITTER, WIDE])
@pytest.mark.parametrize("bound", BOUNDS)
def test_reserve_occupy_keeps_the_bound_in_every_case(
    bound: int, latency: tuple[int, int], concurrency: int, version: int
) -> None:
    played = play(ReserveOccupyRule(bound, BATCH, version), ticks=200, latency=latency, concurrency=concurrency)
    assert len(played.ages) >= 10 * BATCH
    assert played.max_age <= bound
    assert played.admitted[0] == min(concurrency, (bound + 1) * BATCH)


def test_reserve_occupy_reaches_the_bound_it_is_given() -> None:
    assert [play(ReserveOccupyRule(bound, BATCH)).max_age for bound in BOUNDS] == list(BOUNDS)

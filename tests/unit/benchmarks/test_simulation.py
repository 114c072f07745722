"""The event loop, and what each policy promises, on what was trained."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roadstead.benchmarks.simulator.costs import h20_qwen3_8b
from roadstead.benchmarks.simulator.experiments.correctness import BOUNDS, check
from roadstead.benchmarks.simulator.policies import POLICIES, Group, QueuePolicy
from roadstead.benchmarks.simulator.report import Report
from roadstead.benchmarks.simulator.run import simulate
from roadstead.benchmarks.simulator.simulation import Setup, Simulation, Stalled
from roadstead.benchmarks.simulator.workload import Trace, synthetic

COSTS = h20_qwen3_8b()
STRICT = [name for name, policy in POLICIES.items() if policy.strict]
KEEPING = [name for name, policy in POLICIES.items() if not policy.discards]

groups = st.lists(
    st.tuples(st.integers(1, 50), st.lists(st.integers(1, 4000), min_size=1, max_size=4).map(tuple)),
    min_size=1,
    max_size=12,
)
"""Length spreads of any kind: a hundred to one within a group, groups of different sizes."""


def run(
    name: str, trace: Trace, bound: int, batches: int = 12, batch_size: int = 3, setup: Setup | None = None
) -> Simulation:
    simulation = Simulation(POLICIES[name](batch_size, bound), trace, COSTS, setup or Setup(2, 4), seed=3)
    simulation.run(batches)
    return simulation


@pytest.mark.parametrize("long_tail", [False, True])
@pytest.mark.parametrize("bound", BOUNDS)
def test_the_posts_correctness_experiment_in_full(bound: int, long_tail: bool) -> None:
    """Twelve of these are the 1,200 batches: all full, all within the bound, nothing thrown away."""
    found = check(synthetic(long_tail), bound)
    assert (found.batches, found.full, found.over, found.discarded) == (100, 100, 0, 0)
    assert found.max_age <= bound


def test_the_correctness_check_can_fail() -> None:
    assert check(synthetic(), 1, batches=20, policy="admission_gate").over > 0


@settings(max_examples=60, deadline=None)
@given(groups=groups, bound=st.integers(1, 4), partial=st.booleans(), name=st.sampled_from(STRICT))
def test_a_strict_policy_trains_no_token_that_is_too_old(
    groups: list[tuple[int, tuple[int, ...]]], bound: int, partial: bool, name: str
) -> None:
    simulation = run(name, Trace("t", tuple(groups)), bound, setup=Setup(2, 3, partial))
    assert max((age for batch in simulation.batches for age in batch.ages), default=0) <= bound


@settings(max_examples=60, deadline=None)
@given(groups=groups, bound=st.integers(1, 4), partial=st.booleans(), name=st.sampled_from(list(POLICIES)))
def test_no_group_and_no_token_is_lost_or_twice(
    groups: list[tuple[int, tuple[int, ...]]], bound: int, partial: bool, name: str
) -> None:
    simulation = run(name, Trace("t", tuple(groups)), bound, setup=Setup(2, 3, partial))
    trained = [group for batch in simulation.batches for group in batch.groups]
    assert len(trained) == len(set(trained)) == 12 * 3
    assert simulation.admitted == len(trained) + simulation.dropped + simulation.held
    tokens = sum(batch.tokens + batch.masked for batch in simulation.batches)
    requests = [request for rollout in simulation._rollouts.values() for _, request in rollout.placed]
    finished = sum(r.done for r in requests if r.left and not r.owner.group.dropped)
    running = sum(
        e._steps - r.start for x in simulation._rollouts.values() for e, r in x.placed if not r.left and r.start >= 0
    )
    made = sum(engine.tokens for engine in simulation.engines)
    assert made == tokens + simulation.discarded_tokens + finished + running


@pytest.mark.parametrize("name", KEEPING)
def test_a_policy_that_keeps_everything_discards_and_masks_nothing(name: str) -> None:
    simulation = run(name, synthetic(long_tail=True), 2, batches=30, batch_size=16, setup=Setup())
    assert simulation.dropped == simulation.discarded_tokens == 0
    assert not any(batch.masked for batch in simulation.batches)


@pytest.mark.parametrize("name", sorted(set(POLICIES) - set(KEEPING)))
def test_a_policy_that_discards_does_so_on_the_posts_load_and_prefers_short_responses(name: str) -> None:
    report = simulate(name, 1, synthetic(), COSTS, batches=20)
    assert 0.05 < report.waste < 0.6
    if name != "mask_over_age":
        assert report.mean_length < 0.95 * simulate("in_order", 1, synthetic(), COSTS, batches=20).mean_length


@pytest.mark.parametrize("name", ["roll", "verl_drop", "trl"])
def test_roll_stops_what_it_drops_and_the_others_drop_what_is_finished(name: str) -> None:
    drawn = [sum(lengths) for _, (_, lengths) in zip(range(2000), synthetic(True).draw(3), strict=False)]
    simulation = run(name, synthetic(True), 1, batches=40, batch_size=16, setup=Setup())
    kept = set(simulation._rollouts) | {group for batch in simulation.batches for group in batch.groups}
    whole = sum(drawn[number] for number in range(simulation.admitted) if number not in kept)
    assert simulation.dropped > 20
    if name == "roll":
        assert simulation.discarded_tokens < whole
    else:
        assert simulation.discarded_tokens == whole


@pytest.mark.parametrize("name", POLICIES)
def test_the_same_seed_gives_the_same_run(name: str) -> None:
    first, again = (run(name, synthetic(), 1, batches=8, batch_size=16) for _ in range(2))
    assert first.batches == again.batches


def test_another_seed_gives_another_run() -> None:
    one, two = (simulate("reserve_occupy", 1, synthetic(), COSTS, seed=seed, batches=5) for seed in (1, 2))
    assert one.seconds != two.seconds


def test_weights_are_public_at_the_end_of_training_and_trainings_never_overlap() -> None:
    simulation = run("reserve_occupy", synthetic(), 3, batches=20, batch_size=16, setup=Setup())
    before = 0.0
    for batch in simulation.batches:
        assert batch.published - before >= batch.train_seconds + COSTS.publish - 1e-6
        before = batch.published


def test_synchronous_is_reserve_occupy_with_bound_0() -> None:
    """Publishing at the start of training, as a public simulator does, would let S = 0 overlap."""
    synchronous, zero = (run(n, synthetic(), 0, batches=20, batch_size=16) for n in ("synchronous", "reserve_occupy"))
    assert [batch.published for batch in synchronous.batches] == [batch.published for batch in zero.batches]


def test_with_partial_rollout_tokens_get_newer_versions_than_the_admission_and_without_it_not() -> None:
    """One group of one response longer than everything: it spans many versions, or waits for none."""
    trace = Trace("t", ((10, (40_000,)), *[(10, (200,))] * 30))
    spans = {}
    for partial in (True, False):
        simulation = Simulation(POLICIES["admission_gate"](2, 1), trace, COSTS, Setup(1, 4, partial), seed=0)
        simulation.run(25)
        held = [r for rollout in simulation._rollouts.values() for _, r in rollout.placed]
        engine = simulation.engines[0]
        long = [r for r in held if r.length == 40_000 and r.start >= 0]
        spans[partial] = len(long and engine._spans(long[0].start, engine._steps))
    assert spans[True] > 5
    assert spans[False] <= 1


def test_masking_hides_exactly_the_tokens_over_age() -> None:
    """Token by token: what is masked plus what is seen is what was generated, and the oldest seen is S old."""
    simulation = run("mask_over_age", synthetic(), 1, batches=30, batch_size=16, setup=Setup())
    assert sum(batch.masked for batch in simulation.batches) > 0
    assert {age for batch in simulation.batches for age in batch.ages} == {0, 1}
    gate = run("admission_gate", synthetic(), 1, batches=30, batch_size=16, setup=Setup())
    for masked, plain in zip(simulation.batches, gate.batches, strict=True):
        assert masked.tokens + masked.masked == plain.tokens
        assert masked.groups == plain.groups


@pytest.mark.parametrize("name", POLICIES)
def test_events_grow_with_trajectories_and_not_with_their_length(name: str) -> None:
    short, long = 40, 160
    events = {n: run(name, synthetic(), 1, batches=n, batch_size=16, setup=Setup()).events for n in (short, long)}
    assert events[long] / events[short] == pytest.approx(long / short, rel=0.15)
    per_trajectory = events[long] / (long * 16 * 8)
    assert per_trajectory < 2
    hundredth = Trace("t", tuple((p, tuple(max(1, n // 100) for n in ns)) for p, ns in synthetic().groups))
    few = run(name, hundredth, 1, batches=short, batch_size=16, setup=Setup()).events
    assert events[short] < 2 * few


def test_a_policy_that_starves_the_trainer_is_named() -> None:
    class Miser(QueuePolicy):
        name, strict, discards = "miser", True, False

        def quota(self) -> int:
            return 1

    with pytest.raises(Stalled, match="policy: miser with max_staleness: 1 stopped before batch 0"):
        Simulation(Miser(2, 1), synthetic(), COSTS, Setup(), seed=0).run(1)


def test_reserve_occupy_looks_ahead_where_waiting_for_the_oldest_alone_exceeds_the_bound() -> None:
    """Two batches' worth of groups of version 0 with S = 1 and young groups that are ready first."""
    ages = {}
    for name in ("verl_wait", "reserve_occupy"):
        policy = POLICIES[name](2, 2)
        held: list[Group] = []
        number = 0
        oldest = 0
        for _ in range(40):
            while policy.admit(group := Group(number, 1, policy.version)):
                held.append(group)
                number += 1
            # The youngest finish first: the worst case for a rule that does not look ahead.
            batch = None
            while batch is None:
                group = held.pop()
                group.finished = True
                policy.finish(group)
                batch = policy.take()
            oldest = max(oldest, *(policy.version - member.version for member in batch))
            policy.publish()
        ages[name] = oldest
    assert ages["reserve_occupy"] <= 2
    assert ages["verl_wait"] > 2


@pytest.mark.parametrize(("key", "setup"), [("engines", (0, 4)), ("concurrency", (2, 0))])
def test_machines_that_can_not_work_are_refused(key: str, setup: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=rf"{key}: 0 can't generate; use at least 1"):
        Setup(*setup)


def test_a_report_without_a_batch_after_the_warm_up_is_refused() -> None:
    simulation = run("in_order", synthetic(), 1, batches=3)
    with pytest.raises(ValueError, match="batches: 3 with a warm-up of 3 leaves none"):
        Report.of(simulation.batches, policy="in_order", max_staleness=1, trace="t", seed=0, setup=Setup(), warmup=3)


def test_a_report_counts_only_what_is_after_the_warm_up() -> None:
    simulation = run("roll", synthetic(), 1, batches=20, batch_size=16, setup=Setup())
    batches = simulation.batches
    report = Report.of(batches, policy="roll", max_staleness=1, trace="t", seed=3, setup=Setup(), warmup=12)
    assert report.batches == 8
    assert report.seconds == pytest.approx(batches[-1].published - batches[11].published)
    assert report.tokens == sum(batch.tokens for batch in batches[12:])
    assert report.discarded == batches[-1].discarded - batches[11].discarded > 0
    assert report.throughput == report.tokens / report.seconds
    assert report.ages.count == 8 * 128
    assert 0 < report.engine_utilisation <= 1
    assert math.isclose(report.waste, report.discarded / (report.discarded + report.tokens))


def test_twice_as_fast_machines_take_half_the_time() -> None:
    half = replace(COSTS, **{name: getattr(COSTS, name) / 2 for name in COSTS.__dataclass_fields__})
    slow, fast = (simulate("reserve_occupy", 2, synthetic(), costs, batches=10) for costs in (COSTS, half))
    assert fast.seconds == pytest.approx(slow.seconds / 2, rel=1e-3)

"""Means, paired ratios and verdicts; and that pictures can be drawn from them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from roadstead.benchmarks.simulator.comparison import Ratio, compare
from roadstead.benchmarks.simulator.costs import h20_qwen3_8b
from roadstead.benchmarks.simulator.experiments.sensitivity import variants
from roadstead.benchmarks.simulator.experiments.throughput import measure, table
from roadstead.benchmarks.simulator.plots import check_format, draw
from roadstead.benchmarks.simulator.report import Report
from roadstead.benchmarks.simulator.run import simulate
from roadstead.benchmarks.simulator.workload import synthetic
from roadstead.staleness import AgeStatistics


def report(policy: str, seed: int, tokens: int, seconds: float = 10.0) -> Report:
    return Report(
        policy=policy,
        max_staleness=1,
        trace="t",
        seed=seed,
        batches=2,
        seconds=seconds,
        tokens=tokens,
        mean_length=1.0,
        discarded=0,
        masked=0,
        trainer_utilisation=0.5,
        engine_utilisation=0.5,
        ages=AgeStatistics.of([(1, 0, True)]),
    )


def test_ratios_are_paired_by_seed_and_more_than_1_is_ours() -> None:
    """Ours is a tenth better on each seed, though the seeds differ by more than that."""
    rows = compare(
        [report("reserve_occupy", seed, 1100 * (seed + 1)) for seed in range(4)]
        + [report("in_order", seed, 1000 * (seed + 1)) for seed in range(4)]
    )
    ours, rival = rows
    assert ours.in_throughput is None
    assert rival.in_throughput is not None
    assert (rival.in_throughput.mean, rival.in_throughput.sd) == pytest.approx((1.1, 0.0))
    assert rival.in_throughput.verdict == "wins"
    assert rival.throughput.mean == 250
    assert rival.in_time is not None and rival.in_time.verdict == "ties"


@pytest.mark.parametrize(
    ("mean", "sd", "seeds", "verdict"),
    [
        (1.019, 0.02, 4, "ties"),
        (1.021, 0.02, 4, "wins"),
        (0.97, 0.02, 4, "loses"),
        (0.9995, 0.0, 20, "ties"),
        (1.5, 0.0, 1, "one seed"),
    ],
)
def test_a_verdict_is_two_standard_errors_and_more_than_one_seed(
    mean: float, sd: float, seeds: int, verdict: str
) -> None:
    assert Ratio(mean, sd, seeds).verdict == verdict


def test_without_ours_there_is_nothing_to_compare_with() -> None:
    (row,) = compare([report("in_order", 0, 5)])
    assert row.in_throughput is None and row.in_time is None
    assert row.to_json()["ours_over_this"] == {"throughput": None, "time": None}


def test_ages_of_all_seeds_are_pooled() -> None:
    old = replace(report("in_order", 1, 5), ages=AgeStatistics.of([(5, 1, True)]))
    (row,) = compare([report("in_order", 0, 5), old])
    assert row.ages.histogram == ((1, 1), (4, 1))


def test_the_throughput_experiment_prints_a_line_a_case() -> None:
    rows = measure(synthetic(), bounds=(1, 2), policies=("reserve_occupy", "roll"), seeds=2, batches=3, warmup=2)
    assert [(row.max_staleness, row.policy) for row in rows] == [
        (1, "reserve_occupy"),
        (1, "roll"),
        (2, "reserve_occupy"),
        (2, "roll"),
    ]
    assert len(table(rows).splitlines()) == 6


def test_every_variant_of_the_sensitivity_experiment_changes_the_run() -> None:
    seconds = {}
    for name, changed in variants().items():
        given = {"batches": 4, "warmup": 2, **changed}
        given = {key: min(value, 4) if key == "batches" else value for key, value in given.items()}
        (row,) = measure(synthetic(), bounds=(2,), policies=("reserve_occupy",), seeds=1, **given)
        seconds[name] = row.batch_seconds.mean
    assert len(set(seconds.values())) == len(variants())


@pytest.mark.parametrize("name", ["a.svg", "a.png"])
def test_a_plot_is_drawn(tmp_path: Path, name: str) -> None:
    rows = compare(
        simulate(policy, 1, synthetic(), h20_qwen3_8b(), seed=seed, batches=3, warmup=1)
        for policy in ("reserve_occupy", "trl")
        for seed in range(2)
    )
    draw({"one": rows, "two": rows}, tmp_path / name, "title")
    body = (tmp_path / name).read_bytes()
    assert len(body) > 5_000
    if name.endswith("svg"):
        assert b"reserve_occupy" in body and b"admission_gate" not in body


def test_a_plot_that_can_not_be_drawn_is_refused_before_the_work(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"neither .png nor .svg; change its ending"):
        check_format(tmp_path / "a.pdf")
    with pytest.raises(ValueError, match=r"there is no folder .*; make it first"):
        check_format(tmp_path / "missing" / "a.png")

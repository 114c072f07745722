"""The numbers of a report: along the steps, and over the run.

Owns: what each number means, and how steps are put together when there are too many to draw. Never touches: the
store, layout.
Invariant: a bin's number is computed from all rows and records of its steps, never from a sample: sums are sums,
means are over rows, a maximum is the maximum.
A crash leaves: nothing, it is pure.

Times of a step. Step records carry no time, rows do. `ready`: the last group of the batch was occupied. `in use`:
the first group was admitted under the next version, which is the moment when the step's weights began to serve; the
last steps of a run admit nothing and have none. A step's seconds are those between two `in use`. Whatever an attempt
began inside of has the time in it when nobody ran, and is left out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, cast

import duckdb
import numpy as np
import pandas as pd

from roadstead.dashboards.report.data import RunData

MOST_BINS = 240
"""Points along an axis: one every 3 pixels of the widest chart, and a page of 10,000 steps stays under 3 MB."""
WINDOW = 5
"""Steps averaged at each end of a run, as in `roadstead status`."""
Values = list[float | None]


@dataclass
class Numbers:
    width: int
    """Steps a bin; 1: every step is drawn."""
    bins: list[int]
    """First step of each bin, gaps included."""
    series: dict[str, Values]
    """By name, one value a bin; None where there is none."""
    ages: dict[int, list[int]]
    """Age to trained rows of that age, a bin each."""
    components: dict[str, Values]
    terminal: dict[str, list[int]]
    """Terminal state to groups that step records say ended so, a bin each."""
    bounds: Values
    """max_staleness that was in force."""
    capacity: int | None
    """(max_staleness + 1) x batch size: the most groups that can be under way."""
    groups_per_batch: int | None
    total: dict[str, Any] = field(default_factory=dict)
    ended: dict[str, int] = field(default_factory=dict)
    """Terminal state to groups, over the run and every place where ends are recorded."""
    untrained: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Why staged groups were not trained, to (groups, response tokens)."""


def numbers_of(run: RunData) -> Numbers:
    width = max(1, math.ceil(len(run.steps) / MOST_BINS))
    bins = list(range(0, len(run.steps), width))
    settings = run.config.get("staleness", {})
    bound, batch = settings.get("max_staleness"), settings.get("groups_per_batch")
    if batch is None and run.commits:
        batch = len(next(iter(run.commits.values())).groups)
    numbers = Numbers(
        width=width,
        bins=bins,
        series={},
        ages={},
        components={},
        terminal={},
        bounds=[_bound(run, step) for step in bins],
        capacity=None if bound is None or batch is None else (bound + 1) * batch,
        groups_per_batch=batch,
    )
    ends = _ended(run)
    numbers.ended = dict(Counter(ends.values()))
    numbers.untrained = _untrained(run, ends)
    numbers.total = _totals(run)
    _from_records(run, numbers)
    _from_rows(run, numbers)
    _from_evaluations(run, numbers)
    return numbers


# -- step records and commits -------------------------------------------------------------------------


def _from_records(run: RunData, numbers: Numbers) -> None:
    frame = pd.DataFrame([_record_row(run, step) for step in sorted({*run.records, *run.commits})])
    if frame.empty:
        return
    cursors = {-1: 0} | {step: record.cursor for step, record in run.records.items()}
    frame["admitted"] = [
        cursors[step] - cursors[step - 1] if step in cursors and step - 1 in cursors else None for step in frame["step"]
    ]
    grouped = frame.groupby(frame["step"] // numbers.width * numbers.width)
    kept = {"sum": ("clipped", "skipped"), "max": ("importance_max", "grad_norm_max")}
    means = [name for name in frame.columns if name not in {"step", *kept["sum"], *kept["max"]}]
    for name in means:
        numbers.series[name] = _at(numbers.bins, pd.to_numeric(grouped[name].mean()))
    for name in kept["sum"]:
        numbers.series[name] = _at(numbers.bins, grouped[name].sum(min_count=1))
    for name in kept["max"]:
        numbers.series[name] = _at(numbers.bins, grouped[name].max())
    states = sorted({state for record in run.records.values() for state in record.terminal.values()})
    for state in states:
        counts: Counter[int] = Counter()
        for step, record in run.records.items():
            counts[step // numbers.width * numbers.width] += sum(s == state for s in record.terminal.values())
        numbers.terminal[state] = [counts[start] for start in numbers.bins]


def _record_row(run: RunData, step: int) -> dict[str, Any]:
    record, commit = run.records.get(step), run.commits.get(step)
    known = record or commit
    assert known is not None, "asked for a step of which there is one or the other"
    row: dict[str, Any] = {"step": step, "rows": known.rows, "tokens": known.response_tokens}
    metrics = record.metrics if record else None
    for name in ("loss", "grad_norm", "kl_to_behavior", "importance_mean", "importance_max", "capped_share"):
        row[name] = _float(getattr(metrics, name)) if metrics else np.nan
    row["grad_norm_max"] = row["grad_norm"]
    row["learning_rate"] = metrics.learning_rate if metrics else np.nan
    row["clipped"] = float(metrics.grad_clipped) if metrics else np.nan
    row["skipped"] = float(metrics.not_finite) if metrics else np.nan
    return row | _slots(record.ledger if record else {})


def _slots(ledger: dict[str, Any]) -> dict[str, float]:
    """Slots by state when the batch was taken; NaN without a snapshot."""
    buffers = ledger.get("buffers")
    if not buffers:
        return dict.fromkeys(("occupied", "reserved", "empty", "ready", "stuck"), np.nan)
    each = [(len(occupied), len(reserved)) for occupied, reserved in buffers]
    slots, batch = ledger["slots_per_buffer"], ledger["batch_size"]
    occupied, reserved = sum(o for o, _ in each), sum(r for _, r in each)
    return {
        "occupied": occupied,
        "reserved": reserved,
        "empty": len(buffers) * slots - occupied - reserved,
        "ready": sum(o >= batch for o, _ in each),
        "stuck": sum(o < batch and o + r == slots for o, r in each),
    }


# -- rows ---------------------------------------------------------------------------------------------


def _from_rows(run: RunData, numbers: Numbers) -> None:
    if not run.rows.num_rows:
        return
    connection = duckdb.connect()
    connection.register("log", run.rows)
    connection.execute(f"create view binned as select *, step // {numbers.width} * {numbers.width} as bin from log")
    frame = connection.sql(
        """select bin, avg(reward) as reward, stddev_pop(reward) as reward_std,
                  min(reward) as reward_min, max(reward) as reward_max,
                  avg((reward is not null and advantage <> 0)::int) as trainable,
                  max(staleness) filter (from_live_policy) as age_max,
                  avg(staleness) filter (from_live_policy) as age_mean,
                  quantile_disc(staleness, 0.99) filter (from_live_policy) as age_p99
           from binned group by bin order by bin"""
    ).df()
    frame = frame.set_index("bin")
    for name in frame.columns:
        numbers.series[name] = _at(numbers.bins, frame[name])
    ages = connection.sql("select bin, staleness, count(*) from binned where from_live_policy group by all").fetchall()
    found = {(start, age): count for start, age, count in ages}
    for age in sorted({age for _, age, _ in ages}):
        numbers.ages[age] = [found.get((start, age), 0) for start in numbers.bins]
    parts = connection.sql(
        """select bin, part.key as name, avg(part.value) as mean from
           (select bin, unnest(map_entries(reward_components)) as part from binned) group by all"""
    ).df()
    for component, values in parts.groupby("name"):
        numbers.components[str(component)] = _at(numbers.bins, values.set_index("bin")["mean"])
    last = connection.sql(
        "select max(staleness), quantile_disc(staleness, 0.99), avg(staleness) from log where from_live_policy"
    ).fetchone()
    numbers.total |= dict(zip(("age_max", "age_p99", "age_mean"), last or (None,) * 3, strict=True))
    _times(run, connection, numbers)


def _from_evaluations(run: RunData, numbers: Numbers) -> None:
    """Version v beside step v, which trains it; the run's last one beside its last step. A later one in a bin wins."""
    values: Values = [None] * len(numbers.bins)
    for summary in run.evaluations if numbers.bins else ():
        if summary.complete:
            values[min(summary.version // numbers.width, len(values) - 1)] = summary.mean_reward
    numbers.series["evaluation"] = values


def _times(run: RunData, connection: duckdb.DuckDBPyConnection, numbers: Numbers) -> None:
    resumed = _resumed(run)
    ready = dict(connection.sql("select step, max(epoch_us(occupied_at)) from log group by step").fetchall())
    first = dict(connection.sql("select v_traj, min(epoch_us(reserved_at)) from log group by v_traj").fetchall())
    in_use = {-1: min(first.values())} | {step: first[step + 1] for step in run.records if step + 1 in first}

    def between(start: int | None, end: int | None) -> float:
        """Seconds; NaN when an end is not known, or an attempt began in between."""
        if start is None or end is None or end < start or any(start < moment <= end for moment in resumed):
            return math.nan
        return (end - start) / 1e6

    frame = pd.DataFrame(
        [
            (
                *(step, record.response_tokens, between(in_use.get(step - 1), in_use.get(step))),
                between(ready.get(step), in_use.get(step)),
            )
            for step, record in run.records.items()
        ],
        columns=["step", "tokens", "seconds", "turnaround_s"],
    )
    timed = frame[frame["seconds"] > 0]
    grouped = timed.groupby(timed["step"] // numbers.width * numbers.width)
    numbers.series["seconds"] = _at(numbers.bins, grouped["seconds"].mean())
    numbers.series["tokens_per_s"] = _at(numbers.bins, grouped["tokens"].sum() / grouped["seconds"].sum())
    turns = frame.groupby(frame["step"] // numbers.width * numbers.width)["turnaround_s"].mean()
    numbers.series["turnaround_s"] = _at(numbers.bins, turns)
    whole = " and ".join(["true", *(f"not (epoch_us(reserved_at) < {at} and ready >= {at})" for at in resumed)])
    life = (
        connection.sql(
            f"""select bin, avg(epoch_us(started_at) - epoch_us(reserved_at)) / 1e6 as queued_s,
                   avg(epoch_us(finished_at) - epoch_us(started_at)) / 1e6 as generating_s,
                   avg(epoch_us(occupied_at) - epoch_us(finished_at)) / 1e6 as placing_s,
                   avg(ready - epoch_us(occupied_at)) / 1e6 as waiting_s
            from binned join (select step, max(epoch_us(occupied_at)) as ready from log group by step) using (step)
            where {whole} group by bin"""
        )
        .df()
        .set_index("bin")
    )
    for name in life.columns:
        numbers.series[name] = _at(numbers.bins, life[name])
    numbers.total |= {
        "timed_steps": len(timed),
        "seconds_per_step": _finite(timed["seconds"].median()),
        "tokens_per_s": _finite(timed["tokens"].sum() / timed["seconds"].sum()) if len(timed) else None,
        "turnaround_s": _finite(frame["turnaround_s"].median()),
    }


def _resumed(run: RunData) -> list[int]:
    """When later attempts began, UTC microseconds."""
    moments = []
    for attempt in run.attempts[1:]:
        try:
            began = datetime.fromisoformat(attempt.started_at)
        except ValueError:
            continue
        moments.append(round((began if began.tzinfo else began.replace(tzinfo=UTC)).timestamp() * 1e6))
    return moments


# -- the run ------------------------------------------------------------------------------------------


def _totals(run: RunData) -> dict[str, Any]:
    records = [run.records[step] for step in sorted(run.records)]
    rewards = [r.mean_reward for r in records if r.mean_reward is not None]
    commits = run.commits.values()
    return {
        "recorded": len(records),
        "committed": len(run.commits),
        "missing": [step for step in run.steps if step not in run.records and step not in run.commits],
        "rows": sum(c.rows for c in commits),
        "tokens": sum(c.response_tokens for c in commits),
        "reward_first": _mean(rewards[:WINDOW]),
        "reward_last": _mean(rewards[-WINDOW:]),
        "admitted": max((r.cursor for r in records), default=0),
        "skipped": sum(r.metrics.not_finite for r in records),
    }


def _ended(run: RunData) -> dict[str, str]:
    """Group to terminal state, from every place where one is recorded."""
    ends: dict[str, str] = {}
    for attempt in run.attempts:
        ends |= attempt.terminal
    for end in run.ends.values():
        ends |= end.terminal
    for step, commit in run.commits.items():
        if step not in run.records:
            ends |= commit.cut.terminal if commit.cut else {group.group_id: "trained" for group in commit.groups}
    for record in run.records.values():
        ends |= record.terminal
    return ends


def _untrained(run: RunData, ends: dict[str, str]) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    for group in run.untrained:
        state = ends.get(group.group_id, "waiting")
        why = "generated twice" if state == "trained" else state
        count, tokens = found.get(why, (0, 0))
        found[why] = (count + 1, tokens + (group.tokens or 0))
    return found


def _bound(run: RunData, step: int) -> float | None:
    """max_staleness of the attempt that trained the step."""
    record = run.records.get(step) or run.commits.get(step)
    config = run.run.config
    for attempt in run.attempts:
        if attempt.config and (record is None or attempt.attempt <= record.attempt):
            config = attempt.config
    bound = config.get("staleness", {}).get("max_staleness")
    return None if bound is None else float(bound)


def median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.median(known)) if known else None


def _at(bins: list[int], values: pd.Series[Any]) -> Values:
    found: Callable[[int], Any] = cast("dict[int, Any]", values.to_dict()).get
    return [_finite(found(start)) for start in bins]


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _float(value: Any) -> float:
    return math.nan if value is None else float(value)


def _finite(value: Any) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)

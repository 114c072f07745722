# ruff: noqa: RUF001 - minus, dash and times signs are what the page shows
"""Which charts a report has.

Owns: the choice of charts, their titles and units. Never touches: scales, layout, the store.
Invariant: what a run has no numbers for has no chart; a section without charts says so.
A crash leaves: nothing, it is pure.
"""

from __future__ import annotations

from collections.abc import Iterable

from roadstead.dashboards.report.charts import Axis, Chart, Layer, Line, Reference, line_chart, stacked_chart
from roadstead.dashboards.report.data import RunData
from roadstead.dashboards.report.numbers import Numbers

_MOST_COMPONENTS = 5
"""Colours that can be told apart."""
_STATES = {"filtered": "c3", "discarded": "c4", "expired": "c5", "dead-lettered": "bad"}


def axis_of(run: RunData, numbers: Numbers) -> Axis:
    marks = [(attempt.from_version, f"#{attempt.attempt}") for attempt in run.attempts[1:]]
    return Axis(numbers.bins, numbers.width, marks)


def figures(run: RunData, numbers: Numbers) -> dict[str, list[Chart]]:
    """By section of the page."""
    if not numbers.bins:
        return {}
    axis = axis_of(run, numbers)
    made: dict[str, Iterable[Chart | None]] = {
        "reward": _reward(axis, numbers),
        "ages": _ages(axis, numbers),
        "throughput": _throughput(axis, numbers),
        "waste": _waste(axis, numbers),
        "ledger": _ledger(axis, numbers),
        "trainer": _trainer(axis, numbers),
    }
    return {section: [chart for chart in charts if chart] for section, charts in made.items()}


def _reward(axis: Axis, numbers: Numbers) -> Iterable[Chart | None]:
    s = numbers.series
    reward = s.get("reward", [])
    yield line_chart(
        *("reward", "Reward", "mean of the trained rows, band of one standard deviation", axis),
        [
            Line(
                *("reward", reward, "c1", s.get("reward_std")),
                within=(s.get("reward_min", []), s.get("reward_max", [])),
            )
        ],
    )
    yield line_chart(
        *("evaluation", "Evaluation", "mean reward of a version on the evaluation prompts, complete ones", axis),
        [Line("evaluation", s.get("evaluation", []), "c2")],
    )
    shown = list(numbers.components.items())[:_MOST_COMPONENTS]
    more = len(numbers.components) - len(shown)
    note = "mean of each component" + (f"; {more} more in the rows" if more else "")
    lines = [Line(name, values, f"c{i + 1}") for i, (name, values) in enumerate(shown)]
    if [line.values for line in lines] != [reward]:  # one component that is the reward says nothing new
        yield line_chart("components", "Reward components", note, axis, lines)
    yield line_chart(
        *("trainable", "Trainable share", "rows with a reward and an advantage other than 0: the rest teaches", axis),
        [Line("trainable", s.get("trainable", []), "c2")],
        top=1.0,
    )


def _ages(axis: Axis, numbers: Numbers) -> Iterable[Chart | None]:
    s = numbers.series
    bound = Reference("bound S", numbers.bounds)
    highest = max((b for b in numbers.bounds if b is not None), default=0.0)
    over = [age for age in numbers.ages if age > highest]
    allowed = f"older than S = {highest:.0f} is red" if over else f"none is older than S = {highest:.0f}"
    layers = [
        Layer(
            f"age {age}",
            list(counts),
            "age" if age <= highest else "bad",
            round(100 * age / highest) if highest and age <= highest else 0,
        )
        for age, counts in numbers.ages.items()
    ]
    yield stacked_chart(
        *(
            "ages",
            "Ages of the trained rows",
            f"share of rows; age = step − oldest version of a loss token; {allowed}",
            axis,
        ),
        layers,
        share=True,
    )
    yield line_chart(
        *("oldest", "Oldest rows beside the bound", "in policy versions", axis),
        [
            Line("oldest", s.get("age_max", []), "c4 wide"),
            Line("99th percentile", s.get("age_p99", []), "c3"),
            Line("mean", s.get("age_mean", []), "c1"),
        ],
        references=[bound],
        top=highest + 1,
    )


def _throughput(axis: Axis, numbers: Numbers) -> Iterable[Chart | None]:
    s = numbers.series
    yield line_chart(
        *("tokens-per-s", "Trained tokens", "response tokens a second, by step", axis),
        [Line("tokens/s", s.get("tokens_per_s", []), "c1")],
    )
    yield line_chart(
        *("seconds", "Time of a step", "seconds; the second overlaps with the steps before it", axis),
        [
            Line("from one version in use to the next", s.get("seconds", []), "c1"),
            Line("from batch ready to weights in use", s.get("turnaround_s", []), "c3"),
        ],
    )
    yield stacked_chart(
        *("life", "Life of a trained group", "seconds from its reservation until its batch was ready, mean", axis),
        [
            Layer("queued", s.get("queued_s", []), "c3"),
            Layer("generating", s.get("generating_s", []), "c1"),
            Layer("being placed", s.get("placing_s", []), "c4"),
            Layer("waiting for its batch", s.get("waiting_s", []), "c2"),
        ],
    )
    yield line_chart(
        *(
            "tokens",
            "Tokens in a batch",
            "response tokens" + (", mean of a point's steps" if axis.width > 1 else ""),
            axis,
        ),
        [Line("tokens", s.get("tokens", []), "c2")],
    )


def _waste(axis: Axis, numbers: Numbers) -> Iterable[Chart | None]:
    layers = [Layer(state, list(numbers.terminal.get(state, [])), colour) for state, colour in _STATES.items()]
    yield stacked_chart(
        *("waste", "Groups that ended untrained", "by step record" + _a_bin(axis), axis),
        [layer for layer in layers if layer.values],
    )


def _ledger(axis: Axis, numbers: Numbers) -> Iterable[Chart | None]:
    s = numbers.series
    layers = [
        Layer("occupied", s.get("occupied", []), "occupied"),
        Layer("reserved", s.get("reserved", []), "reserved"),
        Layer("empty", s.get("empty", []), "empty"),
    ]
    capacity = [None if numbers.capacity is None else float(numbers.capacity)] * len(axis.bins)
    batch = [None if numbers.groups_per_batch is None else float(numbers.groups_per_batch)] * len(axis.bins)
    yield stacked_chart(
        *("slots", "Slots when the batch was taken", "in the buffers of the window, without the batch itself", axis),
        layers,
    )
    yield line_chart(
        *("admitted", "Admissions", "groups admitted between two batches; the first fills the window", axis),
        [Line("admitted", s.get("admitted", []), "c1")],
        references=[Reference("(S + 1) × B", capacity), Reference("B", batch, "reference second")],
    )


def _trainer(axis: Axis, numbers: Numbers) -> Iterable[Chart | None]:
    s = numbers.series
    yield line_chart(
        *("loss", "Loss", "of the step, over loss tokens", axis), [Line("loss", s.get("loss", []), "c1")], zero=False
    )
    norms = [Line("mean" if axis.width > 1 else "grad norm", s.get("grad_norm", []), "c1")]
    if axis.width > 1:
        norms.append(Line("largest", s.get("grad_norm_max", []), "c3"))
    yield line_chart("grad-norm", "Gradient norm", "before clipping", axis, norms)
    yield line_chart(
        *("kl", "KL(behaviour ‖ trainer)", "nats a token, k1 estimate", axis),
        [Line("KL", s.get("kl_to_behavior", []), "c2")],
    )
    yield line_chart(
        *("importance", "Importance weights", "exp(trainer − behaviour logprob) of a token", axis),
        [Line("largest", s.get("importance_max", []), "c3"), Line("mean", s.get("importance_mean", []), "c1")],
    )
    yield line_chart(
        *("capped", "Capped share", "loss tokens whose weight was truncated", axis),
        [Line("capped", s.get("capped_share", []), "c4")],
    )
    yield stacked_chart(
        *("clipped", "Clipped and skipped updates", "steps" + _a_bin(axis), axis),
        [Layer("clipped", s.get("clipped", []), "c3"), Layer("skipped", s.get("skipped", []), "bad")],
    )


def _a_bin(axis: Axis) -> str:
    return "" if axis.width == 1 else f", {axis.width} steps a point"

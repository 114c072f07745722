"""The comparison as a picture, and the pictures in docs/simulator:
`python -m roadstead.benchmarks.simulator.plots docs/simulator`

Owns: how rows are drawn. Never touches: how they came about.
Invariant: spread over seeds is drawn wherever a mean is; a policy has the same colour and mark in every picture.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roadstead.benchmarks.simulator.comparison import OURS, Row
from roadstead.benchmarks.simulator.policies import POLICIES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = (".png", ".svg")

# Okabe and Ito's colours, which the colour-blind can tell apart, and marks on top; ours is black.
_COLOURS = (
    "#000000",
    "#E69F00",
    "#56B4E9",
    "#009E73",
    "#CC79A7",
    "#D55E00",
    "#0072B2",
    "#B8860B",
    "#7F7F7F",
    "#BBBBBB",
)
_MARKS = ("o", "s", "D", "v", "^", "X", "P", "<", ">", "*")
_STYLE = {name: (_COLOURS[i % 10], _MARKS[i % 10]) for i, name in enumerate(POLICIES)}
_SPREAD = 0.6
"""Width of the band around each S in which the policies stand side by side."""


def check_format(path: Path) -> None:
    """Raises ValueError naming the file and the remedy, before an hour is spent on what can't be drawn."""
    if path.suffix not in FORMATS:
        raise ValueError(f"plot: {path} is neither .png nor .svg; change its ending")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"plot: there is no folder {path.absolute().parent}; make it first")


def draw(sections: Mapping[str, Sequence[Row]], path: Path, title: str) -> None:
    """One row of panels for each section (title -> rows): throughput, trainer idle, waste, ages."""
    # Seconds of import, for the few who draw.
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    # Text stays text, and the same picture the same bytes.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "roadstead", "font.size": 9}):
        figure = Figure(figsize=(15, 3.6 * len(sections) + 1.1), layout="constrained")
        figure.suptitle(title)
        axes = figure.subplots(len(sections), 4, squeeze=False)
        policies = list(dict.fromkeys(row.policy for rows in sections.values() for row in rows))
        for panels, (name, rows) in zip(axes, sections.items(), strict=True):
            _panel(panels[0], rows, policies, f"{name}: effective tokens/s", lambda row: row.throughput)
            _panel(panels[1], rows, policies, "trainer idle, %", lambda row: row.trainer_utilisation, idle=True)
            _panel(panels[2], rows, policies, "discarded or masked tokens, %", lambda row: row.waste, percent=True)
            _ages(panels[3], rows, policies)
        handles = [
            Line2D([], [], color=_STYLE[name][0], marker=_STYLE[name][1], linestyle="", label=name) for name in policies
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=min(5, len(policies)), frameon=False)
        figure.savefig(path, dpi=110, metadata={"Date": None} if path.suffix == ".svg" else None)


def _places(rows: Sequence[Row], policies: list[str]) -> list[tuple[Row, float]]:
    """x of each row: its S, moved by its policy."""
    bounds = sorted({row.max_staleness for row in rows})
    step = _SPREAD / max(1, len(policies) - 1)
    return [(row, bounds.index(row.max_staleness) + policies.index(row.policy) * step - _SPREAD / 2) for row in rows]


def _dress(axis: Axes, rows: Sequence[Row], title: str) -> None:
    bounds = sorted({row.max_staleness for row in rows})
    axis.set_title(title, fontsize=10)
    axis.set_xticks(range(len(bounds)), [f"S = {bound}" for bound in bounds])
    axis.set_xlim(-0.5, len(bounds) - 0.5)
    axis.grid(axis="y", alpha=0.3)
    for edge in ("top", "right"):
        axis.spines[edge].set_visible(False)


def _panel(
    axis: Axes,
    rows: Sequence[Row],
    policies: list[str],
    title: str,
    value: Any,
    *,
    idle: bool = False,
    percent: bool = False,
) -> None:
    scale = 100 if idle or percent else 1
    for row, x in _places(rows, policies):
        spread = value(row)
        mean = 100 * (1 - spread.mean) if idle else scale * spread.mean
        colour, mark = _STYLE[row.policy]
        size = 8 if row.policy == OURS else 6
        axis.errorbar(x, mean, yerr=scale * spread.sd, color=colour, marker=mark, markersize=size, capsize=2, lw=1)
    # A little below 0, so that marks at 0 are whole.
    axis.set_ylim(bottom=-0.03 * axis.get_ylim()[1])
    _dress(axis, rows, title)


def _ages(axis: Axes, rows: Sequence[Row], policies: list[str]) -> None:
    """Line from the mean to the maximum, the mark at the mean, a bar at p99; the bound as a dashed line."""
    for row, x in _places(rows, policies):
        if row.ages.mean is None or row.ages.maximum is None or row.ages.p99 is None:
            continue
        colour, mark = _STYLE[row.policy]
        axis.plot([x, x], [row.ages.mean, row.ages.maximum], color=colour, lw=1.5)
        axis.plot(x, row.ages.mean, color=colour, marker=mark, markersize=8 if row.policy == OURS else 6)
        axis.plot(x, row.ages.p99, color=colour, marker="_", markersize=9, markeredgewidth=2)
    for index, bound in enumerate(sorted({row.max_staleness for row in rows})):
        axis.plot([index - 0.45, index + 0.45], [bound, bound], color="black", linestyle="--", lw=1)
    top = max((row.ages.maximum or 0 for row in rows), default=0)
    axis.set_yticks(range(top + 1))
    axis.set_ylim(-0.2, top + 0.2)
    _dress(axis, rows, "age: mean, p99 (bar), max; S dashed")


def main() -> None:
    from roadstead.benchmarks.simulator.experiments.throughput import BATCHES, SEEDS, measure
    from roadstead.benchmarks.simulator.workload import synthetic

    if len(sys.argv) != 2:
        sys.exit("usage: python -m roadstead.benchmarks.simulator.plots FOLDER")
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    sections = {trace.name: measure(trace) for trace in (synthetic(), synthetic(long_tail=True))}
    title = f"Two engines of 40, batches of 16 groups of 8; {SEEDS} seeds x {BATCHES} batches, bars are ± 1 sd"
    draw(sections, folder / "throughput.svg", title)


if __name__ == "__main__":
    main()

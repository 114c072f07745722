# ruff: noqa: RUF001 - minus, dash and times signs are what the page shows
"""Charts as inline SVG with labels in HTML.

Owns: scales, ticks, shapes, the words for those who can't see them. Never touches: the run, colours (a class a
series, the style sheet decides).
Invariant: the SVG holds numbers and fixed class names only; every text is a field that the template escapes. A value
that is not there is a gap, never a zero.
A crash leaves: nothing, it is pure.

The plot's SVG is stretched to the width that there is (preserveAspectRatio none, strokes that do not scale), the
labels around it are HTML: text keeps its size from 380 to 1600 pixels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from markupsafe import Markup

Values = Sequence[float | None]
_WIDTH, _HEIGHT = 1000.0, 400.0
_MARKED = 60
"""Up to so many points each gets a dot; more would be a second line on top of the line."""

_LAST_TICK = 97.5
"""Percent: half a label of five digits is as wide as the card's padding."""
_FLAG_ROOM = 6.0
"""Percent of the width that the label of an attempt takes in a narrow plot."""


@dataclass(frozen=True)
class Line:
    label: str
    values: Values
    colour: str
    """Class of the style sheet."""
    spread: Values | None = None
    """Half height of a band around the line."""
    within: tuple[Values, Values] | None = None
    """Lowest and highest value that was seen: the band ends there."""


@dataclass(frozen=True)
class Layer:
    """One part of each stacked bar."""

    label: str
    values: Values
    colour: str
    mix: int | None = None
    """Percent on the way from the first to the last colour of an ordered scale."""


@dataclass(frozen=True)
class Reference:
    """A level to read the rest against, by bin: a bound may change with an attempt."""

    label: str
    values: Values
    colour: str = "reference"


@dataclass(frozen=True)
class Axis:
    """The steps along the bottom."""

    bins: Sequence[int]
    width: int
    marks: Sequence[tuple[int, str]] = ()
    """(step, label): where an attempt began."""

    def name(self, i: int) -> str:
        first = self.bins[i]
        return str(first) if self.width == 1 else f"{first}–{first + self.width - 1}"

    def position(self, step: float) -> float:
        """Left edge of a step, 0 to 1."""
        return step / (self.width * len(self.bins))

    def ticks(self) -> list[tuple[float, str]]:
        """(percent from the left, label), each under the middle of its bin; none that would stick out at the right."""
        steps = self.width * len(self.bins)
        gap = max(1, int(_nice(steps / 6)))
        middles = [
            (step, 100 * self.position(step // self.width * self.width + self.width / 2))
            for step in range(0, steps, gap)
        ]
        return [(at, f"{step:,}") for step, at in middles if at <= _LAST_TICK or step == 0]


@dataclass(frozen=True)
class Chart:
    id: str
    title: str
    note: str
    legend: list[tuple[str, str, int | None]]
    """(class, label, mix)."""
    svg: Markup
    y_ticks: list[tuple[float, str]]
    """(percent from the bottom, label)."""
    x_ticks: list[tuple[float, str]]
    flags: list[tuple[float, str]]
    summary: str
    """The chart in words."""
    columns: list[str]
    table: list[list[str]]
    data: dict[str, list[float | None]] = field(default_factory=dict)
    """By label, for the page's own JSON: what the pointer reads."""


def line_chart(
    id: str,
    title: str,
    note: str,
    axis: Axis,
    lines: Sequence[Line],
    *,
    references: Sequence[Reference] = (),
    top: float | None = None,
    zero: bool = True,
) -> Chart | None:
    """None when no line has a value. top: the axis reaches at least so far. zero: it includes 0."""
    lines = [line for line in lines if _known(line.values)]
    if not lines:
        return None
    edges = [v for line in lines for v in _known(line.values)]
    edges += [edge for line in lines if line.spread for edge in _edges(line)]
    edges += [v for reference in references for v in _known(reference.values)]
    edges += [0.0] * zero + ([top] if top is not None else [])
    scale = _Scale.over(min(edges), max(edges))
    shapes = [scale.grid()]
    shapes += [_band(axis, scale, line) for line in lines if line.spread]
    shapes += [_step_line(axis, scale, reference) for reference in references]
    shapes += [_line(axis, scale, line) for line in lines]
    return _chart(id, title, note, axis, scale, shapes, lines, references)


def stacked_chart(
    id: str,
    title: str,
    note: str,
    axis: Axis,
    layers: Sequence[Layer],
    *,
    references: Sequence[Reference] = (),
    share: bool = False,
) -> Chart | None:
    """Bars of parts, first at the bottom. share: each bar is 100 %. None when no part has a value."""
    layers = [layer for layer in layers if any(_known(layer.values))]
    if not layers:
        return None
    sums = [sum(layer.values[i] or 0 for layer in layers) for i in range(len(axis.bins))]
    edges = [1.0] if share else [*sums, *(v for r in references for v in _known(r.values))]
    scale = _Scale.over(0.0, max(edges), percent=share)
    bottoms = [0.0] * len(axis.bins)
    shapes = [scale.grid()]
    # A hair of background between bars while they are wide enough to be counted.
    fill = 0.84 if len(axis.bins) <= 80 else 1.0
    for layer in layers:
        parts = []
        for i, value in enumerate(layer.values):
            height = (value or 0.0) / ((sums[i] or 1.0) if share else 1.0)
            if height > 0:
                parts.append(_bar(axis, scale, i, bottoms[i], height, fill))
                bottoms[i] += height
        mix = "" if layer.mix is None else f' style="--mix:{layer.mix}%"'
        shapes.append(f'<path class="bar {layer.colour}"{mix} d="{"".join(parts)}"/>')
    shapes += [_step_line(axis, scale, reference) for reference in references]
    return _chart(id, title, note, axis, scale, shapes, layers, references)


def number(value: float | None) -> str:
    """A number as people read it: 4 digits that mean something, thousands apart."""
    if value is None or not math.isfinite(value):
        return "–"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}".replace("-", "−")
    if abs(value) >= 1000:
        return f"{value:,.0f}".replace("-", "−")
    if abs(value) < 1e-3:
        return f"{value:.3e}".replace("-", "−")
    return f"{value:.4g}".replace("-", "−")


def short(value: float | None) -> str:
    """`number` for a sentence: 3 digits."""
    if value is None or not math.isfinite(value) or value == int(value) or abs(value) >= 1000:
        return number(value)
    return number(float(f"{value:.3g}"))


# -- shapes -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Scale:
    low: float
    high: float
    gap: float
    percent: bool = False

    @classmethod
    def over(cls, low: float, high: float, percent: bool = False) -> _Scale:
        if high <= low:
            low, high = (low - abs(low) / 2, high + abs(high) / 2) if low else (0.0, 1.0)
        gap = _nice((high - low) / 4)
        return cls(math.floor(low / gap + 1e-9) * gap, math.ceil(high / gap - 1e-9) * gap, gap, percent)

    def y(self, value: float) -> float:
        return _HEIGHT * (1 - (value - self.low) / (self.high - self.low))

    def levels(self) -> list[float]:
        count = round((self.high - self.low) / self.gap)
        return [self.low + i * self.gap for i in range(count + 1)]

    def grid(self) -> str:
        path = "".join(f"M0 {_n(self.y(level))}H{_WIDTH:.0f}" for level in self.levels())
        base = f'<path class="base" d="M0 {_n(self.y(0.0))}H{_WIDTH:.0f}"/>' if self.low <= 0 <= self.high else ""
        return f'<path class="grid" d="{path}"/>{base}'

    def ticks(self) -> list[tuple[float, str]]:
        return [(100 - self.y(level) / _HEIGHT * 100, self._label(level)) for level in self.levels()]

    def _label(self, level: float) -> str:
        level = 0.0 if abs(level) < self.gap / 1e6 else level
        if self.percent:
            return f"{level:.0%}"
        for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
            if max(abs(self.low), abs(self.high)) >= size:
                size = 1e3 if unit == "k" else size
                return f"{level / size:.10g}{unit}".replace("-", "−") if level else "0"
        if max(abs(self.low), abs(self.high)) < 1e-3:
            return f"{level:.0e}".replace("-", "−") if level else "0"
        digits = max(0, -math.floor(math.log10(self.gap) + 1e-9))
        return f"{level:,.{digits}f}".replace("-", "−")


def _line(axis: Axis, scale: _Scale, line: Line) -> str:
    path, dots = [], []
    dotted = len(axis.bins) <= _MARKED
    values = line.values
    for i, value in enumerate(values):
        if value is None:
            continue
        x, y = _n(_middle(axis, i)), _n(scale.y(value))
        before = values[i - 1] if i else None
        after = values[i + 1] if i + 1 < len(values) else None
        path.append(f"{'M' if before is None else 'L'}{x} {y}")
        if dotted or (before is None and after is None):
            dots.append(f"M{x} {y}h0")
    return (
        f'<path class="line {line.colour}" d="{"".join(path)}"/><path class="dots {line.colour}" d="{"".join(dots)}"/>'
    )


def _band(axis: Axis, scale: _Scale, line: Line) -> str:
    """One closed shape a stretch without gaps; a lone point gets a stroke's width."""
    shapes: list[str] = []
    stretch: list[tuple[float, float, float]] = []
    for i in range(len(axis.bins) + 1):
        ends = _ends(line, i) if i < len(axis.bins) else None
        if ends is not None:
            stretch.append((_middle(axis, i), scale.y(ends[1]), scale.y(ends[0])))
        elif stretch:
            if len(stretch) == 1:
                x, high, low = stretch[0]
                stretch = [(x - 4, high, low), (x + 4, high, low)]
            over = "L".join(f"{_n(x)} {_n(high)}" for x, high, _ in stretch)
            back = "L".join(f"{_n(x)} {_n(low)}" for x, _, low in reversed(stretch))
            shapes.append(f"M{over}L{back}Z")
            stretch = []
    return f'<path class="band {line.colour}" d="{"".join(shapes)}"/>'


def _step_line(axis: Axis, scale: _Scale, reference: Reference) -> str:
    parts, last, values = [], None, reference.values
    for i, value in enumerate(values):
        if value is None:
            last = None
            continue
        left, right = _WIDTH * i / len(axis.bins), _WIDTH * (i + 1) / len(axis.bins)
        parts.append("" if value == last else f"{'M' if last is None else 'L'}{_n(left)} {_n(scale.y(value))}")
        if i + 1 == len(values) or values[i + 1] != value:
            parts.append(f"H{_n(right)}")
        last = value
    return f'<path class="{reference.colour}" d="{"".join(parts)}"/>'


def _bar(axis: Axis, scale: _Scale, i: int, bottom: float, height: float, fill: float) -> str:
    wide = _WIDTH / len(axis.bins) * fill
    low, high = scale.y(bottom), scale.y(bottom + height)
    return f"M{_n(_middle(axis, i) - wide / 2)} {_n(low)}h{_n(wide)}V{_n(high)}h-{_n(wide)}Z"


def _middle(axis: Axis, i: int) -> float:
    return _WIDTH * (i + 0.5) / len(axis.bins)


def _chart(
    id: str,
    title: str,
    note: str,
    axis: Axis,
    scale: _Scale,
    shapes: Sequence[str],
    series: Sequence[Line] | Sequence[Layer],
    references: Sequence[Reference],
) -> Chart:
    named: list[tuple[str, Values]] = [(s.label, s.values) for s in series]
    named += [(f"{s.label}, deviation", s.spread) for s in series if isinstance(s, Line) and s.spread]
    named += [(r.label, r.values) for r in references]
    seen = [i for i in range(len(axis.bins)) if any(values[i] is not None for _, values in named)]
    marks = [m for m in axis.marks if 0 < axis.position(m[0]) < 1]
    lines = "".join(f"M{_n(_WIDTH * axis.position(step))} 0V{_HEIGHT:.0f}" for step, _ in marks)
    body = "".join(shapes) + (f'<path class="mark" d="{lines}"/>' if lines else "")
    svg = f'<svg viewBox="0 0 {_WIDTH:.0f} {_HEIGHT:.0f}" preserveAspectRatio="none" aria-hidden="true">{body}</svg>'
    legend = [(s.colour, s.label, s.mix if isinstance(s, Layer) else None) for s in series]
    legend += [(reference.colour, reference.label, None) for reference in references]
    words = [_words(axis, label, values) for label, values in named[: len(series)]]
    return Chart(
        id=id,
        title=title,
        note=note,
        legend=legend,
        svg=Markup(svg),
        y_ticks=scale.ticks(),
        x_ticks=axis.ticks(),
        flags=_apart([(100 * axis.position(step), label) for step, label in marks]),
        summary=f"{title}, {note}. " + " ".join(words),
        columns=["step" if axis.width == 1 else "steps", *(label for label, _ in named)],
        table=[[axis.name(i), *(number(values[i]) for _, values in named)] for i in seen],
        data={label: [None if v is None else float(f"{v:.6g}") for v in values] for label, values in named},
    )


def _apart(flags: list[tuple[float, str]]) -> list[tuple[float, str]]:
    """Those labels that have room before the next."""
    ends = [*[at for at, _ in flags], 100.0][1:]
    return [flag for flag, end in zip(flags, ends, strict=True) if end - flag[0] >= _FLAG_ROOM]


def _words(axis: Axis, label: str, values: Values) -> str:
    known = [(v, i) for i, v in enumerate(values) if v is not None]
    if not known:
        return f"{label}: no values."
    low, high = min(known), max(known)
    first, last = known[0], known[-1]
    return (
        f"{label}: {number(first[0])} at step {axis.name(first[1])}, {number(last[0])} at step {axis.name(last[1])}; "
        f"lowest {number(low[0])} at {axis.name(low[1])}, highest {number(high[0])} at {axis.name(high[1])}."
    )


def _edges(line: Line) -> list[float]:
    return [edge for i in range(len(line.values)) if (ends := _ends(line, i)) for edge in ends]


def _ends(line: Line, i: int) -> tuple[float, float] | None:
    """The band's lower and upper end."""
    value, spread = line.values[i], line.spread[i] if line.spread else None
    if value is None or spread is None:
        return None
    low, high = value - spread, value + spread
    if line.within is not None:
        least, most = line.within[0][i], line.within[1][i]
        low, high = low if least is None else max(low, least), high if most is None else min(high, most)
    return low, high


def _known(values: Values) -> list[float]:
    return [value for value in values if value is not None]


def _nice(gap: float) -> float:
    """The next of 1, 2, 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(gap))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= gap * (1 - 1e-9))


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")

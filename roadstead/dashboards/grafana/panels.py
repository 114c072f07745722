"""What a panel is, and how it becomes Grafana's.

Owns: the look that all panels share, their place on the grid. Never touches: what they show.
Invariant: every panel has a unit and says what healthy looks like; ids count from 1 in reading order and no panel lies
on another. Panels without an id are dropped by Grafana's migration to its second schema.
A crash leaves: nothing, it is pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from grafana_foundation_sdk.builders import common, prometheus, stat, timeseries
from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.models import common as styles
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.prometheus import QueryEditorMode

SECONDS, SHARE, COUNT, PLAIN, AGO = "s", "percentunit", "short", "none", "dateTimeFromNow"
PER_SECOND, PER_HOUR, TOKENS_PER_SECOND = "suffix: /s", "suffix: /h", "suffix: tokens/s"
VERSIONS, GROUPS, NATS = "suffix: versions", "suffix: groups", "suffix: nats"

DATASOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
_GRID = 24
_COLOURS = ("green", "orange", "red")


@dataclass(frozen=True)
class Query:
    expression: str
    legend: str


@dataclass(frozen=True)
class Panel:
    title: str
    unit: str
    healthy: str
    """What it shows, what healthy looks like, and what another look means; a person reads it with the panel."""
    queries: tuple[Query, ...]
    kind: Literal["timeseries", "stat"] = "timeseries"
    width: int = 12
    height: int = 8
    stacked: bool = False
    steps: tuple[float, ...] = ()
    """Values from which it is orange, then red."""
    names_only: bool = False
    """A stat that shows which series there is, not its value."""


Row = tuple[str, tuple[Panel, ...]]
"""A heading and the panels under it."""


def graph(title: str, unit: str, healthy: str, *queries: Query, width: int = 12, stacked: bool = False) -> Panel:
    return Panel(title, unit, healthy, queries, width=width, stacked=stacked)


def number(
    title: str,
    unit: str,
    healthy: str,
    query: Query,
    *,
    steps: tuple[float, ...] = (),
    width: int = 4,
    names_only: bool = False,
) -> Panel:
    """The last value, large."""
    return Panel(title, unit, healthy, (query,), "stat", width, 4, steps=steps, names_only=names_only)


def placed(rows: Sequence[Row]) -> Iterator[builders.Row | stat.Panel | timeseries.Panel]:
    """The builders of all rows and panels, with ids and places, in reading order."""
    number_, top = 1, 0
    for heading, panels in rows:
        place = models.GridPos(x=0, y=top, w=_GRID, h=1)
        yield builders.Row(heading).id(number_).grid_pos(place)
        number_, top = number_ + 1, top + 1
        left = tallest = 0
        for panel in panels:
            if left + panel.width > _GRID:
                left, top, tallest = 0, top + tallest, 0
            place = models.GridPos(x=left, y=top, w=panel.width, h=panel.height)
            yield _built(panel, number_, place)
            number_, left, tallest = number_ + 1, left + panel.width, max(tallest, panel.height)
        top += tallest


def ids(rows: Sequence[Row]) -> dict[Panel, int]:
    """As `placed` gives them."""
    found, number_ = {}, 1
    for _, panels in rows:
        for panel in panels:
            number_ += 1
            found[panel] = number_
        number_ += 1
    return found


def _built(panel: Panel, number_: int, place: models.GridPos) -> stat.Panel | timeseries.Panel:
    built: stat.Panel | timeseries.Panel = _number(panel) if panel.kind == "stat" else _graph(panel)
    built = built.id(number_).grid_pos(place).title(panel.title).description(panel.healthy).unit(panel.unit)
    for letter, query in zip("ABCDEFGHIJ", panel.queries, strict=False):
        target = prometheus.Dataquery().expr(query.expression).legend_format(query.legend).ref_id(letter)
        target = target.editor_mode(QueryEditorMode.CODE)
        built = built.with_target(target.instant() if panel.kind == "stat" else target.range())
    return built.datasource(DATASOURCE)


def _graph(panel: Panel) -> timeseries.Panel:
    legend = common.VizLegendOptions().show_legend(True).display_mode(styles.LegendDisplayMode.LIST)
    legend = legend.placement(styles.LegendPlacement.BOTTOM).calcs([])
    tooltip = common.VizTooltipOptions().mode(styles.TooltipDisplayMode.MULTI).sort(styles.SortOrder.DESCENDING)
    built = timeseries.Panel().legend(legend).tooltip(tooltip).line_width(1)
    built = built.fill_opacity(40 if panel.stacked else 5).show_points(styles.VisibilityMode.AUTO)
    if panel.unit == SHARE:
        built = built.min(0)
    if panel.stacked:
        built = built.stacking(common.StackingConfig().mode(styles.StackingMode.NORMAL).group("A"))
    return built


def _number(panel: Panel) -> stat.Panel:
    built = stat.Panel().reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).fields("").values(False))
    built = built.graph_mode(styles.BigValueGraphMode.NONE).justify_mode(styles.BigValueJustifyMode.AUTO)
    mode = styles.BigValueTextMode.NAME if panel.names_only else styles.BigValueTextMode.AUTO
    built = built.text_mode(mode).wide_layout(True).orientation(styles.VizOrientation.AUTO)
    built = built.show_percent_change(False).percent_change_color_mode(styles.PercentChangeColorMode.STANDARD)
    thresholds = [
        models.Threshold(value=value, color=colour)
        for value, colour in zip((None, *panel.steps), _COLOURS, strict=False)
    ]
    config = builders.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(thresholds)
    return built.color_mode(styles.BigValueColorMode.VALUE).thresholds(config)

"""`roadstead audit`: what of a run's log is broken or looks wrong, ranked, with the rows."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from roadstead.cli.access import with_run
from roadstead.cli.stack import DataOption
from roadstead.storage.audit import Finding, Report
from roadstead.storage.audit import audit as audit_run
from roadstead.storage.keys import RunKeys
from roadstead.storage.objects import ObjectStore

StepsOption = Annotated[
    str | None,
    typer.Option("--steps", metavar="A:B", help="Steps A to B-1 only; A: and :B are open, A is one step."),
]
_SHOWN = 12
"""Rows of a finding that are shown; --json has them all."""
_COLOURS = {"critical": "bold red", "warning": "yellow", "note": "dim"}


def register(app: typer.Typer) -> None:
    app.command()(audit)


def audit(
    name: Annotated[str, typer.Argument(metavar="RUN", help="The run's name.", show_default=False)],
    steps: StepsOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="The whole report as JSON on stdout.")] = False,
    data: DataOption = None,
) -> None:
    """Check a run's log: digests, the staleness bound, the accounts of groups and prompts, then the data themselves.

    Findings are ranked; each says the first bad step, the rows, and how sure it is. Exit code 0: nothing was found,
    1: something was.

    Examples:

        roadstead audit arithmetic

        roadstead audit arithmetic --steps 30:40

        roadstead audit arithmetic --json | jq '.findings[0] | {title, first_step, rows}'
    """
    chosen = step_range(steps)

    def look(store: ObjectStore, keys: RunKeys) -> Report:
        with step_progress("auditing") as progress:
            return audit_run(store, keys, chosen, progress=progress)

    report = with_run(name, data, look)
    console = Console()
    if as_json:
        console.print_json(report.model_dump_json())
    else:
        show(report, console)
    if report.findings:
        raise typer.Exit(1)


def show(report: Report, console: Console) -> None:
    """The report as people read it."""
    if report.findings:
        table = Table(
            *("#", "severity", "sure", "first bad step", "finding"), title=f"audit of {report.run_id}", show_lines=True
        )
        for rank, finding in enumerate(report.findings, start=1):
            first = "-" if finding.first_step is None else str(finding.first_step)
            severity = f"[{_COLOURS[finding.severity]}]{finding.severity}[/]"
            table.add_row(str(rank), severity, f"{finding.confidence:.0%}", first, _words(finding))
        console.print(table)
    for note in report.notes:
        console.print(f"note: {note}", markup=False, highlight=False)
    verdict = f"{len(report.findings)} finding(s)" if report.findings else "nothing was found"
    console.print(
        f"{len(report.steps)} steps, {report.rows} rows, {len(report.checks)} checks: {verdict}", highlight=False
    )


def _words(finding: Finding) -> str:
    lines = [f"[bold]{escape(finding.title)}[/] ({finding.check})", escape(finding.why)]
    for label, names in (
        ("engine", finding.engines),
        ("environment", finding.environments),
        ("template", finding.templates),
        ("prompt", finding.prompts),
        ("group", finding.groups if not finding.rows else ()),
    ):
        if names and len(names) <= _SHOWN:
            lines.append(f"{label}: {escape(', '.join(names))}")
    if finding.rows:
        shown = " ".join(f"{r.step}/{r.group_id}/{r.member}" for r in finding.rows[:_SHOWN])
        more = len(finding.rows) - _SHOWN
        lines.append(f"rows (step/group/member): {shown}" + (f" and {more} more" if more > 0 else ""))
    return "\n".join(lines)


def step_range(text: str | None) -> range | None:
    """`A:B`, `A:`, `:B` or `A` as a range of steps. Raises typer.BadParameter."""
    if text is None:
        return None
    found = re.fullmatch(r"(\d*):(\d*)|(\d+)", text)
    if found is None or text == ":":
        raise typer.BadParameter(f"{text!r} is not a range of steps; write 10:20 for steps 10 to 19, or 10 for one")
    if found[3]:
        return range(int(found[3]), int(found[3]) + 1)
    chosen = range(int(found[1] or 0), int(found[2] or 1 << 31))
    if not chosen:
        raise typer.BadParameter(f"{text!r} holds no step; the end is not included, write 10:11 for step 10")
    return chosen


@contextlib.contextmanager
def step_progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr, moved by calls of (done, total)."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("steps"))
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)

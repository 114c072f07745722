"""`roadstead evals`: what a run's policy versions are worth on the evaluation prompts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from roadstead.cli.access import recorded_config, with_run
from roadstead.cli.stack import DataOption
from roadstead.storage import evals, steps
from roadstead.storage.evals import EvaluationSummary, is_due
from roadstead.storage.keys import RunKeys
from roadstead.storage.objects import ObjectStore


@dataclass(frozen=True)
class Evaluations:
    closed: list[EvaluationSummary]
    open: list[int]
    """Versions that are due, published, and not on record: under way, or lost with an attempt."""


def register(app: typer.Typer) -> None:
    app.command("evals")(show)


def show(
    name: Annotated[str, typer.Argument(metavar="RUN", help="The run's name.", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="Every summary as JSON on stdout.")] = False,
    data: DataOption = None,
) -> None:
    """List the evaluations of a run by policy version: mean reward, its components, samples, and what went wrong.

    Each is made by exactly its version, on the same prompts with the same sampling seeds, beside training.

    Examples:

        roadstead evals arithmetic

        roadstead evals arithmetic --json | jq '.evaluations[] | select(.complete) | [.version, .mean_reward]'
    """
    found = with_run(name, data, read)
    console = Console()
    if as_json:
        closed = [{**s.model_dump(mode="json"), "complete": s.complete} for s in found.closed]
        console.print_json(json.dumps({"evaluations": closed, "not_on_record": found.open}))
        return
    console.print(table(name, found))
    for line in notes(found):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def read(store: ObjectStore, keys: RunKeys) -> Evaluations:
    closed = evals.all_of(store, keys)
    config = recorded_config(store, keys)
    published = steps.count(store, keys)
    known = {summary.version for summary in closed}
    due = (
        [v for v in range(published + 1) if is_due(v, config.evaluation.every, config.training.steps)]
        if config.evaluation
        else []
    )
    return Evaluations(closed, [version for version in due if version not in known])


def table(name: str, found: Evaluations) -> Table:
    """A row a version."""
    components = sorted({component for summary in found.closed for component in summary.components})
    shown = Table(
        *("version", "reward", *map(escape, components), "prompts", "samples", "tokens", "seconds", "not evaluated"),
        title=f"evaluations of {name}",
    )
    for s in found.closed:
        parts = [_number(s.components.get(component)) for component in components]
        shown.add_row(
            *(str(s.version), _number(s.mean_reward), *parts, f"{s.evaluated} of {s.settings.prompts}"),
            *(str(s.samples), _number(s.mean_tokens, 1), _number(s.seconds, 1), escape(_why(s))),
            style=None if s.complete else "dim",
        )
    return shown


def notes(found: Evaluations) -> list[str]:
    """What a reader of the table must know before comparing its rows."""
    lines = []
    if not found.closed and not found.open:
        lines.append("this run has no `evaluation` section in its configuration; add one: it may change on resume")
    if found.open:
        listed = ", ".join(map(str, found.open))
        lines.append(f"not on record: version {listed} (under way, or ended with the attempt that it belonged to)")
    settings = {summary.settings.digest: summary.version for summary in reversed(found.closed)}
    if len(settings) > 1:
        changes = ", ".join(map(str, sorted(settings.values())[1:]))
        lines.append(f"the settings changed at version {changes}: compare only within them (--json has each)")
    unscored = sum(summary.unscored for summary in found.closed)
    if unscored:
        lines.append(f"{unscored} samples have no reward, because it failed; --json has the reasons under `errors`")
    return lines


def _why(summary: EvaluationSummary) -> str:
    if summary.complete:
        return ""
    if summary.skipped is not None:
        return f"skipped: {summary.skipped}"
    return "; ".join(f"{count}: {reason}" for reason, count in summary.failures.items())


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"

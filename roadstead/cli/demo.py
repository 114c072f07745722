"""`roadstead demo`: a small model learns an example's task, on real parts, in minutes.

Owns: the demo's model, prompts and configuration, and what counts as having learned.
Never touches: how a run works; the demo is an ordinary run.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from enum import StrEnum
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer
import yaml
from rich.console import Console

from roadstead.cli.run import execute
from roadstead.cli.stack import DataOption
from roadstead.cli.summary import WINDOW, Summary, summary_table
from roadstead.config import RunConfig, parse
from roadstead.infra.stack import data_directory

_STEPS = 40
_RISE = 0.15
"""How much the mean reward must rise over _STEPS steps to count as clearly higher: nearly four standard errors of the
difference between two windows of 320 independent right-or-wrong answers (0.04), less for answers that share prompts."""


class Example(StrEnum):
    """Folders of `examples/` that have a model and prompts of their own: the keys of `examples.prepare.TASKS`."""

    arithmetic = "arithmetic"
    guessing = "guessing"
    calculator = "calculator"


class DemoFailed(RuntimeError):
    """The demo ran, but what it promises did not come true."""


def register(app: typer.Typer) -> None:
    app.command()(demo)


def demo(
    example: Annotated[
        Example, typer.Option(help="arithmetic: single turn; guessing: several turns; calculator: tool use.")
    ] = Example.arithmetic,
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = _STEPS,
    max_staleness: Annotated[int, typer.Option(min=0, help="Bound S; 0 is synchronous.")] = 2,
    seed: Annotated[int, typer.Option(help="Seed of model, prompts and sampling.")] = 0,
    data: DataOption = None,
) -> None:
    """Build a tiny model, teach it a task by asynchronous RL, and check that it learned.

    Examples:

        roadstead demo

        roadstead demo --example guessing

        roadstead demo --example calculator

        roadstead demo --steps 10 --max-staleness 0 --seed 1
    """
    console = Console()
    where = data_directory(data)
    config = _configuration(example.value, where, steps, max_staleness, seed, console)
    summary, _ = execute(config, where, console)
    console.print(summary_table(summary))
    _check(summary, steps)
    command = "roadstead" if shutil.which("roadstead") else os.path.relpath(sys.argv[0])
    place = f" --data {data}" if data else ""
    for arguments in (
        f"status {summary.run_id}",
        f"batch show {summary.run_id} {steps - 1}",
        f"batch export {summary.run_id} --to out",
    ):
        console.print(f"next: {command} {arguments}{place}", highlight=False, soft_wrap=True)


def _configuration(example: str, where: Path, steps: int, max_staleness: int, seed: int, console: Console) -> RunConfig:
    """The example's own YAML, with the paths, the seed and the options filled in."""
    from examples.prepare import prepare  # a package `examples` of the user's own must break the demo only

    folder = where / "demo" / example / f"seed-{seed}"
    with console.status("building the demo's model") as status:
        manifest = prepare(
            example,
            folder / "model",
            folder / "prompts.jsonl",
            seed,
            lambda done, what: status.update(f"building the demo's model: {done:.0%} {what}"),
        )
    how = "found" if manifest["reused"] else f"built in {manifest['build_seconds']} s"
    console.print(
        f"model    {manifest['parameters']} parameters, {how}: {folder / 'model'}", highlight=False, soft_wrap=True
    )
    recipe = files(f"examples.{example}") / "run.yaml"
    values = yaml.safe_load(recipe.read_text())
    values["name"] = f"demo-{seed}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}"
    values["seed"] = seed
    values["model"]["path"] = str(folder / "model")
    values["data"]["prompts"] = str(folder / "prompts.jsonl")
    values["staleness"]["max_staleness"] = max_staleness
    values["training"]["steps"] = steps
    return parse(values, str(recipe))


def _check(summary: Summary, steps: int) -> None:
    if summary.steps != steps:
        raise DemoFailed(f"{summary.steps} steps are recorded, {steps} were asked for")
    if summary.max_staleness is None or summary.max_staleness > summary.staleness_bound:
        raise DemoFailed(f"staleness {summary.max_staleness} is over the bound {summary.staleness_bound}")
    if summary.left:
        raise DemoFailed(f"{summary.left} admitted groups have no terminal state")
    if steps < _STEPS:
        return  # too short to promise that it learned
    rise = (summary.reward_last or 0.0) - (summary.reward_first or 0.0)
    if rise < _RISE:
        raise DemoFailed(
            f"mean reward rose by {rise:.3f} from the first {WINDOW} to the last {WINDOW} steps; "
            f"at least {_RISE} was expected: look at the run's data, and try another seed"
        )

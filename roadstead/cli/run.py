"""`roadstead run` and `roadstead resume`."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from roadstead.cli.access import recorded_config, with_run
from roadstead.cli.begin import RunWorkflow
from roadstead.cli.durations import seconds
from roadstead.cli.progress import follow
from roadstead.cli.session import Report, Resume, Signals, given_config, run_interruptible, session
from roadstead.cli.stack import DataOption
from roadstead.cli.summary import Summary, summarize, summary_table
from roadstead.config import RunConfig, load
from roadstead.infra.stack import data_directory

STOPPED = 3
"""Exit code of a run that was drained or stopped before its step target: `resume` goes on."""
_CLEAN_UP_S = 12.0
"""Of the time given to stop, kept for ending the processes: workers have a grace of 3 s and a watchdog of 10 s."""
_KILLED = 75

GraceOption = Annotated[
    str, typer.Option("--grace", help="On SIGTERM: stop in order within this time, e.g. 25s or 2m.", metavar="TIME")
]
_GRACE = "25s"
"""Kubernetes gives 30 s by default, a preempted machine 30 s or more."""


def register(app: typer.Typer) -> None:
    app.command()(run)
    app.command()(resume)


def run(
    config: Annotated[Path, typer.Argument(help="The run's YAML.", show_default=False)],
    grace: GraceOption = _GRACE,
    data: DataOption = None,
) -> None:
    """Train: bring up engine, trainer and workers, begin the run, follow it to its end.

    A run that is still going is joined. Ctrl-C stops the processes at once; SIGTERM lets the step in training finish,
    as long as --grace allows. Either way the run is durable and `roadstead resume NAME` goes on with it.
    Exit codes: 0 finished, 1 failed, 2 bad input, 3 drained or stopped, 75 killed past the grace, 130 interrupted.

    Examples:

        roadstead run examples/arithmetic/run.yaml

        roadstead run my-run.yaml --data /mnt/big/roadstead --grace 2m
    """
    _show(*execute(load(config), data_directory(data), Console(), grace_s=seconds("--grace", grace)))


def resume(
    name: Annotated[str, typer.Argument(help="The run's name.", show_default=False)],
    config: Annotated[
        Path | None,
        typer.Option("--config", help="Its YAML, changed or on another machine.", show_default="as it was"),
    ] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option("--allow", help="A key that may differ, e.g. rollout.group_size. Repeatable."),
    ] = None,
    grace: GraceOption = _GRACE,
    data: DataOption = None,
) -> None:
    """Go on with a run that was interrupted, stopped, drained or has failed.

    While Temporal has the run, its processes are brought back and it goes on where it stands. Otherwise it is rebuilt
    from S3 alone as a new attempt: finished groups within the bound are kept, lost ones are generated again under
    their names, no prompt is skipped or trained twice.

    A higher training.steps in the YAML trains on. What would change the experiment must be allowed by name.

    Examples:

        roadstead resume arithmetic

        roadstead resume my-run --config my-run.yaml

        roadstead resume my-run --config my-run.yaml --allow staleness.max_staleness
    """
    where = data_directory(data)
    kept = given_config(where, name)
    if config is not None:
        wanted = load(config)
        if wanted.name != name:
            raise ValueError(f"--config {config}: its name is {wanted.name!r}, to be resumed is {name!r}")
    elif kept.exists():
        wanted = load(kept)
    else:
        wanted = with_run(name, data, recorded_config)
    grace_s = seconds("--grace", grace)
    _show(*execute(wanted, where, Console(), Resume(tuple(allow or ())), grace_s=grace_s))


def execute(
    config: RunConfig, data: Path, console: Console, resume: Resume | None = None, *, grace_s: float = 25.0
) -> tuple[Summary, str]:
    """Run `config` until its workflow ends; what is on record, and the run's last phase.

    Raises WorkflowFailureError, ProcessFailed, Interrupted, ...
    """
    signals = Signals()

    async def main() -> tuple[Summary, str]:
        def report(line: str) -> None:
            console.print(line, highlight=False, soft_wrap=True, style="dim")

        async with session(config, data, report, resume) as up:
            phase = "finished"
            if (workflow := up.workflow) is not None:
                report(f"logs     {up.logs}")
                if up.temporal_ui:
                    report(f"Temporal {up.temporal_ui}/namespaces/default/workflows/{config.name}")
                signals.orderly = lambda: _stop_in_order(workflow, grace_s, report)
                phase = (await up.while_up(follow(workflow, console, config.training.steps))).phase
            return summarize(up.store, up.keys), phase

    return run_interruptible(main(), signals)


async def _stop_in_order(workflow: RunWorkflow, grace_s: float, report: Report) -> None:
    """SIGTERM: ask the run to stop, and be gone in time whatever hangs."""
    for_run = max(grace_s - _CLEAN_UP_S, grace_s / 4)
    report(f"SIGTERM: stopping within {grace_s:.0f} s; the step in training has {for_run:.0f} s to be published")

    def kill() -> None:
        time.sleep(grace_s)
        report(f"did not stop within {grace_s:.0f} s: killed. What was committed stays; `roadstead resume` goes on")
        os._exit(_KILLED)  # the kernel ends the children with us

    threading.Thread(target=kill, daemon=True).start()
    await asyncio.wait_for(workflow.signal("stop", for_run), for_run)


def _show(summary: Summary, phase: str) -> None:
    console = Console()
    console.print(summary_table(summary))
    if phase in {"drained", "stopped"}:
        console.print(
            f"{phase} after {summary.steps} of {summary.target_steps} steps; go on with "
            f"`roadstead resume {summary.run_id}`",
            highlight=False,
            soft_wrap=True,
        )
        raise typer.Exit(STOPPED)

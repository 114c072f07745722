"""`roadstead drain`, `stop`, `pause`, `unpause`: what a person says to a run that goes on.

Owns: the wait for a bounded stop, and the kill past it. Never touches: the run's data.
Invariant: `stop` ends within its window: in order, or by killing the run's host on this machine. Nothing that was
committed or staged is lost either way.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from temporalio.client import WorkflowExecutionStatus
from temporalio.service import RPCError

from roadstead.cli.access import live_run
from roadstead.cli.begin import RunWorkflow
from roadstead.cli.durations import seconds
from roadstead.cli.session import host_of, run_interruptible
from roadstead.cli.stack import DataOption
from roadstead.infra.stack import data_directory

RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="The run's name.", show_default=False)]
_KILLED = 75
_LOOK_S = 0.2


def register(app: typer.Typer) -> None:
    for command in (drain, stop, pause, unpause):
        app.command()(command)


def drain(name: RunArgument, data: DataOption = None) -> None:
    """Admit no more prompts, finish what is in flight, train every full batch, end.

    What is left over (less than a batch) stays on S3; `roadstead resume RUN` takes it up.

    Example:

        roadstead drain arithmetic
    """
    _say(name, data, "drain")
    Console().print(f"{name} drains; watch it with `roadstead status {name}`", highlight=False, soft_wrap=True)


def pause(name: RunArgument, data: DataOption = None) -> None:
    """Admit no more prompts for now; what is in flight goes on and is trained.

    Example:

        roadstead pause arithmetic
    """
    _say(name, data, "pause")
    Console().print(f"{name} is paused; `roadstead unpause {name}` goes on", highlight=False, soft_wrap=True)


def unpause(name: RunArgument, data: DataOption = None) -> None:
    """Admit prompts again, up to capacity at once.

    Example:

        roadstead unpause arithmetic
    """
    _say(name, data, "unpause")
    Console().print(f"{name} goes on", highlight=False)


def stop(
    name: RunArgument,
    within: Annotated[str, typer.Option(help="When it must be gone, e.g. 60s or 2m.", metavar="TIME")] = "60s",
    data: DataOption = None,
) -> None:
    """End a run within a time: no new prompts, the step in training is published if it can be, the rest is recorded.

    Finished groups stay staged, unfinished ones are generated again after `roadstead resume RUN`. Past the time its
    workflow is terminated and its host on this machine killed, which loses no more than that.
    Exit codes: 0 it stopped in order, 75 it was killed.

    Examples:

        roadstead stop arithmetic

        roadstead stop arithmetic --within 20s
    """
    window_s = seconds("--within", within)
    in_order = run_interruptible(_stop(name, data, window_s))
    if in_order:
        Console().print(f"{name} stopped; `roadstead resume {name}` goes on", highlight=False, soft_wrap=True)
        return
    Console(stderr=True).print(
        f"{name} did not stop within {within} and was killed; what was committed stays, `roadstead resume {name}` goes "
        "on",
        highlight=False,
        soft_wrap=True,
    )
    raise typer.Exit(_KILLED)


def _say(name: str, data: Path | None, signal_name: str) -> None:
    async def main() -> None:
        async with live_run(name, data) as (_, workflow):
            await workflow.signal(signal_name)

    run_interruptible(main())


async def _stop(name: str, data: Path | None, window_s: float) -> bool:
    """Whether it stopped in order."""
    deadline = time.monotonic() + window_s
    folder = data_directory(data) / "runs" / name
    async with live_run(name, data) as (_, workflow):
        # The host needs time to end its processes once the run has ended.
        await workflow.signal("stop", max(window_s - 15.0, window_s / 2))
        in_order = False
        while time.monotonic() < deadline:
            in_order = in_order or not await _is_open(workflow)
            if in_order and host_of(folder) is None:
                return True
            await asyncio.sleep(_LOOK_S)
        with contextlib.suppress(RPCError):
            await workflow.terminate(f"roadstead stop --within {window_s:.0f}s: the time is over")
    if (host := host_of(folder)) is not None:
        os.kill(host, signal.SIGKILL)  # the kernel ends its children
    return False


async def _is_open(workflow: RunWorkflow) -> bool:
    try:
        return (await workflow.describe()).status == WorkflowExecutionStatus.RUNNING
    except RPCError:
        return False  # Temporal went down with the run's host, which ends only after the run

"""A run as it goes: a live view on a terminal, a line a step elsewhere."""

from __future__ import annotations

import asyncio
import time

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text
from temporalio.client import WorkflowExecutionStatus, WorkflowQueryFailedError
from temporalio.service import RPCError

from roadstead.cli.begin import RunWorkflow
from roadstead.workflows.messages import RunStatus, StepSummary

_POLL_S = 1.0
_QUERY_S = 5.0
_QUIET_S = 60.0
"""A run that does nothing for so long says what it waits for."""
_STYLE = {"O": "green", "R": "yellow", ".": "dim"}


def step_line(step: StepSummary) -> str:
    """One step in under 80 columns."""
    reward = "    -" if step.mean_reward is None else f"{step.mean_reward:.3f}"
    norm = "skipped: not finite" if step.grad_norm is None or not step.applied else f"{step.grad_norm:.3f}"
    return (
        f"step {step.step:>4}  reward {reward}  staleness {step.max_staleness}  "
        f"{step.response_tokens:>6} tokens  loss {step.loss:+.3f}  grad norm {norm}"
    )


def window(status: RunStatus) -> Text:
    """The ledger's window, a line a buffer: O finished, R being generated, . free."""
    text = Text()
    if status.training is not None:
        text.append(f"  buffer {status.training:>4} training\n", style="bold")
    for view in status.window:
        text.append(f"  buffer {view.buffer:>4} {view.state:<8} ")
        for slot in view.slots:
            text.append(slot, style=_STYLE[slot])
        text.append("\n")
    return text


async def follow(workflow: RunWorkflow, console: Console, steps: int) -> RunStatus:
    """Show the run until its workflow ends; its final status. Raises WorkflowFailureError with the run's reason."""
    progress = Progress(
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("steps"),
        TimeElapsedColumn(),
        TextColumn("eta"),
        TimeRemainingColumn(),
        console=console,
    )
    task = progress.add_task("training", total=steps)
    shown, silent_since = -1, None
    seen, seen_at = None, time.monotonic()
    with Live(console=console, refresh_per_second=4, transient=True, auto_refresh=console.is_terminal) as live:
        while True:
            running = (await workflow.describe()).status == WorkflowExecutionStatus.RUNNING
            status = await _query(workflow) if running else None
            if status is not None:
                silent_since = None
                if status != seen:
                    seen, seen_at = status, time.monotonic()
                elif time.monotonic() - seen_at > _QUIET_S:
                    console.print(f"nothing changed for {_QUIET_S:.0f} s: {_waiting_for(status)}", style="yellow")
                    seen_at = time.monotonic()
                for step in status.recent:
                    if step.step > shown:
                        console.print(step_line(step), highlight=False, soft_wrap=True)
                        shown = step.step
                progress.update(task, completed=status.version)
                live.update(_view(progress, status) if console.is_terminal else Text(""))
            elif running:
                silent_since = silent_since or time.monotonic()
                live.update(
                    Text(f"the orchestrator worker has not answered for {time.monotonic() - silent_since:.0f} s")
                )
            if not running:
                final = await workflow.result()
                for step in final.recent:
                    if step.step > shown:
                        console.print(step_line(step), highlight=False, soft_wrap=True)
                return final
            await asyncio.sleep(_POLL_S)


def _view(progress: Progress, status: RunStatus) -> RenderableType:
    counts = (
        f"  {status.in_flight} groups in flight, {status.waiting} waiting, {status.trained} trained, "
        f"{status.dead_lettered} dead-lettered, version {status.version}, {status.phase}"
    )
    return Group(progress, Text(counts), window(status))


def _waiting_for(status: RunStatus) -> str:
    parts = [f"{status.in_flight} groups are being generated"] if status.in_flight else []
    if status.training is not None:
        parts.append(f"step {status.training} is being persisted, trained or published")
    if status.phase == "paused":
        parts.append("the run is paused")
    return ", ".join(parts) or "no group is in flight and nothing trains; look at the orchestrator worker's log"


async def _query(workflow: RunWorkflow) -> RunStatus | None:
    """None while no worker answers (it may just be restarting)."""
    try:
        return await asyncio.wait_for(workflow.query("status", result_type=RunStatus), _QUERY_S)
    except (TimeoutError, RPCError, WorkflowQueryFailedError):
        return None

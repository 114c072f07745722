"""A run as it goes: a live view on a terminal, a line a step elsewhere."""

from __future__ import annotations

import asyncio
import time

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text
from temporalio.client import WorkflowExecutionStatus, WorkflowQueryFailedError
from temporalio.service import RPCError, RPCStatusCode

from roadstead.cli.begin import RunWorkflow
from roadstead.cli.pace import Pace
from roadstead.workflows.messages import RunStatus, StepSummary

_POLL_S = 1.0
_QUERY_S = 5.0
_GONE_S = 300.0
"""A Temporal that is away for so long ends the view; its supervisor gives up on it earlier."""
_QUIET_S = 60.0
"""A run that does nothing for so long says what it waits for."""
_STUCK_S = 30.0
"""A trainer that waits for so long for slow groups is told of."""
_SQUARES = {"O": ("■", "green"), "R": ("▨", "yellow"), ".": ("□", "bright_black")}
_STATE = {"ready": "bold green", "stuck": "bold yellow", "pending": "", "training": "bold magenta"}
_BARS = "▁▂▃▄▅▆▇█"


def step_line(step: StepSummary) -> str:
    """One step in under 80 columns."""
    reward = "    -" if step.mean_reward is None else f"{step.mean_reward:.3f}"
    norm = "skipped: not finite" if step.grad_norm is None else f"{step.grad_norm:.3f}"
    norm = norm if step.applied or step.grad_norm is None else "nothing to learn"
    return (
        f"step {step.step:>4}  reward {reward}  staleness {step.max_staleness}  "
        f"{step.response_tokens:>6} tokens  loss {step.loss:+.3f}  grad norm {norm}"
    )


def view(status: RunStatus, pace: Pace, bound: int, *, letters: bool = False) -> RenderableType:
    """A run at a glance, for 80 columns and more. letters: for a terminal that has no squares."""
    return Group(_window(status, letters), Text(""), _numbers(status, pace, bound, letters))


def bound_of(status: RunStatus) -> int:
    """max_staleness by the window's last buffer; less near the step target, where the window ends early."""
    return max((buffer.buffer - status.version for buffer in status.window), default=0)


def duration(seconds: float) -> str:
    """`40 s`, `7 min`, `3 h 20 min`, `2 d 4 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes // 1440} d {minutes % 1440 // 60} h"


async def _is_running(workflow: RunWorkflow) -> bool | None:
    """None: Temporal did not say; a connection may be cut at any moment, and comes back."""
    try:
        return (await workflow.describe()).status == WorkflowExecutionStatus.RUNNING
    except RPCError as error:
        if error.status == RPCStatusCode.NOT_FOUND:
            raise
        return None


async def follow(workflow: RunWorkflow, console: Console, steps: int) -> RunStatus:
    """Show the run until its workflow ends; its final status. Raises WorkflowFailureError with the run's reason."""
    progress = Progress(
        *(TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("steps"), TimeElapsedColumn()),
        console=console,
    )
    task = progress.add_task("training", total=steps)
    shown, silent_since = -1, None
    seen, seen_at = None, time.monotonic()
    pace, tokens, bound = Pace(), 0, 0
    with Live(console=console, refresh_per_second=4, transient=True, auto_refresh=console.is_terminal) as live:
        while True:
            running = await _is_running(workflow)
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
                        tokens += step.response_tokens
                pace.note(time.monotonic(), status.version, tokens)
                bound = max(bound, bound_of(status))
                progress.update(task, completed=status.version)
                now = view(status, pace, bound, letters=console.options.ascii_only)
                live.update(Group(progress, Text(""), now) if console.is_terminal else Text(""))
            elif running is not False:
                silent_since = silent_since or time.monotonic()
                silent, who = time.monotonic() - silent_since, "the orchestrator worker" if running else "Temporal"
                live.update(Text(f"{who} has not answered for {silent:.0f} s"))
                if running is None and silent > _GONE_S:
                    raise TimeoutError(f"Temporal has not answered for {silent:.0f} s; the run goes on without a view")
            if running is False:
                try:
                    final = await workflow.result()
                except RPCError:  # the connection was cut just now; the end stays what it is
                    continue
                for step in final.recent:
                    if step.step > shown:
                        console.print(step_line(step), highlight=False, soft_wrap=True)
                return final
            await asyncio.sleep(_POLL_S)


def _window(status: RunStatus, letters: bool) -> RenderableType:
    """A line a buffer, earliest first; in it Occupied, then Empty, then Reserved, as the ledger keeps them."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(justify="right")
    table.add_column()
    table.add_column(overflow="fold")
    if status.training is not None:
        width = max((len(buffer.slots) for buffer in status.window), default=1)
        table.add_row(*_buffer(status.training, "training", "O" * width, letters, "magenta"))
    for buffer in status.window:
        table.add_row(*_buffer(buffer.buffer, buffer.state, buffer.slots, letters))
    legend = Text("  ")
    for letter, meaning in (("O", "finished"), ("R", "being generated"), (".", "free")):
        legend.append_text(_squares(letter, letters)).append(f" {meaning}   ", style="bright_black")
    return Group(table, legend)


def _buffer(number: int, state: str, slots: str, letters: bool, style: str | None = None) -> tuple[Text, Text, Text]:
    return (
        Text(f"  buffer {number}"),
        Text(state, style=_STATE.get(state, "")),
        _squares(slots, letters, style),
    )


def _squares(slots: str, letters: bool, style: str | None = None) -> Text:
    text = Text()
    for i, slot in enumerate(slots):
        square, own = _SQUARES[slot]
        text.append(" " * (i > 0)).append(slot if letters else square, style=style or own)
    return text


def _numbers(status: RunStatus, pace: Pace, bound: int, letters: bool) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="bright_black", min_width=11)
    table.add_column()
    capacity = status.capacity or (bound + 1) * max((len(buffer.slots) for buffer in status.window), default=0)
    under_way = status.in_flight + status.waiting
    table.add_row(
        "  under way",
        f"{under_way} of {capacity} = (S + 1) x B groups: {status.in_flight} in flight, "
        f"{status.waiting} finished and waiting",
    )
    ends = {
        "trained": status.trained,
        "filtered": status.filtered,
        "discarded": status.discarded,
        "expired": status.expired,
        "dead-lettered": status.dead_lettered,
    }
    ended = ", ".join(f"{count} {state}" for state, count in ends.items() if count or state == "trained")
    table.add_row("  groups", f"{status.admitted} admitted: {ended}")
    table.add_row("  pace", _pace(status, pace))
    if status.recent:
        last = status.recent[-1]
        ages = " ".join(str(step.max_staleness) for step in status.recent)
        table.add_row("  ages", f"oldest row of each of the last steps: {ages}; bound S = {bound}")
        rewards = [step.mean_reward for step in status.recent if step.mean_reward is not None]
        line = "" if letters else f"  {_sparkline(rewards)}"
        mean = "-" if last.mean_reward is None else f"{last.mean_reward:.3f}"
        table.add_row("  reward", f"{mean} at step {last.step}{line}")
    for warning in _warnings(status):
        table.add_row(Text("  look at", style="yellow"), warning)
    if status.evaluating:
        table.add_row("  evaluating", "version " + ", ".join(map(str, status.evaluating)))
    return table


def _warnings(status: RunStatus) -> list[str]:
    """What may stop the run, before it does."""
    found = []
    if status.stuck_since is not None and (stuck_s := time.time() - status.stuck_since / 1e6) > _STUCK_S:
        found.append(f"the trainer has waited {duration(stuck_s)} for the unfinished groups of buffer {status.version}")
    batch = max((len(buffer.slots) for buffer in status.window), default=0)
    if status.empty_groups >= max(1, batch):
        found.append(f"{status.empty_groups} groups in a row with nothing to learn from; `roadstead groups`")
    return found


def _pace(status: RunStatus, pace: Pace) -> str:
    steps, tokens = pace.steps_per_hour, pace.tokens_per_second
    if steps is None or tokens is None:
        return "not known before two steps were seen"
    eta = pace.seconds_for(max(0, status.target_steps - status.version))
    return f"{steps:,.0f} steps/h, {tokens:,.0f} tokens/s" + (f", ETA {duration(eta)}" if eta else "")


def _sparkline(values: list[float]) -> str:
    """Heights within what is shown; a flat line is low."""
    low, span = min(values, default=0.0), max(values, default=0.0) - min(values, default=0.0)
    return "".join(_BARS[round((value - low) / span * (len(_BARS) - 1)) if span else 0] for value in values)


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

"""`roadstead status`: where a run stands."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text
from temporalio.client import WorkflowQueryFailedError
from temporalio.service import RPCError

from roadstead.cli.access import live_run, with_run
from roadstead.cli.begin import CannotBegin
from roadstead.cli.pace import Pace, recorded_pace
from roadstead.cli.progress import follow, step_line, view
from roadstead.cli.session import Interrupted, given_config, run_interruptible
from roadstead.cli.stack import DataOption
from roadstead.cli.summary import Summary, summarize, summary_table
from roadstead.config import load
from roadstead.infra.stack import data_directory, endpoints
from roadstead.storage.keys import RunKeys
from roadstead.storage.objects import ObjectStore
from roadstead.workers.host import connect
from roadstead.workflows.messages import RunStatus

_ANSWER_S = 5.0
_PHASE = {"running": "bold green", "failed": "bold red", "finished": "bold green"}


def register(app: typer.Typer) -> None:
    app.command()(status)


def status(
    name: Annotated[str, typer.Argument(metavar="RUN", help="The run's name.", show_default=False)],
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Go on until the run ends, or Ctrl-C.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
    data: DataOption = None,
) -> None:
    """Show where a run stands: live from its workflow while it runs, else from what S3 holds.

    Examples:

        roadstead status arithmetic

        roadstead status arithmetic --watch

        roadstead status arithmetic --json | jq .recorded.reward_last
    """
    if watch and as_json:
        raise typer.BadParameter("--json is one answer; leave out --watch, and ask again for another")
    recorded, pace = with_run(name, data, _recorded)
    console = Console()
    if watch and _watch(name, data, console, recorded.target_steps):
        recorded, pace = with_run(name, data, _recorded)
        console.print(summary_table(recorded))
        return
    live = asyncio.run(_live(name, data))
    if as_json:
        answer: dict[str, Any] = {
            "recorded": recorded.to_json(),
            "live": live.model_dump() if live else None,
            "pace": {"steps_per_hour": pace.steps_per_hour, "tokens_per_second": pace.tokens_per_second},
        }
        console.print_json(json.dumps(answer))
        return
    if live is not None:
        console.print(at_a_glance(live, pace, recorded.staleness_bound, letters=console.options.ascii_only))
    console.print(summary_table(recorded))


def at_a_glance(live: RunStatus, pace: Pace, bound: int, *, letters: bool = False) -> RenderableType:
    """A run that goes: name and phase, the way to its target, its window, its numbers, its last steps."""
    head = Table.grid(padding=(0, 2, 0, 0))
    head.add_row(
        Text(live.run_id, style="bold"),
        Text(live.phase, style=_PHASE.get(live.phase, "bold yellow")),
        ProgressBar(total=live.target_steps, completed=live.version, width=30),
        Text(f"{live.version} of {live.target_steps} steps"),
        Text(f"attempt {live.attempt}", style="bright_black"),
    )
    last = [Text("  " + step_line(step)) for step in live.recent]
    return Group(head, Text(""), view(live, pace, bound, letters=letters), Text(""), *last, *[Text("")] * bool(last))


def _recorded(store: ObjectStore, keys: RunKeys) -> tuple[Summary, Pace]:
    return summarize(store, keys), recorded_pace(store, keys)


def _watch(name: str, data: Path | None, console: Console, target: int) -> bool:
    """Follow the run to its end; False when it is not running."""

    async def main() -> bool:
        try:
            async with live_run(name, data) as (_, workflow):
                await follow(workflow, console, target)
                return True
        except CannotBegin as error:
            Console(stderr=True).print(f"nothing to watch: {error}", style="dim", highlight=False, soft_wrap=True)
            return False

    try:
        return run_interruptible(main())
    except Interrupted:
        Console(stderr=True).print("not watching any more; the run goes on", style="dim")
        raise typer.Exit(130) from None


async def _live(name: str, data: Path | None) -> RunStatus | None:
    """The workflow's own answer; None when it is not running or nobody is there to answer for it."""
    where = data_directory(data)
    file = given_config(where, name)
    up = endpoints(where)
    if not file.exists():
        return None
    temporal = load(file).temporal
    address = temporal.address or (up.temporal if up else None)
    if address is None:
        return None
    client = await connect(address, temporal.namespace)
    try:
        query = client.get_workflow_handle(name).query("status", result_type=RunStatus)
        return await asyncio.wait_for(query, _ANSWER_S)
    except (TimeoutError, RPCError, WorkflowQueryFailedError):
        return None

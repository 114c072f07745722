"""`roadstead status`: where a run stands."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from temporalio.client import WorkflowQueryFailedError
from temporalio.service import RPCError

from roadstead.cli.access import with_run
from roadstead.cli.progress import step_line, window
from roadstead.cli.session import given_config
from roadstead.cli.stack import DataOption
from roadstead.cli.summary import summarize, summary_table
from roadstead.config import load
from roadstead.infra.stack import data_directory, endpoints
from roadstead.workers.host import connect
from roadstead.workflows.messages import RunStatus

_ANSWER_S = 5.0


def register(app: typer.Typer) -> None:
    app.command()(status)


def status(
    name: Annotated[str, typer.Argument(metavar="RUN", help="The run's name.", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
    data: DataOption = None,
) -> None:
    """Show where a run stands: live from its workflow while it runs, else from what S3 holds.

    Examples:

        roadstead status arithmetic

        roadstead status arithmetic --json | jq .recorded.reward_last
    """
    recorded = with_run(name, data, summarize)
    live = asyncio.run(_live(name, data))
    console = Console()
    if as_json:
        answer: dict[str, Any] = {"recorded": recorded.to_json(), "live": live.model_dump() if live else None}
        console.print_json(json.dumps(answer))
        return
    if live is not None:
        console.print(
            f"{live.phase}, version {live.version} of {live.target_steps}: {live.in_flight} groups in flight, "
            f"{live.waiting} waiting, {live.trained} trained",
            highlight=False,
        )
        console.print(window(live))
        for step in live.recent:
            console.print(step_line(step), highlight=False)
    console.print(summary_table(recorded))


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

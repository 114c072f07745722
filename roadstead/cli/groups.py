"""`roadstead groups`: what was generated, or was to be, and never trained on."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from roadstead.cli.access import with_run
from roadstead.cli.stack import DataOption
from roadstead.storage.keys import RunKeys
from roadstead.storage.objects import ObjectStore
from roadstead.storage.untrained import Untrained, untrained


class State(StrEnum):
    FILTERED = "filtered"
    DISCARDED = "discarded"
    EXPIRED = "expired"
    DEAD_LETTERED = "dead-lettered"


def register(app: typer.Typer) -> None:
    app.command()(groups)


def groups(
    name: Annotated[str, typer.Argument(metavar="RUN", help="The run's name.", show_default=False)],
    state: Annotated[list[State] | None, typer.Option("--state", help="Only these; may be repeated.")] = None,
    last: Annotated[int, typer.Option("--last", "-n", min=1, help="So many of the newest.")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON array on stdout.")] = False,
    data: DataOption = None,
) -> None:
    """List groups that ended untrained, with the reason: filtered, discarded, expired, dead-lettered.

    What was generated of them lies on S3 and stays there. Groups that ended since the last trained batch are listed
    with the next one.

    Examples:

        roadstead groups arithmetic

        roadstead groups arithmetic --state dead-lettered --json | jq -r '.[].reason'
    """

    def look(store: ObjectStore, keys: RunKeys) -> list[Untrained]:
        return untrained(store, keys, tuple(chosen.value for chosen in state or ()), last)

    found, console = with_run(name, data, look), Console()
    if as_json:
        console.print_json(json.dumps([_values(group) for group in found]))
        return
    if not found:
        console.print("every group that ended was trained on" if not state else "none")
        return
    table = Table("group", "ended", "before step", "attempt", "mean reward", "tokens", "why", box=None, padding=(0, 1))
    for group in found:
        staged = group.staged
        table.add_row(
            group.group_id,
            group.state,
            "end" if group.step is None else str(group.step),
            str(group.attempt),
            "" if staged is None or staged.mean_reward is None else f"{staged.mean_reward:.3f}",
            "" if staged is None else str(staged.tokens),
            escape(group.reason),
        )
    console.print(table)


def _values(group: Untrained) -> dict[str, Any]:
    staged, letter = group.staged, group.letter
    return {
        "group_id": group.group_id,
        "state": group.state,
        "step": group.step,
        "attempt": group.attempt,
        "reason": group.reason,
        "staged": None if staged is None else staged.model_dump(),
        "dead_letter": None if letter is None else letter.model_dump(mode="json"),
    }

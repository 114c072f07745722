"""`roadstead run` and `roadstead resume`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from roadstead.cli.begin import CannotBegin
from roadstead.cli.progress import follow
from roadstead.cli.session import given_config, run_interruptible, session
from roadstead.cli.stack import DataOption
from roadstead.cli.summary import Summary, summarize, summary_table
from roadstead.config import RunConfig, load
from roadstead.infra.stack import data_directory


def register(app: typer.Typer) -> None:
    app.command()(run)
    app.command()(resume)


def run(
    config: Annotated[Path, typer.Argument(help="The run's YAML.", show_default=False)],
    data: DataOption = None,
) -> None:
    """Train: bring up engine, trainer and workers, begin the run, follow it to its end.

    A run that is still going is joined. Ctrl-C stops the processes; the run itself is durable and
    `roadstead resume NAME` goes on with it.

    Examples:

        roadstead run examples/arithmetic/run.yaml

        roadstead run my-run.yaml --data /mnt/big/roadstead
    """
    console = Console()
    console.print(summary_table(execute(load(config), data_directory(data), console)))


def resume(
    name: Annotated[str, typer.Argument(help="The run's name.", show_default=False)],
    data: DataOption = None,
) -> None:
    """Bring the processes of an interrupted run back; it goes on where its workflows stand.

    Example:

        roadstead resume arithmetic
    """
    where = data_directory(data)
    file = given_config(where, name)
    if not file.exists():
        raise CannotBegin(f"run {name!r} is not known in {where}; begin it with `roadstead run CONFIG`")
    config = load(file)
    console = Console()
    console.print(summary_table(execute(config, where, console)))


def execute(config: RunConfig, data: Path, console: Console) -> Summary:
    """Run `config` to its end. Raises WorkflowFailureError, ProcessFailed, Interrupted, ..."""

    async def main() -> Summary:
        def report(line: str) -> None:
            console.print(line, highlight=False, soft_wrap=True, style="dim")

        async with session(config, data, report) as up:
            report(f"logs     {up.logs}")
            if up.temporal_ui:
                report(f"Temporal {up.temporal_ui}/namespaces/default/workflows/{config.name}")
            await up.while_up(follow(up.workflow, console, config.training.steps))
            return summarize(up.store, up.keys)

    return run_interruptible(main())

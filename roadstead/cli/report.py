"""`roadstead report`: a run as one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from roadstead.cli.access import with_run
from roadstead.cli.stack import DataOption
from roadstead.dashboards.report import write_report
from roadstead.storage.keys import RunKeys
from roadstead.storage.objects import ObjectStore


def register(app: typer.Typer) -> None:
    app.command()(report)


def report(
    name: Annotated[str, typer.Argument(metavar="RUN", help="The run's name.", show_default=False)],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="The file to write; RUN.html by default.", show_default=False)
    ] = None,
    with_audit: Annotated[
        bool, typer.Option("--audit/--no-audit", help="Read and check every batch too; minutes in a long run.")
    ] = True,
    data: DataOption = None,
) -> None:
    """Write a run as one self-contained HTML page, from S3 alone: reward, ages, throughput, waste, ledger, trainer,
    data health, attempts, and the command for each step. It needs no server and makes no request.

    Examples:

        roadstead report arithmetic -o report.html

        roadstead report arithmetic --no-audit
    """
    to = output or Path(f"{name}.html")
    if not to.parent.is_dir():
        raise typer.BadParameter(f"{to.parent} is not a folder; make it first", param_hint="-o")

    def write(store: ObjectStore, keys: RunKeys) -> int:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("reading", total=None)

            def told(what: str, done: int, total: int) -> None:
                bar.update(task, description=what, completed=done, total=total)

            return write_report(store, keys, to, with_audit=with_audit, progress=told)

    try:
        size = with_run(name, data, write)
    except PermissionError as error:
        raise typer.BadParameter(
            f"{to} can't be written ({error.strerror}); name another file", param_hint="-o"
        ) from error
    Console().print(f"{to}: {size / 1e6:.2f} MB", highlight=False, soft_wrap=True)

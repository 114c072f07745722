"""`roadstead up` and `roadstead down`: the local Temporal and S3 servers in the background."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from roadstead.cli.session import Interrupted, run_interruptible
from roadstead.infra.stack import Endpoints, StackError, data_directory, endpoints, is_owned, stack

DataOption = Annotated[
    Path | None,
    typer.Option("--data", help="Data directory of the local stack. Default: $ROADSTEAD_DATA, else ./.roadstead."),
]
_UP_S, _DOWN_S = 150.0, 30.0


def register(app: typer.Typer) -> None:
    app.command()(up)
    app.command()(down)


def up(
    data: DataOption = None,
    foreground: Annotated[bool, typer.Option(help="Stay attached; Ctrl-C stops the servers.")] = False,
) -> None:
    """Start the local Temporal and S3 servers and leave them running.

    Runs use them while they are up; without them, each command starts them for as long as it needs them.

    Examples:

        roadstead up

        roadstead up --data /mnt/big/roadstead
    """
    console = Console()
    where = data_directory(data)
    if foreground:
        with contextlib.suppress(Interrupted):
            run_interruptible(_serve(where, console))
        return
    if (found := endpoints(where)) is None:
        found = _start_detached(where)
    _show(found, console)


def down(data: DataOption = None) -> None:
    """Stop the servers that `roadstead up` left running. Data stays.

    Example:

        roadstead down
    """
    where = data_directory(data)
    found = endpoints(where)
    if found is None:
        Console().print(f"nothing is up in {where}")
        return
    os.kill(found.owner_pid, signal.SIGTERM)
    deadline = time.monotonic() + _DOWN_S
    while is_owned(where) or _is_alive(found.owner_pid):
        if time.monotonic() > deadline:
            raise StackError(f"process {found.owner_pid} did not stop the stack within {_DOWN_S:.0f} s; kill it")
        time.sleep(0.1)
    Console().print(f"stopped the stack in {where}")


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _start_detached(where: Path) -> Endpoints:
    log = where / "logs" / "up.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        child = subprocess.Popen(
            [sys.executable, "-m", "roadstead.cli.main", "up", "--foreground", "--data", str(where)],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    deadline = time.monotonic() + _UP_S
    while (found := endpoints(where)) is None:
        if child.poll() is not None:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
            raise StackError(f"the stack did not start (exit {child.returncode}):\n{tail}")
        if time.monotonic() > deadline:
            raise StackError(f"the stack is not up after {_UP_S:.0f} s; look at {log}")
        time.sleep(0.1)
    return found


async def _serve(where: Path, console: Console) -> None:
    async with stack(where, lambda line: console.print(line, highlight=False, soft_wrap=True)) as (found, servers):
        if servers is None:
            raise StackError(f"{where}: the stack is up already (process {found.owner_pid})")
        _show(found, console)
        await asyncio.gather(servers.watch())


def _show(found: Endpoints, console: Console) -> None:
    console.print(f"Temporal  {found.temporal}   UI {found.temporal_ui}", highlight=False, soft_wrap=True)
    console.print(f"S3        {found.s3}", highlight=False)

"""The `roadstead` command.

Owns: the list of commands, and how an error reaches a person: one message on stderr and an exit code.
Exit codes: 0 done, 1 the run or the stack failed, 2 bad input, 3 drained or stopped before its target, 75 killed past
the time it had to stop, 130 interrupted.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any, NoReturn

import typer
from rich.console import Console
from temporalio.client import WorkflowFailureError

from roadstead.cli import (
    audit,
    batch,
    control,
    dashboards,
    demo,
    evals,
    groups,
    metrics,
    replay,
    report,
    run,
    simulate,
    stack,
    status,
)
from roadstead.cli.begin import CannotBegin
from roadstead.cli.session import Interrupted
from roadstead.config import ConfigError
from roadstead.environments.prompts import DatasetError
from roadstead.infra.processes import ProcessFailed
from roadstead.infra.stack import StackError
from roadstead.storage.objects import ObjectMissing, StoreError

app = typer.Typer(
    name="roadstead",
    help="Durable asynchronous RL post-training: vLLM generates, DeepSpeed trains, Temporal drives, S3 remembers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
stack.register(app)
run.register(app)
control.register(app)
status.register(app)
app.add_typer(batch.app, name="batch")
audit.register(app)
groups.register(app)
evals.register(app)
report.register(app)
metrics.register(app)
app.add_typer(dashboards.app, name="dashboards")
replay.register(app)
demo.register(app)
simulate.register(app)

_BAD_INPUT = (ConfigError, DatasetError, ObjectMissing, ValueError)
_FAILED = (ProcessFailed, StackError, StoreError, CannotBegin, demo.DemoFailed, replay.ReplayFailed, TimeoutError)


def main() -> NoReturn:
    """Run one command and leave at once: native threads of Temporal's client have crashed the interpreter's own
    shutdown, and held it for minutes. Whatever was started is ended by then, and what was said is flushed."""
    try:
        _run()
        code: Any = 0
    except SystemExit as leaving:
        code = leaving.code
    if isinstance(code, str):
        _say(code)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BrokenPipeError):  # whoever read us has gone (`| head`)
            stream.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def _run() -> None:
    try:
        app()
    except (Interrupted, KeyboardInterrupt):
        _say("interrupted; everything that was started is stopped")
        sys.exit(130)
    except WorkflowFailureError as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        _say(f"error: the run failed: {cause}")
        sys.exit(1)
    except _BAD_INPUT as error:
        _say(f"error: {error}")
        sys.exit(2)
    except _FAILED as error:
        _say(f"error: {error}")
        sys.exit(1)


def _say(message: str) -> None:
    Console(stderr=True).print(message, markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()

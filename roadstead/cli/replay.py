"""`roadstead replay` and `roadstead bisect`: training steps again, from the log.

Owns: how the questions are put on the command line and the answers are shown. Never touches: torch, the trainer; the
question goes to a process of its own (`python -m roadstead.training.replay`), which can be ended at any time.
Exit codes of both: 0 as on record / a culprit was found, 1 otherwise, 2 bad input.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from roadstead.cli.access import storage_of, tell
from roadstead.cli.session import run_interruptible
from roadstead.cli.stack import DataOption
from roadstead.storage.references import group_id

_END_S = 10.0
"""The process removes its scratch folder when it is asked to end; a model's files take a moment."""
_LONGEST_LINE = 1 << 26
"""Bytes of one event: a report holds about 400 a row of the batch."""
_SHOWN_ROWS = 16
_BAD_INPUT = {"ValueError", "ValidationError", "ConfigError", "ObjectMissing"}

RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="The run's name.", show_default=False)]
JsonOption = Annotated[bool, typer.Option("--json", help="JSON on stdout; progress stays on stderr.")]
Event = dict[str, Any]


class ReplayFailed(RuntimeError):
    """The question was not answered; the text says why."""


class Metric(StrEnum):
    grad_norm = "grad_norm"
    kl = "kl"
    loss = "loss"
    nan = "nan"


def register(app: typer.Typer) -> None:
    app.command()(replay)
    app.command()(bisect)


def replay(
    run: RunArgument,
    step: Annotated[str, typer.Argument(metavar="STEP", help="A step, or A:B for steps A to B-1.", show_default=False)],
    without: Annotated[
        str | None,
        typer.Option(
            metavar="ROWS",
            help="Also train the last step without these rows: comma-separated numbers, group ids or group/member.",
            show_default=False,
        ),
    ] = None,
    only: Annotated[
        str | None,
        typer.Option(metavar="ROWS", help="Also train the last step on these rows only.", show_default=False),
    ] = None,
    max_staleness: Annotated[
        int | None,
        typer.Option(min=0, help="Also train the last step without rows staler than this.", show_default=False),
    ] = None,
    keep: Annotated[
        Path | None,
        typer.Option(help="Folder to make: the resulting weights as a Hugging Face directory.", show_default=False),
    ] = None,
    as_json: JsonOption = False,
    data: DataOption = None,
) -> None:
    """Train steps again, from checkpoint and batch log, and compare the weights with the recorded ones.

    A process group of its own does it, as the run had it; nothing is written to the run. With --without, --only or
    --max-staleness the last step is trained twice from the same state: on its whole batch, and on the rows left.

    Examples:

        roadstead replay arithmetic 17

        roadstead replay arithmetic 10:18 --json

        roadstead replay arithmetic 17 --without g00000042,g00000043/1

        roadstead replay arithmetic 17 --max-staleness 0 --keep /tmp/fresh-only
    """
    first, last = _steps(step)
    rows = {"without": _names(without), "only": _names(only), "max_staleness": max_staleness}
    report = _ask(
        run,
        data,
        {
            "kind": "replay",
            "first": first,
            "last": last,
            "rows": rows if any(value not in (None, []) for value in rows.values()) else None,
            "keep": None if keep is None else str(keep.absolute()),
        },
    )
    console = Console()
    if as_json:
        console.print_json(json.dumps(report))
    else:
        _show_replay(report, console)
        if keep is not None:
            console.print(f"weights in {keep}", highlight=False)
    if not report["equal"]:
        raise typer.Exit(1)


def bisect(
    run: RunArgument,
    step: Annotated[int, typer.Argument(metavar="STEP", min=0, help="The sick step.", show_default=False)],
    metric: Annotated[Metric, typer.Option(help="What is wrong with the step.", show_default=False)],
    threshold: Annotated[
        float | None,
        typer.Option(
            help="The step is sick above this magnitude. Default: from the steps before it.", show_default=False
        ),
    ] = None,
    budget: Annotated[int, typer.Option(min=2, help="Most probes; each is about one training step.")] = 100,
    as_json: JsonOption = False,
    data: DataOption = None,
) -> None:
    """Find the smallest set of rows whose removal cures a step.

    The state before the step is restored once; each probe computes the step without some rows and does not take it.
    Whole groups are searched first, then the members of those that were found.

    Examples:

        roadstead bisect arithmetic 17 --metric grad_norm

        roadstead bisect arithmetic 17 --metric kl --threshold 0.05 --budget 40

        roadstead bisect arithmetic 17 --metric nan --json
    """
    report = _ask(
        run,
        data,
        {"kind": "bisect", "step": step, "metric": metric.value, "threshold": threshold, "budget": budget},
    )
    console = Console()
    if as_json:
        console.print_json(json.dumps(report))
    else:
        _show_bisect(report, console)
    if report["outcome"] != "found":
        raise typer.Exit(1)


# -- asking ---------------------------------------------------------------------------------------------------


def _steps(text: str) -> tuple[int, int]:
    """First and last step of `17`, or of `10:18` (10 to 17, as in `audit --steps`)."""
    first, colon, end = text.partition(":")
    try:
        steps = range(int(first), int(end) if colon else int(first) + 1)
    except ValueError:
        raise ValueError(f"STEP: {text!r} is neither a step (17) nor a range of steps (10:18)") from None
    if not steps or steps[0] < 0:
        raise ValueError(f"STEP: {text!r} holds no step; give a step (17) or a range of steps (10:18)")
    return steps[0], steps[-1]


def _names(text: str | None) -> list[str]:
    return [name.strip() for name in (text or "").split(",") if name.strip()]


def _ask(run: str, data: Path | None, question: Event) -> Event:
    """The answer to a question; its progress on stderr. The local store is up for as long as it takes."""

    async def main() -> Event:
        async with storage_of(run, data) as storage:
            return await _answer({**question, "run": run, "storage": storage.model_dump()}, tell)

    return run_interruptible(main())


async def _answer(question: Event, report: Callable[[str], None]) -> Event:
    """Raises ValueError for a bad question, ReplayFailed for one that could not be answered."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "roadstead.training.replay"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=_LONGEST_LINE,
        start_new_session=True,  # Ctrl-C reaches us, and we end it
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(json.dumps(question).encode())
        process.stdin.close()
        # No deadline here: the process has its own, and says what it waited for.
        async for line in process.stdout:
            event = json.loads(line)
            match event["kind"]:
                case "phase":
                    report(event["text"])
                case "step":
                    report(_step_line(event))
                case "probe":
                    report(_probe_line(event))
                case "failure" if event["type"] in _BAD_INPUT:
                    raise ValueError(event["message"])
                case "failure":
                    raise ReplayFailed(f"{event['type']}: {event['message']}")
                case _:
                    return dict(event)
        raise ReplayFailed(f"the process that replays ended with {await process.wait()} and no answer")
    finally:
        await _end(process)


async def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    try:
        await asyncio.wait_for(process.wait(), _END_S)
    except TimeoutError:
        process.kill()
        await process.wait()


# -- showing --------------------------------------------------------------------------------------------------


def _number(value: float | None, form: str = "{:.4g}") -> str:
    return "not finite" if value is None else form.format(value)


def _verdict(step: Event) -> str:
    return {True: "equal", False: "DIFFERENT", None: "not recorded"}[step["equal"]]


def _step_line(step: Event) -> str:
    metrics = step["metrics"]
    return (
        f"step {step['step']:>4}  {_verdict(step):<12}  loss {metrics['loss']:+.4f}  "
        f"grad norm {_number(metrics['grad_norm'])}  {step['seconds']:.2f} s"
    )


def _probe_line(probe: Event) -> str:
    return (
        f"probe {probe['number']:>3} of at most {probe['budget']}: without {len(probe['removed'])} rows, "
        f"{_number(probe['value'])} on {probe['remaining']}: {'sick' if probe['sick'] else 'well'}  "
        f"{probe['seconds']:.2f} s"
    )


def _show_replay(report: Event, console: Console) -> None:
    table = Table(
        *("step", "weights", "digest", "loss", "grad norm", "seconds"),
        title=f"replay of {report['run_id']} from version {report['restored_version']}",
    )
    for step in report["steps"]:
        metrics = step["metrics"]
        table.add_row(
            *(str(step["step"]), _verdict(step), step["weights_digest"][:16], f"{metrics['loss']:+.5f}"),
            *(_number(metrics["grad_norm"]), f"{step['seconds']:.2f}"),
        )
    console.print(table)
    _show_rows(report["rows"], f"rows of step {report['steps'][-1]['step']}", console)
    if (apart := report["deviation"]) is not None:
        console.print(
            f"the last step's weights are off by at most {apart['largest_difference']:.3g}, "
            f"L2 {apart['difference_norm']:.3g}, of an update of L2 {apart['first_norm']:.3g}",
            highlight=False,
        )
    if (other := report["counterfactual"]) is not None:
        _show_counterfactual(report["steps"][-1], other, console)
    _show_notes(report, console)


def _show_counterfactual(step: Event, other: Event, console: Console) -> None:
    rows = len(other["kept"]) + len(other["dropped"])
    table = Table("", f"all {rows} rows", f"{len(other['kept'])} rows", title=f"step {step['step']} without some rows")
    for name in ("loss", "grad_norm", "kl_to_behavior", "importance_max", "entropy", "loss_tokens", "applied"):
        table.add_row(name, *(_value(side["metrics"][name]) for side in (step, other)))
    updates = other["updates"]
    table.add_row("L2 of the update", _value(updates["first_norm"]), _value(updates["second_norm"]))
    table.add_row("weights", step["weights_digest"][:16], other["weights_digest"][:16])
    console.print(table)
    cosine = "-" if updates["cosine"] is None else f"{updates['cosine']:.6f}"
    console.print(
        f"cosine of the two updates {cosine}, L2 of their difference {updates['difference_norm']:.4g}", highlight=False
    )


def _value(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else "not finite" if value is None else str(value)


def _show_bisect(report: Event, console: Console) -> None:
    sick = (
        "" if report["threshold"] is None else f" (sick above {report['threshold']:.4g}: {report['threshold_source']})"
    )
    console.print(
        f"step {report['step']} of {report['run_id']}: {report['metric']} {_number(report['value'])}{sick}",
        highlight=False,
        soft_wrap=True,
    )
    probes = f"{report['probes']} of at most {report['budget']} probes"
    match report["outcome"]:
        case "healthy":
            text = f"the step is not sick by this measure; {probes}"
        case "unfinished":
            text = f"the budget ended before any part of the batch was found to blame; {probes}. Raise --budget"
        case _ if report["minimal"]:
            text = f"without {len(report['culprits'])} row(s) it is well; each of them is needed; {probes}"
        case _:
            text = (
                f"without {len(report['culprits'])} row(s) it is well, but the budget ended before it was known "
                f"whether fewer do; {probes}. Raise --budget"
            )
    console.print(text, highlight=False, soft_wrap=True)
    if report["outcome"] == "found":
        if report["value_without"] is not None:
            console.print(f"{report['metric']} without them {report['value_without']:.4g}", highlight=False)
        _show_rows(report["culprits"], "culprits", console)
    if report["reproduced"] is False:
        console.print("loss, gradient norm or KL of the whole batch are not those on record", style="yellow")
    _show_notes(report, console)


def _show_rows(rows: list[Event], title: str, console: Console) -> None:
    worst = sorted(rows, key=lambda row: float("inf") if row["loss"] is None else abs(row["loss"]), reverse=True)
    table = Table(*("row", "group", "m", "stale", "reward", "adv", "loss", "kl", "max ratio"), title=title)
    table.columns[1].no_wrap = True  # a row is asked for by it
    table.columns[1].min_width = len(group_id(0))
    for row in worst[:_SHOWN_ROWS]:
        table.add_row(
            *(str(row["row"]), row["group_id"], str(row["member"]), str(row["staleness"])),
            "-" if row["reward"] is None else f"{row['reward']:.4g}",
            *(_number(row[name]) for name in ("advantage", "loss", "kl_to_behavior", "importance_max")),
        )
    console.print(table)
    if len(rows) > _SHOWN_ROWS:
        console.print(f"the {_SHOWN_ROWS} of {len(rows)} rows with the largest share of the loss; --json has all")


def _show_notes(report: Event, console: Console) -> None:
    for note in report["notes"]:
        console.print(f"note: {note}", style="yellow", highlight=False, soft_wrap=True)

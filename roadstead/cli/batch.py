"""`roadstead batch`: what trained each step, from the batch log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from roadstead.cli.access import with_run
from roadstead.cli.stack import DataOption
from roadstead.storage import batches, export, steps
from roadstead.storage.batches import BatchCommit
from roadstead.storage.keys import RunKeys
from roadstead.storage.objects import ObjectMissing, ObjectStore

app = typer.Typer(help="The exact trained batches of a run.", no_args_is_help=True)

RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="The run's name.", show_default=False)]
JsonOption = Annotated[bool, typer.Option("--json", help="JSON on stdout.")]


@app.command("list")
def list_batches(run: RunArgument, as_json: JsonOption = False, data: DataOption = None) -> None:
    """One line a committed batch.

    Examples:

        roadstead batch list arithmetic

        roadstead batch list arithmetic --json
    """
    found = with_run(run, data, _listed)
    console = Console()
    if as_json:
        console.print_json(json.dumps(found))
        return
    table = Table("step", "rows", "tokens", "reward", "max staleness", "digest", "recorded", title=f"batches of {run}")
    for batch in found:
        reward = "-" if batch["mean_reward"] is None else f"{batch['mean_reward']:.3f}"
        table.add_row(
            *(str(batch["step"]), str(batch["rows"]), str(batch["response_tokens"]), reward),
            *(str(batch["max_staleness"]), batch["digest"][:16], "yes" if batch["recorded"] else "not yet"),
        )
    console.print(table)


@app.command()
def show(
    run: RunArgument,
    step: Annotated[int, typer.Argument(help="Training step, from 0.", show_default=False)],
    as_json: JsonOption = False,
    data: DataOption = None,
) -> None:
    """The rows of one batch: prompt, response, reward, advantage, and which version made which token.

    Examples:

        roadstead batch show arithmetic 7

        roadstead batch show arithmetic 7 --json | jq '.[0]'
    """
    table = with_run(run, data, lambda store, keys: batches.read(store, _commit(store, keys, step)))
    console = Console()
    if as_json:
        console.print_json(json.dumps(table.to_pylist(), default=str))
        return
    shown = Table(
        *("slot", "group", "m", "prompt", "response", "reward", "adv", "stale", "versions"),
        title=f"step {step} of {run}: {table.num_rows} rows",
    )
    for row in table.to_pylist():
        reward = "-" if row["reward"] is None else f"{row['reward']:.2f}"
        shown.add_row(
            *(str(row["slot"]), row["group_id"], str(row["member"]), row["prompt_text"], row["response_text"]),
            *(reward, f"{row['advantage']:+.2f}", str(row["staleness"]), _spans(row["version_spans"])),
        )
    console.print(shown)


@app.command("export")
def export_batches(
    run: RunArgument,
    to: Annotated[Path, typer.Option("--to", help="Folder to write; made if missing.", show_default=False)],
    data: DataOption = None,
) -> None:
    """Copy every recorded batch out as a plain Parquet file, verified on the way.

    Examples:

        roadstead batch export arithmetic --to out

        python -c "import pandas; print(pandas.read_parquet('out').groupby('step').reward.mean())"
    """
    console = Console()

    def copy(store: ObjectStore, keys: RunKeys) -> list[Path]:
        records = steps.all_of(store, keys)
        return [
            export.export_batch(store, keys, record, to)
            for record in track(records, description="exporting", console=Console(stderr=True))
        ]

    files = with_run(run, data, copy)
    console.print(f"{len(files)} batches in {to}", highlight=False)


def _listed(store: ObjectStore, keys: RunKeys) -> list[dict[str, Any]]:
    found = []
    recorded = {record.step: record for record in steps.all_of(store, keys)}
    step = 0
    while (commit := batches.find(store, keys, step)) is not None:
        record = recorded.get(step)
        found.append(
            {
                **commit.model_dump(include={"step", "rows", "response_tokens", "max_staleness", "digest"}),
                "mean_reward": record.mean_reward if record else None,
                "recorded": record is not None,
                "location": store.url(commit.data.key),
            }
        )
        step += 1
    return found


def _commit(store: ObjectStore, keys: RunKeys, step: int) -> BatchCommit:
    commit = batches.find(store, keys, step)
    if commit is None:
        raise ObjectMissing(f"run {keys.run_id!r} has no committed batch for step {step}; see `roadstead batch list`")
    return commit


def _spans(spans: list[dict[str, int]]) -> str:
    """`3` for a response of one version, `3:0-17 4:17-40` for one that crossed an update."""
    if len(spans) == 1:
        return str(spans[0]["version"])
    return " ".join(f"{s['version']}:{s['start']}-{s['end']}" for s in spans)

"""`roadstead batch`: what trained each step, from the batch log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import duckdb
import pyarrow as pa
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table

from roadstead.cli.access import with_run
from roadstead.cli.audit import StepsOption, step_progress, step_range
from roadstead.cli.stack import DataOption
from roadstead.environments.prompts import load_prompts
from roadstead.storage import batches, export, runs, steps
from roadstead.storage.audit import Verdict
from roadstead.storage.audit import verify as verify_run
from roadstead.storage.audit.queries import connect
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


@app.command()
def verify(
    run: RunArgument,
    steps_: StepsOption = None,
    with_weights: Annotated[
        bool, typer.Option("--weights", help="Read the weight files too: every tensor of every version.")
    ] = False,
    as_json: JsonOption = False,
    data: DataOption = None,
) -> None:
    """Compute every digest of a run again: batches, staged groups, train rows, step records, the chain of weights.

    Exit code 0: the log is whole, 1: it is not.

    Examples:

        roadstead batch verify arithmetic

        roadstead batch verify arithmetic --steps 0:10 --weights

        roadstead batch verify arithmetic --json | jq .problems
    """
    chosen = step_range(steps_)

    def prove(store: ObjectStore, keys: RunKeys) -> Verdict:
        with step_progress("verifying") as progress:
            return verify_run(store, keys, chosen, with_weights=with_weights, progress=progress)

    verdict = with_run(run, data, prove)
    console = Console()
    if as_json:
        console.print_json(json.dumps({"ok": verdict.ok, **verdict.model_dump()}))
    else:
        for problem in verdict.problems:
            line = f"step {problem.step}: {problem.kind}: {problem.key}: {problem.detail}"
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        result = "whole" if verdict.ok else f"NOT whole, {len(verdict.problems)} problem(s)"
        console.print(
            f"{run}: {verdict.steps} steps, {verdict.objects} objects, {verdict.bytes / 1e6:.1f} MB read: the log is "
            f"{result}",
            highlight=False,
            soft_wrap=True,
        )
        if verdict.unrecorded:
            console.print(f"committed and not recorded yet: step(s) {list(verdict.unrecorded)}", highlight=False)
    if not verdict.ok:
        raise typer.Exit(1)


@app.command()
def query(
    run: RunArgument,
    sql: Annotated[
        str, typer.Argument(help="SQL for DuckDB; the views are rows, batches and train.", show_default=False)
    ],
    as_json: JsonOption = False,
    data: DataOption = None,
) -> None:
    """Ask the log in SQL: `rows` has the scalars of every trained row, `batches` tokens and texts too, `train` what the
    trainer computed. They join on step, group_id, member.

    Examples:

        roadstead batch query arithmetic "select step, avg(reward) from rows group by step order by step"

        roadstead batch query arithmetic "select prompt_text, response_text, reward from batches where step = 7" --json
    """

    def ask(store: ObjectStore, keys: RunKeys) -> pa.Table:
        try:
            return connect(store, keys).sql(sql).to_arrow_table()
        except duckdb.Error as error:
            raise ValueError(f"query: {error}") from error

    answer = with_run(run, data, ask)
    console = Console()
    if as_json:
        console.print_json(json.dumps(answer.to_pylist(), default=str))
        return
    table = Table(*answer.column_names)
    for row in answer.to_pylist():
        table.add_row(*(escape(f"{value:.6g}" if isinstance(value, float) else str(value)) for value in row.values()))
    console.print(table)


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


@app.command()
def replayable(
    run: RunArgument,
    steps_: Annotated[str, typer.Argument(metavar="STEPS", help="10:20, 10: or one step.", show_default=False)],
    to: Annotated[Path, typer.Option("-o", "--to", help="JSONL file to write.", show_default=False)],
    prompts: Annotated[
        Path | None,
        typer.Option(help="The run's own prompt file: its other columns, such as answers, are written too."),
    ] = None,
    data: DataOption = None,
) -> None:
    """Write trained groups as prompts that bring their trajectories: another run trains on them without generating.

    That run needs data.train_on_external: true, the same tokenizer, group size and temperature. Groups with a member
    without a reward are left out.

    Examples:

        roadstead batch replayable arithmetic 10:20 -o replayed.jsonl --prompts prompts.jsonl
    """
    chosen = step_range(steps_)
    assert chosen is not None, "given"

    def rows(store: ObjectStore, keys: RunKeys) -> list[dict[str, Any]]:
        columns = _columns_of(prompts, runs.read(store, keys).dataset_digest) if prompts else {}
        found = []
        for record in steps.all_of(store, keys):
            if record.step in chosen:
                for row in export.replayable(store, keys, record):
                    source = columns.get(row["source_prompt_id"], {})
                    # An environment begins from its own row's prompt; the log has what it began with.
                    found.append({**source, **row, "prompt": source.get("prompt", row["prompt"])})
        return found

    found = with_run(run, data, rows)
    if not found:
        raise ValueError(f"STEPS: run {run!r} has no recorded step in {steps_}; see `roadstead batch list {run}`")
    part = to.with_name(f"{to.name}.part")
    part.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in found))
    part.replace(to)
    Console().print(f"{len(found)} groups in {to}", highlight=False)


def _columns_of(file: Path, digest: str) -> dict[str, dict[str, Any]]:
    """Rows of the run's prompt file by prompt id. Raises ValueError for another file."""
    found = load_prompts(file)
    if found.digest != digest:
        raise ValueError(f"--prompts: {file} has digest {found.digest}, the run's prompts had {digest}; give that file")
    return {str(row["prompt_id"]): dict(row) for row in found.rows}


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

"""`roadstead simulate`: what a staleness bound and a concurrency cost, on one's own response lengths.

Owns: options, table, progress. Never touches: the simulation's rules. The simulator is imported when it is called, so
that other commands don't wait for it.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from roadstead.cli.access import with_run
from roadstead.cli.session import Interrupted
from roadstead.cli.stack import DataOption
from roadstead.storage import batches as batch_log
from roadstead.storage.keys import RunKeys
from roadstead.storage.objects import ObjectMissing, ObjectStore

if TYPE_CHECKING:
    from roadstead.benchmarks.simulator.comparison import Row
    from roadstead.benchmarks.simulator.workload import Trace

_BATCH_SIZE = 16

_LEGEND = (
    "tok/s: trained, ± standard deviation over seeds; idle: the trainer; slots: of the engines in use; waste: tokens "
    "discarded or masked; length: mean of the trained; age: mean p99 max; ours/this: tok/s of reserve_occupy over this "
    "one's, a tie within two standard errors"
)


def register(app: typer.Typer) -> None:
    app.command()(simulate)


def simulate(
    lengths: Annotated[
        str | None,
        typer.Option(
            help="Own response lengths, a path or glob: JSONL with `length` (and `group`, `prompt`) a line, or Parquet "
            "with these columns or of a run's batches. Default: a synthetic trace.",
        ),
    ] = None,
    from_run: Annotated[
        str | None, typer.Option("--from-run", metavar="RUN", help="Take lengths and batch size from this run.")
    ] = None,
    long_tail: Annotated[bool, typer.Option("--long-tail", help="The synthetic trace with three huge groups.")] = False,
    policy: Annotated[
        list[str] | None, typer.Option(help="Rule to simulate; repeat for more. Default: all.", show_default=False)
    ] = None,
    max_staleness: Annotated[
        list[int] | None, typer.Option(min=0, help="S; repeat for more. Default: 1, 2 and 3.", show_default=False)
    ] = None,
    engines: Annotated[int, typer.Option(min=1, help="Inference engines.")] = 2,
    concurrency: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Responses at once, an engine; repeat for more. Default: 40.", show_default=False),
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Groups a batch. Default: the run's, else 16.", show_default=False)
    ] = None,
    group_size: Annotated[int, typer.Option(min=1, help="Responses a group where the lengths name no group.")] = 8,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each case, each with the groups in another order.")] = 5,
    batches: Annotated[int, typer.Option(min=1, help="Batches measured in a run, after 25 of warm-up.")] = 40,
    partial_rollout: Annotated[
        bool,
        typer.Option(help="Responses in flight go on with new weights; without it they finish with the old first."),
    ] = True,
    trainer_gpus: Annotated[int, typer.Option(min=1, help="GPUs of the trainer, for the default costs.")] = 6,
    costs: Annotated[
        Path | None,
        typer.Option(help="JSON with measured costs in seconds; see docs/simulator.md. Default: H20 and Qwen3-8B."),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the comparison into this .png or .svg.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on stdout.")] = False,
    data: DataOption = None,
) -> None:
    """Simulate training with your lengths under several rules and bounds, before GPUs are rented.

    Shows throughput, idle time, waste and ages for each max_staleness and policy. The default costs come from
    datasheets and are not calibrated: trust the order of the rows more than their size, or give your own.

    Policies: reserve_occupy (this project's), in_order (NeMo-RL), verl_wait, verl_drop, trl, roll, mask_over_age,
    admission_gate (AReaL), ship_side_gate (prime-rl), synchronous. The two gates don't keep the bound.

    Examples:

        roadstead simulate

        roadstead simulate --lengths lengths.jsonl --max-staleness 1 --max-staleness 2 --plot choice.png

        roadstead simulate --from-run arithmetic --policy reserve_occupy --policy in_order

        roadstead simulate --policy reserve_occupy --concurrency 20 --concurrency 40 --concurrency 80

        roadstead simulate --costs costs.json --engines 4 --seeds 10 --json | jq '.rows[0]'
    """
    from roadstead.benchmarks.simulator import plots
    from roadstead.benchmarks.simulator.comparison import compare
    from roadstead.benchmarks.simulator.costs import h20_qwen3_8b, load_costs
    from roadstead.benchmarks.simulator.run import simulate as run
    from roadstead.benchmarks.simulator.simulation import Setup

    if plot is not None:
        plots.check_format(plot)
    price = h20_qwen3_8b(trainer_gpus)
    if costs is not None:
        price = load_costs(costs, price)
    trace, of_run = _trace(lengths, from_run, long_tail, group_size, data)
    groups = batch_size or of_run or _BATCH_SIZE
    notes = Console(stderr=True, style="dim", highlight=False)
    cases = _cases(policy, list(dict.fromkeys(max_staleness or (1, 2, 3))), groups, notes)
    rows: dict[int, list[Row]] = {}
    with _interruptible(), Progress(console=Console(stderr=True), transient=True) as progress:
        levels = list(dict.fromkeys(concurrency or (40,)))
        task = progress.add_task("simulating", total=len(levels) * len(cases) * seeds)
        for level in levels:
            setup = Setup(engines, level, partial_rollout)
            reports = []
            for bound, name in cases:
                for seed in range(seeds):
                    reports.append(
                        run(name, bound, trace, price, seed=seed, batches=batches, batch_size=groups, setup=setup)
                    )
                    progress.advance(task)
            rows[level] = compare(reports)
    statistics = trace.statistics()
    title = (
        f"{trace.name}: groups of {statistics['responses'] / statistics['groups']:.3g}, responses median "
        f"{statistics['response_median']:.0f}, p95 {statistics['response_p95']:.0f}; {groups} groups a batch, "
        f"{engines} engines; {seeds} seeds x {batches} batches"
    )
    if plot is not None:
        plots.draw({f"concurrency {level}": found for level, found in rows.items()}, plot, title)
    console = Console()
    if as_json:
        answer: dict[str, Any] = {
            "trace": {"name": trace.name, **statistics},
            "costs": asdict(price),
            "batch_size": groups,
            "engines": engines,
            "partial_rollout": partial_rollout,
            "batches": batches,
            "rows": [{"concurrency": level, **row.to_json()} for level, found in rows.items() for row in found],
        }
        console.print_json(json.dumps(answer))
        return
    console.print(title, highlight=False)
    for level, found in rows.items():
        console.print(_table(found, f"{level} responses at once, an engine"))
    notes.print(_LEGEND)
    if costs is None:
        notes.print("costs are datasheet figures, not calibrated (docs/simulator.md); --costs takes measured ones")


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C ends the command as it ends the others; nothing was started, nothing is left."""
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted from None


def _trace(
    lengths: str | None, run: str | None, long_tail: bool, group_size: int, data: Path | None
) -> tuple[Trace, int | None]:
    """The trace, and the groups a batch of the run that it is from."""
    from roadstead.benchmarks.simulator.workload import Trace, grouped, read_trace, rows_of_batch, synthetic

    given = [name for name, value in (("--lengths", lengths), ("--from-run", run), ("--long-tail", long_tail)) if value]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} each say where lengths come from; give one")
    if lengths is not None:
        return read_trace(lengths, group_size), None
    if run is None:
        return synthetic(long_tail), None

    def read(store: ObjectStore, keys: RunKeys) -> tuple[list[Any], int]:
        rows: list[Any] = []
        step = groups = 0
        while (commit := batch_log.find(store, keys, step)) is not None:
            rows += rows_of_batch(batch_log.read(store, commit))
            groups = len(commit.groups)
            step += 1
        if not rows:
            raise ObjectMissing(f"run {keys.run_id!r} has no committed batch yet; see `roadstead batch list`")
        return rows, groups

    rows, groups = with_run(run, data, read)
    return Trace(f"run {run}", grouped(rows, group_size, f"run {run}")), groups


def _cases(names: list[str] | None, bounds: list[int], batch_size: int, notes: Console) -> list[tuple[int, str]]:
    """(S, policy); a policy that can't run under an S is left out with a note, or refused if it was asked for."""
    from roadstead.benchmarks.simulator.policies import POLICIES

    for name in names or ():
        if name not in POLICIES:
            raise ValueError(f"--policy: {name!r} is unknown; use {', '.join(POLICIES)}")
    cases = []
    for bound in bounds:
        for name in dict.fromkeys(names or POLICIES):
            try:
                POLICIES[name](batch_size, bound)
            except ValueError as error:
                if names:
                    raise
                notes.print(f"left out: {error}", soft_wrap=True)
            else:
                cases.append((bound, name))
    return cases


def _table(rows: list[Row], title: str) -> Table:
    compared = any(row.in_throughput for row in rows)
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    for heading in ("S", "policy"):
        table.add_column(heading, no_wrap=True)
    for heading in (
        "tok/s",
        "s/batch",
        "idle",
        "slots",
        "waste",
        "length",
        "age",
        *(("ours/this",) if compared else ()),
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for before, row in zip([None, *rows], rows, strict=False):
        if before is not None and before.max_staleness != row.max_staleness:
            table.add_section()
        ratio = row.in_throughput
        table.add_row(
            *(str(row.max_staleness), row.policy),
            f"{row.throughput.mean:.0f} ±{row.throughput.sd:.0f}",
            f"{row.batch_seconds.mean:.4g}",
            *(f"{1 - row.trainer_utilisation.mean:.0%}", f"{row.engine_utilisation.mean:.0%}"),
            *(f"{row.waste.mean:.1%}", f"{row.mean_length.mean:.0f}"),
            "-" if row.ages.mean is None else f"{row.ages.mean:.2f} {row.ages.p99} {row.ages.maximum}",
            *((f"{ratio.mean:.3f} {ratio.verdict}" if ratio else "",) if compared else ()),
        )
    return table

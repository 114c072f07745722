"""`python -m tests.chaos`: seeded faults on a real local stack, checked from S3 alone. See README.md beside it."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import sys
import tempfile
import time
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

import boto3
import botocore.config
import typer
from rich.console import Console

from tests.chaos import features
from tests.chaos.checks import check
from tests.chaos.driver import Driver, Outcome, first_after
from tests.chaos.report import Result, line, reproduce, table, to_json
from tests.chaos.schedule import KINDS, Schedule, schedule, select
from tests.chaos.stand import BUCKET, PREFIX, Stand
from tests.chaos.verdict import S3Reader, Verdict

STEPS = 10
"""Times four groups: the forty prompts of the dataset once, so that what was trained is the dataset, exactly."""
FAULTS = 3
_WIDTH = 140
"""Of the table in a log file."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def chaos(
    runs: Annotated[int, typer.Option(min=1, help="Runs, with seeds SEED, SEED + 1, ...")] = 3,
    seed: Annotated[int, typer.Option(help="Of the first run.")] = 0,
    kinds: Annotated[str, typer.Option(help="Globs of kinds to choose from, comma-separated.")] = "*",
    without: Annotated[str, typer.Option(help="Globs of kinds to leave out, comma-separated.")] = "",
    each: Annotated[bool, typer.Option(help="One run for each kind, struck by it alone.")] = False,
    faults: Annotated[int, typer.Option(min=0, help="Faults a run.")] = FAULTS,
    given: Annotated[
        str,
        typer.Option("--features", help="Of every run, comma-separated, or 'none'. Default: the seed's; --each: none."),
    ] = "",
    steps: Annotated[int, typer.Option(min=4, help="Training steps a run.")] = STEPS,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a run on stdout.")] = False,
    keep: Annotated[Path | None, typer.Option(help="Keep logs and data of failed runs under this folder.")] = None,
    show: Annotated[bool, typer.Option("--list", help="List the kinds of faults and end.")] = False,
) -> None:
    """Break training runs at seeded moments and check from S3 alone that nothing was lost, doubled or too old.

    Exit codes: 0 all runs held, 1 at least one did not, 2 bad input.

    Examples:

        python -m tests.chaos --runs 500 --seed 1000

        python -m tests.chaos --runs 4 --faults 1 --kinds 'kill:engine*'

        python -m tests.chaos --each --kinds 'kill:*,hang:engine*'
    """
    if show:
        print("\n".join(KINDS))
        return
    try:
        chosen = select(kinds.split(","))
        dropped = select(without.split(",")) if without else []
        left = [kind for kind in chosen if kind not in dropped]
        pools = [[kind] for kind in left] if each else [left] * runs
        chosen_features = _features(given or ("none" if each else ""))
        plans = [
            schedule(seed + number, pool, steps=steps, count=faults, given=chosen_features)
            for number, pool in enumerate(pools)
        ]
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from error
    console = Console(stderr=as_json, highlight=False)
    if not console.is_terminal:
        console = Console(stderr=as_json, highlight=False, width=_WIDTH)
    folder = Path(tempfile.mkdtemp(prefix="roadstead-chaos-"))
    try:
        options = {
            "kinds": (kinds, "*"),
            "without": (without, ""),
            "faults": (faults, FAULTS),
            "steps": (steps, STEPS),
            "features": (given, ""),
        }
        results = asyncio.run(_all(folder, plans, console, options, keep, as_json, each))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    console.print(table(results))
    failed = [r for r in results if r.wrong]
    console.print(f"{len(results) - len(failed)} of {len(results)} runs held")
    raise typer.Exit(1 if failed else 0)


def _features(text: str) -> list[str] | None:
    """None: as the seed has it. Raises ValueError for one that is none."""
    if not text:
        return None
    names = [] if text == "none" else text.split(",")
    features.changes(names)
    return names


async def _all(
    folder: Path,
    plans: list[Schedule],
    console: Console,
    options: dict[str, tuple[Any, Any]],
    keep: Path | None,
    as_json: bool,
    each: bool,
) -> list[Result]:
    """options: name to (value, default), of those that a schedule depends on."""
    results = []
    async with Stand(folder / "stand", console.print) as stand:
        for plan in plans:
            outcome = await Driver(stand, plan).run()
            result = Result(outcome, await asyncio.to_thread(_verdict, stand, outcome))
            _times(stand, result)
            results.append(result)
            console.print(line(result), markup=False, soft_wrap=True)
            for wrong in result.wrong:
                console.print(f"    {wrong}", markup=False, soft_wrap=True)
            if result.wrong:
                if each:
                    options |= {
                        "kinds": (plan.faults[0].kind, "*"),
                        "features": (",".join(plan.features) or "none", ""),
                    }
                given = " ".join(f"--{name} {value}" for name, (value, default) in options.items() if value != default)
                console.print(f"    again: {reproduce(result, given)}", markup=False, soft_wrap=True)
                if keep is not None:
                    shutil.copytree(stand.data / "logs", keep / outcome.name / "logs", dirs_exist_ok=True)
                    _keep_output(stand, outcome, keep / outcome.name)
            if as_json:
                print(json.dumps(to_json(result)), flush=True)
    return results


def _verdict(stand: Stand, outcome: Outcome) -> Verdict:
    """Of what is in the bucket, read past the proxy. A run that failed is looked at too, as far as it goes."""
    client = boto3.session.Session().client(
        "s3",
        endpoint_url=stand.s3_url,
        region_name="us-east-1",
        aws_access_key_id=stand.keys.access_key,
        aws_secret_access_key=stand.keys.secret_key,
        config=botocore.config.Config(s3={"addressing_style": "path"}),
    )
    dataset = [json.loads(text)["prompt_id"] for text in (stand.folder / "prompts.jsonl").read_text().splitlines()]
    try:
        return check(S3Reader(client, BUCKET, f"{PREFIX}/{outcome.name}"), dataset=dataset)
    except Exception as error:  # whatever is on S3, it is a finding and not the end of the series
        return Verdict(violations=[f"S3 can't be read as a run: {type(error).__name__}: {error}"])


def _times(stand: Stand, result: Result) -> None:
    """What S3 says of each blow: the next admission, the next trained step."""
    first: dict[str, float] = {}
    for at, key in stand.puts:
        if fnmatchcase(key, f"{PREFIX}/{result.outcome.name}/batches/step=*/train-*.parquet"):
            first.setdefault(key, at)
    blows = result.outcome.blows
    for blow, later in itertools.zip_longest(blows, blows[1:]):
        blow.admitted_at = first_after(result.verdict.reserved, blow.since)
        blow.trained_at = first_after(first.values(), blow.since)
        until = later.at if later else float("inf")
        seen = [blow.since, *sorted(t for t in first.values() if blow.since < t <= until)]
        blow.stall_s = max((b - a for a, b in itertools.pairwise(seen)), default=None)


def _keep_output(stand: Stand, outcome: Outcome, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "schedule.json").write_text(
        json.dumps([{"kind": b.fault.kind, "at": time.strftime("%H:%M:%S", time.gmtime(b.at))} for b in outcome.blows])
    )
    (folder / "servers.txt").write_text("\n".join(x.text for x in stand.server_lines))


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    app()

"""`roadstead metrics`: where the metrics of this machine's processes are, and how Prometheus finds them."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
import yaml
from rich.console import Console

from roadstead.cli.stack import DataOption
from roadstead.infra.stack import data_directory
from roadstead.metrics.server import targets_folder

_INTERVAL = "5s"
"""Of scrapes. Steps take seconds to minutes; a gauge that changes between two scrapes is seen only once."""
_ANSWER_S = 2.0


@dataclass(frozen=True)
class Target:
    address: str
    up: bool
    job: str
    run: str
    role: str
    engine: str | None = None


def register(app: typer.Typer) -> None:
    app.command()(metrics)


def metrics(
    name: Annotated[str, typer.Argument(metavar="RUN", help="The run's name.", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
    data: DataOption = None,
) -> None:
    """Print the scrape configuration of a run for Prometheus, and its targets on this machine.

    The configuration stays right while the run's processes come and go. Ask on each machine that has some.

    Examples:

        roadstead metrics arithmetic > prometheus.yml && prometheus --config.file=prometheus.yml

        roadstead metrics arithmetic --json | jq .targets
    """
    folder = data_directory(data) / "runs" / name
    if not folder.is_dir():
        known = sorted(other.name for other in folder.parent.glob("*"))
        raise ValueError(f"run {name!r}: nothing of it in {folder.parent}; known there: {', '.join(known) or 'none'}")
    configuration = scrape_configuration(folder)
    targets = asyncio.run(_targets(targets_folder(folder)))
    console = Console(highlight=False, soft_wrap=True)
    if as_json:
        console.print_json(json.dumps({**configuration, "targets": [asdict(target) for target in targets]}))
        return
    console.print(yaml.safe_dump(configuration, sort_keys=False), markup=False, end="")
    for target in targets:  # as comments, so that the output is a whole file
        what = " ".join(filter(None, [target.job, target.run, target.role, target.engine]))
        console.print(f"# {'up  ' if target.up else 'down'} http://{target.address}/metrics  {what}", markup=False)


def scrape_configuration(folder: Path) -> dict[str, Any]:
    """For prometheus.yml; run, role, engine and job of each target come from its file. folder: of the run."""
    discovery = {"files": [str(targets_folder(folder) / "*.json")], "refresh_interval": _INTERVAL}
    job = {"job_name": "roadstead", "scrape_interval": _INTERVAL, "file_sd_configs": [discovery]}
    return {"scrape_configs": [job]}


async def _targets(folder: Path) -> list[Target]:
    async with httpx.AsyncClient(timeout=_ANSWER_S, trust_env=False) as client:
        return await asyncio.gather(*(_target(client, file) for file in sorted(folder.glob("*.json"))))


async def _target(client: httpx.AsyncClient, file: Path) -> Target:
    (group,) = json.loads(file.read_text())
    (address,) = group["targets"]
    try:
        up = (await client.get(f"http://{address}/metrics")).is_success
    except httpx.HTTPError:
        up = False
    return Target(address=address, up=up, **group["labels"])

"""`roadstead dashboards`: six dashboards and their alerts, as files, in a Grafana, or on a Prometheus of this machine.

Owns: the options. Never touches: what is on a dashboard.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from roadstead.cli.access import tell, with_run
from roadstead.cli.audit import step_progress
from roadstead.cli.session import Interrupted, run_interruptible
from roadstead.cli.stack import DataOption
from roadstead.dashboards.grafana import DATASOURCE_UID, FOLDER_UID
from roadstead.infra.ports import remembered_ports
from roadstead.infra.processes import Supervisor
from roadstead.infra.prometheus_server import SCRAPE_INTERVAL, configuration, prometheus_spec
from roadstead.infra.stack import data_directory
from roadstead.storage.audit import audit
from roadstead.storage.keys import RunKeys
from roadstead.storage.objects import ObjectStore

if TYPE_CHECKING:
    from roadstead.dashboards.grafana.marks import Mark

_GRAFANA_URL = "http://localhost:3000"
_LOOK_S = 2.0
"""Between looks for runs that are new."""

app = typer.Typer(no_args_is_help=True, help="Dashboards and alerts for Grafana and Prometheus.")

GrafanaOption = Annotated[
    str, typer.Option("--grafana", envvar="GRAFANA_URL", metavar="URL", help="Address of your Grafana.")
]
DatasourceOption = Annotated[
    str | None,
    typer.Option(
        "--datasource",
        metavar="UID",
        help="Uid of a Prometheus data source that your Grafana has; without it, one of ours.",
        show_default=False,
    ),
]


@app.command()
def render(
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder to write to.")] = Path("dashboards"),
    grafana: GrafanaOption = _GRAFANA_URL,
    datasource: DatasourceOption = None,
    data: DataOption = None,
) -> None:
    """Write everything as files: six dashboards (JSON), Prometheus' alert rules and prometheus.yml, Grafana's rules.

    Grafana can provision the dashboards from the folder; the rules and prometheus.yml are for a Prometheus of yours.
    prometheus.yml has the runs that there are in the data directory now.

    Examples:

        roadstead dashboards render

        roadstead dashboards render -o /etc/roadstead --grafana https://grafana.example.org
    """
    with _needs_the_extra():
        from roadstead.dashboards.grafana import render as files
    try:
        written = files.render(
            output,
            grafana_url=grafana,
            folder_uid=FOLDER_UID,
            datasource_uid=datasource or DATASOURCE_UID,
        )
        written.append(output / "prometheus.yml")
        written[-1].write_text(configuration(data_directory(data), (output / files.RULES).resolve()))
    except OSError as error:
        raise typer.BadParameter(f"{output} can't be written: {error.strerror}", param_hint="-o") from error
    for file in written:
        Console().print(str(file), highlight=False, soft_wrap=True)


@app.command()
def push(
    runs: Annotated[
        list[str] | None,
        typer.Argument(metavar="RUN", help="Runs whose resumes, drains and bad steps are marked.", show_default=False),
    ] = None,
    grafana: GrafanaOption = _GRAFANA_URL,
    token: Annotated[
        str | None, typer.Option(envvar="GRAFANA_TOKEN", help="Token of a service account.", show_default=False)
    ] = None,
    user: Annotated[
        str | None, typer.Option(envvar="GRAFANA_USER", help="Instead of a token.", show_default=False)
    ] = None,
    password: Annotated[
        str | None, typer.Option(envvar="GRAFANA_PASSWORD", help="Of --user.", show_default=False)
    ] = None,
    prometheus: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Address of your Prometheus as Grafana reaches it.", show_default=False),
    ] = None,
    datasource: DatasourceOption = None,
    alerts: Annotated[
        bool, typer.Option("--alerts/--no-alerts", help="Let Grafana evaluate the alerts; not if Prometheus does.")
    ] = True,
    with_audit: Annotated[
        bool, typer.Option("--audit/--no-audit", help="Audit the runs too and mark critical findings; minutes.")
    ] = True,
    data: DataOption = None,
) -> None:
    """Put folder, data source, dashboards and alert rules into a Grafana, and marks of runs on its charts.

    Push again after an update or a resume: what is there is brought up to date, nothing is doubled. The account needs
    the role Editor, and Admin to make the data source (--prometheus).

    Examples:

        GRAFANA_TOKEN=glsa_... roadstead dashboards push --prometheus http://localhost:9090

        roadstead dashboards push --user admin --datasource my-prometheus --no-alerts

        roadstead dashboards push arithmetic --datasource my-prometheus
    """
    if (prometheus is None) == (datasource is None):
        raise typer.BadParameter(
            "give one of the two: the address of a Prometheus, or the uid of a data source that Grafana has",
            param_hint="--prometheus / --datasource",
        )
    if (token is None) == (user is None):
        raise typer.BadParameter(
            "give a token (GRAFANA_TOKEN) or a user and a password (GRAFANA_USER, GRAFANA_PASSWORD)",
            param_hint="--token / --user",
        )
    with _needs_the_extra():
        from roadstead.dashboards.grafana import push as to
        from roadstead.dashboards.grafana.boards import BOARDS
        from roadstead.dashboards.grafana.rules import for_grafana
    uid = datasource or DATASOURCE_UID
    marks = {run: with_run(run, data, _marks(with_audit)) for run in runs or ()}
    try:
        to.push(
            to.Grafana(grafana, token or (user or "", password or ""), tell),
            [board.json(uid) for board in BOARDS],
            [for_grafana(FOLDER_UID, uid)] if alerts else [],
            prometheus=(prometheus, SCRAPE_INTERVAL) if prometheus else None,
            marks=marks,
        )
    except to.GrafanaRefused as error:
        raise SystemExit(f"error: {error}") from error


@app.command()
def prometheus(
    port: Annotated[
        int | None,
        typer.Option(help="Port on 127.0.0.1; by default one that the data directory keeps.", show_default=False),
    ] = None,
    grafana: GrafanaOption = _GRAFANA_URL,
    data: DataOption = None,
) -> None:
    """Run a Prometheus that scrapes every run of the data directory and evaluates the alerts, until Ctrl-C.

    For a machine that has none. Its database stays, under prometheus/ of the data directory.

    Examples:

        roadstead dashboards prometheus

        roadstead dashboards prometheus --data /mnt/big/roadstead --port 9091
    """
    with _needs_the_extra():
        from roadstead.dashboards.grafana import render as files
    where = data_directory(data)
    folder = where / "prometheus"
    files.render(folder / "rules", grafana_url=grafana, folder_uid=FOLDER_UID, datasource_uid=DATASOURCE_UID)
    chosen = port or remembered_ports(where / "ports.json", ["prometheus"])["prometheus"]
    with contextlib.suppress(Interrupted):
        run_interruptible(_serve(where, folder, folder / "rules" / files.RULES, chosen))


async def _serve(data: Path, folder: Path, rules: Path, port: int) -> None:
    config = folder / "prometheus.yml"
    config.write_text(configuration(data, rules))
    supervisor = Supervisor(tell)
    try:
        await supervisor.start(prometheus_spec(folder / "tsdb", config, port, data / "logs" / "prometheus.log"))
        await asyncio.gather(supervisor.watch(), _follow(data, rules, config, supervisor))
    finally:
        await supervisor.stop()


async def _follow(data: Path, rules: Path, config: Path, supervisor: Supervisor) -> None:
    """Tell Prometheus of runs that are new."""
    while True:
        await asyncio.sleep(_LOOK_S)
        if (now := configuration(data, rules)) != config.read_text():
            config.write_text(now)
            os.kill(supervisor.pids()["prometheus"], signal.SIGHUP)


def _marks(with_audit: bool) -> Callable[[ObjectStore, RunKeys], list[Mark]]:
    def read(store: ObjectStore, keys: RunKeys) -> list[Mark]:
        from roadstead.dashboards.grafana.marks import marks_of

        if not with_audit:
            return marks_of(store, keys, None)
        with step_progress(f"auditing {keys.run_id}") as progress:
            return marks_of(store, keys, audit(store, keys, progress=progress))

    return read


@contextlib.contextmanager
def _needs_the_extra() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] not in {"grafana_client", "grafana_foundation_sdk"}:
            raise
        raise SystemExit(
            f"error: {error.name} is not installed; `make setup` installs it, or in your own environment: "
            "URLLIB3_NO_OVERRIDE=1 pip install --no-binary urllib3-future 'roadstead[dashboards]'"
        ) from error

"""`roadstead status` beside a run that goes: a real workflow answers, the real command asks."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import pytest
import yaml
from temporalio.client import Client

from roadstead.storage.keys import RunKeys
from roadstead.storage.objects import ObjectStore
from roadstead.workflows.messages import RunStatus
from tests.integration.conftest import Servers
from tests.integration.test_workflows import plan, start, workers
from tests.support import tiny
from tests.support.activities import World
from tests.support.report_run import ReportRun

pytestmark = pytest.mark.slow

LIMIT_S = 90


async def status(data: Path, name: str, *options: str, interrupt_on: str | None = None) -> tuple[int, str, str]:
    """The command's exit code and streams. interrupt_on: Ctrl-C when a line has this in it."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "roadstead.cli.main", "status", name, *options, "--data", str(data)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=dict(os.environ) | {"COLUMNS": "100"},
    )
    assert process.stdout is not None
    early = b""
    while interrupt_on is not None and interrupt_on.encode() not in early:
        line = await asyncio.wait_for(process.stdout.readline(), LIMIT_S)
        assert line, "it ended before it was interrupted"
        early += line
    if interrupt_on is not None:
        process.send_signal(signal.SIGINT)
    out, err = await asyncio.wait_for(process.communicate(), LIMIT_S)
    return process.returncode or 0, (early + out).decode(), err.decode()


async def test_once_as_json_and_until_the_end(
    temporal: Client, servers: Servers, store: ObjectStore, tmp_path: Path
) -> None:
    the_plan = plan(target_steps=12)
    name = the_plan.run_id
    values = yaml.safe_load(tiny.config(tmp_path, name).dump())
    values["storage"] |= {"endpoint_url": servers.s3.endpoint_url, "bucket": servers.s3.bucket}
    values["temporal"]["address"] = servers.temporal
    given = tmp_path / "data" / "runs" / name / "given.yaml"
    given.parent.mkdir(parents=True)
    given.write_text(yaml.safe_dump(values))
    ReportRun(store, RunKeys("runs", name)).write(2, killed_at=0)
    slow = True
    # Later groups take long while the command is looked at, then no time at all.
    world = World(generation_s=lambda order: 15.0 if slow and order.position >= 8 else 0.1)
    async with workers(temporal, name, world):
        handle = await start(temporal, the_plan)
        while (await handle.query("status", result_type=RunStatus)).version < 1:
            await asyncio.sleep(0.2)
        code, out, err = await status(tmp_path / "data", name)
        assert code == 0, err
        assert "buffer" in out and "▨" in out and "of 12 = (S + 1) x B groups" in out and "step    0" in out
        code, out, _ = await status(tmp_path / "data", name, "--json")
        live = RunStatus.model_validate(json.loads(out)["live"])
        assert code == 0 and live.run_id == name and live.version >= 1
        code, out, err = await status(tmp_path / "data", name, "--watch", interrupt_on="step    0")
        assert code == 130 and "the run goes on" in err
        assert (await handle.query("status", result_type=RunStatus)).phase == "running"
        watching = asyncio.create_task(status(tmp_path / "data", name, "--watch"))
        slow = False
        final = await asyncio.wait_for(handle.result(), LIMIT_S)
        code, out, err = await watching
    assert final.phase == "finished" and code == 0, err
    assert [f"step {step:>4}" in out for step in range(12)] == [True] * 12
    assert "trained trajectories" in out

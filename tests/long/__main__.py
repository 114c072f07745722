"""A long run on a real Temporal server: `make long [STEPS=10000]`. Histories and memory must stay flat.

The workflows and the ledger's Updates are the real ones; generation and training take no time. `--filtered 0.5` takes
half of all groups out, which must be refilled without a dead-lock. Every hundredth of the run prints the events and
bytes of the run's present history, the largest step history so far, and the memory of the worker. It fails when a
history comes near Temporal's limits (51,200 events, 50 MB) or the memory grows.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import resource
import tempfile
import time
from pathlib import Path

from rich.console import Console
from temporalio.client import Client

from roadstead.infra import temporal_server
from roadstead.infra.ports import LOOPBACK, remembered_ports
from roadstead.infra.processes import Supervisor
from roadstead.workers.host import connect
from roadstead.workflows.messages import GroupOrder, RunStatus, step_workflow_id
from tests.integration.test_workflows import plan, start, workers
from tests.support.activities import World

_EVENTS, _BYTES = 51_200, 50 << 20
"""Temporal ends a workflow whose history is larger."""
_SHARE = 0.2
_GROWTH = 1.25
"""Of the worker's resident memory from the tenth to the last hundredth."""


async def measure(client: Client, run_id: str, step: int) -> tuple[int, int, int]:
    """Events and bytes of the run's present history, events of a finished step's."""
    run = (await client.get_workflow_handle(run_id).describe()).raw_description.workflow_execution_info
    done = (
        await client.get_workflow_handle(step_workflow_id(run_id, step)).describe()
    ).raw_description.workflow_execution_info
    return run.history_length, run.history_size_bytes, done.history_length


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


async def main(steps: int, filtered: float) -> None:
    console = Console(highlight=False)

    def reason(order: GroupOrder) -> str | None:
        return "a coin" if random.Random(order.position).random() < filtered else None

    the_plan = plan(target_steps=steps, groups_per_batch=2, slots_per_buffer=2, max_staleness=1, empty_batches=50)
    world = World(filtered=reason)
    rows: list[tuple[int, int, int, int, float]] = []
    with tempfile.TemporaryDirectory() as scratch:
        data = Path(scratch)
        ports = remembered_ports(data / "ports.json", temporal_server.PORTS)
        supervisor = Supervisor(print)
        try:
            await supervisor.start(temporal_server.temporal_spec(data, ports))
            client = await connect(f"{LOOPBACK}:{ports['temporal']}", "default")
            async with workers(client, the_plan.run_id, world):
                handle = await start(client, the_plan)
                began, due = time.monotonic(), 1
                while world.version < steps:
                    await asyncio.sleep(0.2)
                    # What the activities keep for the checks of short runs would look like a leak here.
                    for kept in (world.batches, world.generated, world.admitted_under, world.trained):
                        for key in list(kept)[:-100]:
                            del kept[key]  # type: ignore[attr-defined]
                    if world.version < due:
                        continue
                    events, size, step = await measure(client, the_plan.run_id, max(0, world.version - 5))
                    rows.append((world.version, events, size, step, resident_mb()))
                    console.print(
                        f"step {world.version:>6}  {time.monotonic() - began:>6.0f} s  run history {events:>5} events "
                        f"{size / 1024:>6.0f} KB  step history {step:>4} events  worker {rows[-1][4]:>5.0f} MB"
                    )
                    due = world.version + max(1, steps // 100)
                status: RunStatus = await handle.result()
        finally:
            await supervisor.stop()
    assert status.trained == 2 * steps and status.admitted == status.trained + status.filtered, status
    assert abs(status.filtered / status.admitted - filtered) < 0.1, status
    assert max(row[1] for row in rows) < _SHARE * _EVENTS and max(row[2] for row in rows) < _SHARE * _BYTES
    early, late = rows[min(9, len(rows) - 1)][4], rows[-1][4]
    assert late < _GROWTH * early, f"memory grew from {early:.0f} to {late:.0f} MB"
    events, size = max(row[1] for row in rows), max(row[2] for row in rows) / 1024
    console.print(
        f"flat: {steps} steps, {status.filtered} of {status.admitted} groups filtered; at most {events} events and "
        f"{size:.0f} KB in the run's history; memory {early:.0f} -> {late:.0f} MB"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.long", description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--filtered", type=float, default=0.0, help="share of groups that a filter takes out")
    given = parser.parse_args()
    asyncio.run(main(given.steps, given.filtered))

"""Records workflow histories of the present code: `python -m tests.histories.record NAME`, before a release.

A run that was begun with an old release is replayed by the new one at its next workflow task: every shape that was
ever released must still replay. test_replay.py replays all that lie here, without a server.
"""

from __future__ import annotations

import asyncio
import gzip
import sys
import tempfile
from pathlib import Path

from temporalio.client import Client, WorkflowHistory

from roadstead.infra import temporal_server
from roadstead.infra.ports import LOOPBACK, remembered_ports
from roadstead.infra.processes import Supervisor
from roadstead.workers.host import connect
from roadstead.workflows.restore import restore
from tests.integration.test_workflows import long_tail, plan, recovered, start, workers
from tests.support.activities import World

FOLDER = Path(__file__).parent


async def histories_of(client: Client, run_id: str) -> list[WorkflowHistory]:
    """Of every execution of the run and of its steps."""
    found = {
        (w.id, w.run_id)
        for query in (f'RoadsteadRun = "{run_id}"', f'WorkflowId = "{run_id}"')
        async for w in client.list_workflows(query)
    }
    return [await client.get_workflow_handle(id_, run_id=run).fetch_history() for id_, run in sorted(found)]


async def lives(client: Client) -> dict[str, list[WorkflowHistory]]:
    """Short runs that pass through every branch: failures, lag, continue-as-new, pause, drain, resume, stop."""
    found = {}

    whole = plan(run_id="recorded-whole", target_steps=5, steps_per_execution=2, slots_per_buffer=5)
    world = World(generation_s=long_tail, broken=lambda o: o.position % 7 == 3, lag=lambda o: o.position % 5 == 4)
    async with workers(client, whole.run_id, world):
        handle = await start(client, whole)
        await handle.signal("pause")
        await handle.signal("unpause")
        await handle.result()
        found["whole"] = await histories_of(client, whole.run_id)

    drained = plan(run_id="recorded-drained", target_steps=99)
    async with workers(client, drained.run_id, World(generation_s=long_tail)):
        handle = await start(client, drained)
        await asyncio.sleep(1.5)
        await handle.signal("drain")
        await handle.result()
        found["drained"] = await histories_of(client, drained.run_id)

    resumed = plan(run_id="recorded-resumed", attempt=2, target_steps=99)
    state = restore(resumed, recovered(resumed, 10, [(40, 10), (42, 9)], cursor=44, backlog=(41, 43)), 4, now=0).state
    async with workers(client, resumed.run_id, World(generation_s=long_tail, training_s=0.2)):
        handle = await start(client, state)
        await asyncio.sleep(2)
        await handle.signal("stop", 5.0)
        await handle.result()
        found["resumed"] = await histories_of(client, resumed.run_id)
    return found


async def main(name: str) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        data = Path(scratch)
        ports = remembered_ports(data / "ports.json", temporal_server.PORTS)
        supervisor = Supervisor(print)
        try:
            await supervisor.start(temporal_server.temporal_spec(data, ports))
            client = await connect(f"{LOOPBACK}:{ports['temporal']}", "default")
            for life, histories in (await lives(client)).items():
                for number, history in enumerate(histories):
                    file = FOLDER / f"{name}-{life}-{number:02d}.json.gz"
                    file.write_bytes(gzip.compress(history.to_json().encode(), mtime=0))
                    print(f"{file.name}: {history.workflow_id}, {len(history.events)} events")
        finally:
            await supervisor.stop()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))

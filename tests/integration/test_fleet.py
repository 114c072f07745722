"""Two vLLM servers, one of which loses its core while groups are generated.

The first part plays the run around real engines, supervisor, watchers, fleet and activity: it orders groups, publishes
versions, and tries again what failed. A whole run does the same in the slow part. Everything is checked on the groups
that were staged, against the versions that they were ordered under.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from structlog.testing import capture_logs
from temporalio import activity
from temporalio.client import Client
from temporalio.testing import ActivityEnvironment

from roadstead.activities.rollout import RolloutGroup
from roadstead.cli import begin
from roadstead.config import RunConfig
from roadstead.environments.prompts import load_prompts
from roadstead.environments.rewards import load_environment
from roadstead.environments.text import TextCodec
from roadstead.inference.engine import EngineDown
from roadstead.inference.fleet import Fleet
from roadstead.infra import roles
from roadstead.infra.ports import free_port, remembered_row
from roadstead.infra.processes import Supervisor
from roadstead.infra.s3_server import credentials
from roadstead.infra.stack import endpoints
from roadstead.metrics.registry import Metrics
from roadstead.storage import steps, weights
from roadstead.storage.keys import RunKeys
from roadstead.storage.objects import ObjectStore
from roadstead.storage.open import open_run
from roadstead.storage.parquet import decode
from roadstead.storage.references import StagedGroup, group_id
from roadstead.workers.host import connect
from roadstead.workers.local import engines
from roadstead.workers.rollout import fleet_of
from roadstead.workflows.messages import GroupOrder
from tests.histories.record import histories_of
from tests.integration.conftest import Servers
from tests.integration.test_workflows import check_batches, plan, run_to_end
from tests.support import tiny
from tests.support.activities import World
from tests.support.workplace import LIMIT_S, Workplace

pytestmark = pytest.mark.timeout(2 * LIMIT_S)

WAIT_S = 200
SHAPE = {"rollout": {"group_size": 4, "max_tokens": 100, "ignore_eos": True}}
ENGINES = {"max_model_len": 128, "replicas": 2, "kv_cache_bytes": 64 << 20, "update_timeout_s": 60}


@dataclass
class Told:
    """What became of it. Times are microseconds since the epoch, as in the rows."""

    admitted: dict[str, int]
    """The version that each group was ordered under."""
    killed_at: int = 0
    victim: str = ""
    """The engine whose core was killed then, by id."""
    lines: list[str] = field(default_factory=list)
    """The supervisor's."""
    logs: list[Any] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    """Of every staged group, a row a trajectory."""

    def engines(self) -> dict[str, set[str]]:
        """By group."""
        found = defaultdict(set)
        for row in self.rows:
            found[row["group_id"]].add(row["engine_id"])
        return found

    def back_at(self) -> int:
        """When the victim began the first group after its death that it also finished."""
        return min(r["started_at"] for r in self.rows if self.is_back(r))

    def is_back(self, row: dict[str, Any]) -> bool:
        return bool(row["engine_id"] == self.victim and row["started_at"] > self.killed_at)


def staged_rows(store: ObjectStore, keys: RunKeys, known: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Of all groups on S3; `known` keeps what was read before."""
    for key in store.keys(f"{keys.root}/groups/"):
        if key not in known:
            known[key] = decode(store.get(key)).to_pylist()
            for row in known[key]:
                row.update({at: int(row[at].timestamp() * 1e6) for at in ("started_at", "finished_at")})
    return [row for rows in known.values() for row in rows]


def core_of(folder: Path) -> int:
    """The process that holds the weights: the child of the server with that folder."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it ended while we looked
                arguments = (entry / "cmdline").read_bytes().decode().split("\0")
                if "roadstead.inference.launcher" in arguments and str(folder) in arguments:
                    children = (entry / "task" / entry.name / "children").read_text().split()
                    (core,) = [
                        c for c in children if b"resource_tracker" not in Path(f"/proc/{c}/cmdline").read_bytes()
                    ]
                    return int(core)
    pytest.fail(f"no server of {folder}")


def check(told: Told) -> None:
    """What holds in both parts."""
    names = told.engines()
    assert all(len(engines) == 1 for engines in names.values()), "members share what their engine made of the prompt"
    assert len(set.union(*names.values())) == 2
    for row in told.rows:
        oldest = min(span["version"] for span in row["version_spans"])
        assert oldest >= told.admitted[row["group_id"]], (row["group_id"], row["engine_id"])
    meanwhile = [r for r in told.rows if told.killed_at < r["started_at"] and r["finished_at"] < told.back_at()]
    assert meanwhile and told.victim not in {r["engine_id"] for r in meanwhile}, "the other one went on alone"
    assert any(line.startswith("engine-1 ") and "starting it again" in line for line in told.lines)
    assert not any(line.startswith("engine-0 ") and "starting it again" in line for line in told.lines)


# -- engines, supervisor, fleet and activity --------------------------------------------------------------------


class Play:
    """Orders groups, three at a time, and publishes a version every eight."""

    def __init__(self, rollout: RolloutGroup, store: ObjectStore, keys: RunKeys) -> None:
        self._rollout, self._store, self._keys = rollout, store, keys
        self._version = self._position = 0
        self._manifest = weights.manifest_of(store, keys, 0)
        self.told = Told(admitted={})
        self.failed: dict[str, int] = defaultdict(int)

    async def orders(self) -> None:
        while True:
            order = GroupOrder(attempt=1, version=self._version, reserved_at=1, position=self._position)
            self._position += 1
            self.told.admitted[group_id(order.position)] = order.version
            if self._position % 8 == 0:
                await asyncio.to_thread(self._publish)
            await self._generate(order)
            await asyncio.sleep(0.3)  # leave some of the processors to a server that starts

    async def _generate(self, order: GroupOrder) -> None:
        while True:
            try:
                await ActivityEnvironment().run(self._rollout.rollout_group, order)
                return
            except EngineDown:
                self.failed[group_id(order.position)] += 1
                await asyncio.sleep(0.3)

    def _publish(self) -> None:
        """The same tensors under the next number."""
        m = self._manifest
        ref = weights.WeightsRef(version=m.version + 1, digest=m.digest, files=m.files)
        self._manifest = weights.publish(self._store, self._keys, ref, parent=m, batch_digest="none")
        self._version = self._manifest.version


def configured(servers: Servers, place: Workplace, folder: Path) -> RunConfig:
    """place: has a model; nothing else of it is used."""
    port = remembered_row(folder / "ports.json", ["engine", "engine-1"])["engine"]
    address = {"endpoint_url": servers.s3.endpoint_url}
    return tiny.config(
        place.folder, f"fleet-{time.time_ns()}", **SHAPE, engine={**ENGINES, "port": port}, storage=address
    )


@contextlib.asynccontextmanager
async def beside(*jobs: Any) -> AsyncIterator[Callable[[], None]]:
    """Run them for the block; the call raises what ended one of them."""
    tasks = [asyncio.ensure_future(job) for job in jobs]

    def look() -> None:
        for task in tasks:
            if task.done():
                task.result()

    try:
        yield look
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def played(
    servers: Servers, workplace: Workplace, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Told, dict[str, int]]:
    folder = tmp_path_factory.mktemp("fleet")
    config = configured(servers, workplace, folder)
    store, keys = open_run(config)
    begin.record_run(config, begin.check_inputs(config), store, keys)
    file = folder / "run.yaml"
    file.write_text(config.dump())
    lines: list[str] = []
    supervisor = Supervisor(lines.append)
    specs = [s for s in roles.engines_and_trainer(config, file, folder, folder / "logs") if s.name != "trainer"]
    try:
        with capture_logs() as logs:
            await supervisor.start(*specs)
            first, second = engines(config, folder)
            fleet = fleet_of(config, [first, second], store, keys, Metrics("rollout"))
            play = Play(rollouts(config, store, keys, fleet), store, keys)
            told, known = play.told, dict[str, list[dict[str, Any]]]()
            told.lines, told.logs = lines, logs

            async def until(what: str, true: Callable[[], bool]) -> None:
                deadline = time.monotonic() + WAIT_S
                while True:
                    look()
                    told.rows = await asyncio.to_thread(staged_rows, store, keys, known)
                    if true():
                        return
                    assert time.monotonic() < deadline, f"{what}: not within {WAIT_S} s; {fleet.stage}"
                    await asyncio.sleep(0.2)

            async with beside(supervisor.watch(), fleet.run(), *(play.orders() for _ in range(3))) as look:
                await until("a group of each engine", lambda: len({r["engine_id"] for r in told.rows}) == 2)
                core = core_of(second.folder)
                async with asyncio.timeout(WAIT_S):
                    for busy in (False, True):  # so that the kill meets a group at its beginning
                        while (fleet.in_flight[second.engine_id] > 0) != busy:
                            await asyncio.sleep(0.01)
                told.victim, told.killed_at = second.engine_id, time.time_ns() // 1000
                os.kill(core, signal.SIGKILL)
                await until("a group that it began after its return", lambda: any(map(told.is_back, told.rows)))
    finally:
        await supervisor.stop()
    return told, play.failed


def rollouts(config: RunConfig, store: ObjectStore, keys: RunKeys, fleet: Fleet) -> RolloutGroup:
    return RolloutGroup(
        config=config,
        store=store,
        keys=keys,
        fleet=fleet,
        prompts=load_prompts(Path(config.data.prompts)),
        environment=load_environment(config.data.environment),
        codec=TextCodec(Path(config.model.path), chat=config.data.chat_template),
    )


def test_the_others_go_on_while_a_core_is_dead_and_no_group_is_older_than_admitted(
    played: tuple[Told, dict[str, int]],
) -> None:
    told, _ = played
    check(told)
    assert len(set(told.admitted.values())) > 1, "versions went on too"


def test_groups_on_the_engine_that_died_are_generated_again_by_another(played: tuple[Told, dict[str, int]]) -> None:
    told, failed = played
    names, started = told.engines(), {row["group_id"]: row["started_at"] for row in told.rows}
    lost = [group for group in failed if group in names]
    assert lost, "the kill met a group in generation"
    assert all(started[group] > told.killed_at for group in lost)
    assert any(told.victim not in names[group] for group in lost)


def test_the_engine_that_died_is_named_when_it_leaves_and_when_it_returns(played: tuple[Told, dict[str, int]]) -> None:
    told, _ = played
    about = [
        x for x in told.logs if x.get("engine") == told.victim and x["event"] in {"engine.ejected", "engine.returned"}
    ]
    assert [line["event"] for line in about[:3]] == ["engine.returned", "engine.ejected", "engine.returned"]
    _, out, back = about[:3]
    assert out["since"] == back["since"] and out["why"] and back["away_s"] > 1, "it had to be started again"


# -- the gate ---------------------------------------------------------------------------------------------------


@dataclass
class Together(World):
    """No group of a version is finished before `groups` of it have begun."""

    groups: int = 4
    begun: dict[int, set[int]] = field(default_factory=dict)
    """Positions, by version."""

    @activity.defn
    async def rollout_group(self, order: GroupOrder) -> StagedGroup:
        begun = self.begun.setdefault(order.version, set())
        begun.add(order.position)
        while len(begun) < self.groups:
            activity.heartbeat()
            await asyncio.sleep(0.05)
        return await super().rollout_group(order)


async def test_a_gate_that_reopens_admits_as_many_groups_as_there_is_room_for(temporal: Client) -> None:
    """max_staleness 0: every publication reopens it for a whole batch. One admission an event would stand still."""
    the_plan, world = plan(max_staleness=0, target_steps=3), Together()
    await run_to_end(temporal, the_plan, world)
    check_batches(the_plan, world)
    assert {version: len(begun) for version, begun in world.begun.items()} == {0: 4, 1: 4, 2: 4}


# -- whole runs -----------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_a_whole_run_goes_on_with_one_engine_and_takes_the_other_back(workplace: Workplace) -> None:
    name = "fleet"
    process = workplace.start(name, training__steps=1000, **SHAPE, engine=ENGINES)
    try:
        told = await asyncio.to_thread(_live, workplace, name, process)
    finally:
        process.kill()
        process.wait(10)
    told.admitted = await _ordered(workplace, name)
    check(told)
    store, keys = workplace.store(name)
    trained = {
        group for record in steps.all_of(store, keys) for group, state in record.terminal.items() if state == "trained"
    }
    meanwhile = {r["group_id"] for r in told.rows if told.killed_at < r["finished_at"] < told.back_at()}
    assert trained & meanwhile, "what the other one generated alone is trained"


def _live(place: Workplace, name: str, process: subprocess.Popen[str]) -> Told:
    store, keys = place.store(name)
    told, known = Told(admitted={}), dict[str, list[dict[str, Any]]]()

    def until(what: str, true: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not true():
            if process.poll() is not None:
                pytest.fail(f"the run ended while the test waited for {what}:\n{process.communicate(timeout=10)[0]}")
            assert time.monotonic() < deadline, f"{what}: not within {WAIT_S} s"
            time.sleep(0.2)
            told.rows = staged_rows(store, keys, known)

    until("groups of both engines", lambda: len({row["engine_id"] for row in told.rows}) == 2)
    told.victim = max(row["engine_id"] for row in told.rows)  # ports in a row: the higher one is engine-1's
    told.killed_at = time.time_ns() // 1000
    os.kill(core_of(place.data / "runs" / name / "engine-1"), signal.SIGKILL)
    until("a group that it began after its return", lambda: any(map(told.is_back, told.rows)))
    process.send_signal(signal.SIGTERM)
    told.lines = process.communicate(timeout=60)[0].splitlines()
    told.rows = staged_rows(store, keys, known)
    return told


async def _ordered(place: Workplace, name: str) -> dict[str, int]:
    """Versions of the admissions, from the orders that the workflows gave."""
    found, admitted = endpoints(place.data), dict[str, int]()
    assert found is not None
    for history in await histories_of(await connect(found.temporal, "default"), name):
        for event in history.events:
            scheduled = event.activity_task_scheduled_event_attributes
            if scheduled.activity_type.name == "rollout_group":
                order = GroupOrder.model_validate_json(scheduled.input.payloads[0].data)
                admitted[group_id(order.position)] = order.version
    return admitted


@pytest.mark.slow
def test_a_run_on_an_engine_of_the_users_own_starts_none_and_leaves_it_running(workplace: Workplace) -> None:
    name, port = "own-engine", free_port()
    changes = {**SHAPE, "training__steps": 3, "engine": {"max_model_len": 128, "urls": [f"http://127.0.0.1:{port}"]}}
    address = endpoints(workplace.data)
    assert address is not None
    file = workplace.folder / "there.yaml"
    file.write_text(tiny.config(workplace.folder, name, **changes, storage={"endpoint_url": address.s3}).dump())
    folder = workplace.data / "runs" / name / "engine" / f"vllm-127.0.0.1-{port}"
    with (workplace.folder / "there.log").open("w") as log:
        server = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "roadstead.inference.launcher",
                "--config",
                file,
                "--port",
                str(port),
                "--folder",
                folder,
            ],
            env={**os.environ, **credentials(workplace.data).environment},
            stdout=log,
            stderr=log,
        )
    try:
        output = workplace.run(name, **changes)
        assert "starting engine" not in output and server.poll() is None
        store, keys = workplace.store(name)
        assert {row["engine_id"] for row in staged_rows(store, keys, {})} == {f"vllm-127.0.0.1-{port}"}
        records = steps.all_of(store, keys)
        assert len(records) == 3 and sorted(p.name for p in folder.iterdir())[-1] >= "v=00000002"
    finally:
        server.kill()
        server.wait(10)

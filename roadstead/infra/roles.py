"""The processes of one run on this machine: engines, trainer, and a worker a role.

Owns: their command lines, environments, log files, readiness and signs of life. Never touches: what they do.
Invariant: a sign of life comes from the part that does the work: the engine's core, not its web server; the worker's
event loop, not its process. None of them needs Temporal or S3, whose failure is no reason to restart a worker.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from temporalio.api.enums.v1 import TaskQueueType
from temporalio.api.taskqueue.v1 import TaskQueue
from temporalio.api.workflowservice.v1 import DescribeTaskQueueRequest
from temporalio.client import Client
from temporalio.service import RPCError

from roadstead.config import ConfigError, RunConfig
from roadstead.infra.health import answers, status_of
from roadstead.infra.processes import HANG_S, Broken, Probe, ProcessSpec
from roadstead.training.client import TrainerClient
from roadstead.training.protocol import TrainerUnavailable
from roadstead.workers import local
from roadstead.workers.host import pulse_file
from roadstead.workers.local import EnginePlace
from roadstead.workflows.options import queue

_CORE_S = 3.0
"""For one answer of an engine's core. A server whose core died in mid-question may leave it open, and the supervisor's
own limit is 10 s."""
_BOOT_S = 300.0
"""Imports of torch and vLLM on a busy machine, plus the load of a model of a few GB."""
WORKERS = ("orchestrator", "ledger", "rollout", "train")


def engines_and_trainer(config: RunConfig, config_file: Path, folder: Path, logs: Path) -> list[ProcessSpec]:
    """A process for each engine that is started here: none for those of engine.urls."""
    here = [place for place in local.engines(config, folder) if place.port is not None]
    gpus = _gpus(config, len(here))
    return [
        *(_engine(config, place, gpu, config_file, logs) for place, gpu in zip(here, gpus, strict=True)),
        _trainer(config, config_file, folder, logs),
    ]


def _engine(
    config: RunConfig, place: EnginePlace, gpu: Mapping[str, str], config_file: Path, logs: Path
) -> ProcessSpec:
    core = f"{place.url}/weight_info"

    async def ready() -> bool:
        return await answers(core)

    async def alive() -> bool:
        # Answered by the core itself; /health is the web server's, which outlives a core that hangs. When the core has
        # died the server answers 500, then stops listening, and then waits for ever for requests that nobody answers.
        # A question that a dying server leaves open is asked again; one that a load of weights holds up is no death.
        try:
            async with asyncio.timeout(_CORE_S):
                status = await status_of(core)
        except TimeoutError:
            return False
        if status is None or status >= 500:
            raise Broken(f"its core has died: {core} {'is closed' if status is None else f'answers {status}'}")
        return True

    return _spec(
        place.name,
        f"vLLM server ({config.engine.device}) at {place.url}",
        "roadstead.inference.launcher",
        ("--port", str(place.port), "--folder", str(place.folder)),
        (config_file, logs),
        (ready, alive),
        # A core that loads weights answers nobody, and only this says for how long it may.
        hang_s=max(HANG_S, config.engine.update_timeout_s),
        env=gpu,
    )


def _gpus(config: RunConfig, count: int) -> list[dict[str, str]]:
    """The environment that gives each replica a GPU of its own: the next one of those that are visible here."""
    if config.engine.device == "cpu":
        return [{}] * count
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = [str(i) for i in range(count)] if visible is None else visible.split(",")
    if len(gpus) < count:
        raise ConfigError(
            f"engine.replicas: {count} want a GPU each, CUDA_VISIBLE_DEVICES={visible} shows {len(gpus)}; "
            "lower the first or show more"
        )
    return [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in gpus[:count]]


def _trainer(config: RunConfig, config_file: Path, folder: Path, logs: Path) -> ProcessSpec:
    socket = local.trainer_socket(folder)

    async def ready() -> bool:
        # It answers while it boots; it is ready once it has a version.
        try:
            return (await TrainerClient(socket).status())["version"] is not None
        except TrainerUnavailable:
            return False

    async def alive() -> bool:
        # It answers while it trains, and while its launcher brings a dead rank back.
        try:
            status = await TrainerClient(socket).status()
        except TrainerUnavailable:
            return False
        # Rank 0 answers while another one hangs, and waits for it in a collective for minutes.
        still = {rank: seconds for rank, seconds in status["silence"].items() if seconds > HANG_S}
        if still:
            raise Broken(f"rank {', '.join(still)} hangs: no sign of life for {max(still.values()):.0f} s")
        return status["version"] is not None or time.time() - status["since"] < _BOOT_S

    return _spec(
        "trainer",
        f"DeepSpeed trainer, {config.training.ranks} rank(s), ZeRO-{config.training.zero_stage}",
        "roadstead.training.launcher",
        ("--socket", str(socket), "--folder", str(local.trainer_folder(folder))),
        (config_file, logs),
        (ready, alive),
    )


def workers(config: RunConfig, config_file: Path, folder: Path, logs: Path) -> list[ProcessSpec]:
    return [_worker(config, role, config_file, folder, logs) for role in WORKERS]


def _worker(config: RunConfig, role: str, config_file: Path, folder: Path, logs: Path) -> ProcessSpec:
    pulse = pulse_file(folder, role)
    polled = _polled(config, role)

    async def ready() -> bool:
        # Temporal lists a dead worker's polls for minutes; the pulse is of this one.
        return pulse.exists() and await polled()

    return _spec(
        f"{role}-worker",
        f"{role} worker on task queue {queue(config.name, role)}",
        f"roadstead.workers.{role}",
        ("--folder", str(folder)),
        (config_file, logs),
        (ready, _beats(pulse)),
        leftovers=(pulse,),
    )


def _beats(file: Path) -> Probe:
    """Alive while the file is touched: compared with the last look, not with a clock."""
    last = 0

    async def alive() -> bool:
        nonlocal last
        try:
            before, last = last, file.stat().st_mtime_ns
        except FileNotFoundError:
            return False
        return last != before

    return alive


def _polled(config: RunConfig, role: str) -> Probe:
    """Whether Temporal has seen the worker poll its queue."""
    kind = TaskQueueType.TASK_QUEUE_TYPE_WORKFLOW if role == "orchestrator" else TaskQueueType.TASK_QUEUE_TYPE_ACTIVITY
    request = DescribeTaskQueueRequest(
        namespace=config.temporal.namespace,
        task_queue=TaskQueue(name=queue(config.name, role)),
        task_queue_type=kind,
    )

    async def ready() -> bool:
        try:
            client = await Client.connect(config.temporal.address or "", namespace=config.temporal.namespace)
            answer = await client.workflow_service.describe_task_queue(request)
        except (RPCError, RuntimeError):
            return False
        return len(answer.pollers) > 0

    return ready


def _spec(
    name: str,
    what: str,
    module: str,
    arguments: tuple[str, ...],
    files: tuple[Path, Path],
    probes: tuple[Probe, Probe],
    *,
    hang_s: float = HANG_S,
    env: Mapping[str, str] | None = None,
    leftovers: tuple[Path, ...] = (),
) -> ProcessSpec:
    (config_file, logs), (ready, alive) = files, probes
    return ProcessSpec(
        name=name,
        what=what,
        argv=(sys.executable, "-m", module, "--config", str(config_file), *arguments),
        log=logs / f"{name}.log",
        ready=ready,
        ready_timeout_s=_BOOT_S,
        alive=alive,
        hang_s=hang_s,
        env={"PYTHONUNBUFFERED": "1", **(env or {})},
        leftovers=leftovers,
    )

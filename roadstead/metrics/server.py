"""Serving one process's metrics, and telling Prometheus where.

Owns: the process's /metrics on a loopback port, and `<folder>/metrics/<role>.json`, a target file in Prometheus' own
form (file_sd). Never touches: values.
Invariant: metrics neither end nor hold up a process: what can't be bound or written is a warning, and nobody waits for
a scrape.
A crash leaves: a target file whose port nobody answers, so that `up` is 0, which is what should be seen. The next
process of that role overwrites it, on the same port if that is still free.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from wsgiref.simple_server import WSGIServer

import structlog
from prometheus_client import CollectorRegistry, start_http_server

LOOPBACK = "127.0.0.1"
OWN, TEMPORAL, VLLM = "roadstead", "temporal", "vllm"
"""Whose metrics a target has: its label `job`."""

log = structlog.get_logger(__name__)


def targets_folder(folder: Path) -> Path:
    """Where the processes of a run keep their target files. folder: this machine's folder of the run."""
    return folder / "metrics"


@contextlib.contextmanager
def served(registry: CollectorRegistry, folder: Path, labels: Mapping[str, str]) -> Iterator[int | None]:
    """Serve `registry` for the length of the block. labels: `role`, which names the file, and `run`.

    Yields the port; None: it can't be served.
    """
    role = labels["role"]
    try:
        server, _ = _bind(registry, last_port(folder, role))
    except OSError as error:
        log.warning("metrics.not_served", role=role, error=str(error), remedy=f"free a port on {LOOPBACK}")
        yield None
        return
    try:
        with target(folder, role, f"{LOOPBACK}:{server.server_port}", OWN, labels):
            yield server.server_port
    finally:
        server.shutdown()  # half a second at most: a scrape in progress has a thread of its own
        server.server_close()


@contextlib.contextmanager
def target(folder: Path, name: str, address: str, job: str, labels: Mapping[str, str]) -> Iterator[None]:
    """Name a target to Prometheus for the length of the block. address: host:port that serves /metrics."""
    file = targets_folder(folder) / f"{name}.json"
    try:
        write_target(file, address, job, labels)
    except OSError as error:
        log.warning("metrics.no_target_file", file=str(file), error=str(error))
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)


def write_target(file: Path, address: str, job: str, labels: Mapping[str, str]) -> None:
    """Whole or not at all: Prometheus reads it whenever it changes. Raises OSError."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f".{file.name}.{os.getpid()}.part")
    part.write_text(json.dumps([{"targets": [address], "labels": {"job": job, **labels}}], indent=1))
    part.replace(file)


def last_port(folder: Path, role: str) -> int:
    """Of a process of that role that was killed; 0 when there is none, or its file can't be read."""
    try:
        text = (targets_folder(folder) / f"{role}.json").read_text()
        return int(json.loads(text)[0]["targets"][0].rpartition(":")[2])
    except (OSError, ValueError, LookupError, TypeError):
        return 0


def _bind(registry: CollectorRegistry, last: int) -> tuple[WSGIServer, threading.Thread]:
    with contextlib.suppress(OSError):
        return start_http_server(last, LOOPBACK, registry)
    return start_http_server(0, LOOPBACK, registry)


def free_port(last: int) -> int:
    """`last` if it is free, else another. For servers that bind for themselves: somebody may be quicker."""
    for port in (last, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                probe.bind((LOOPBACK, port))
                return int(probe.getsockname()[1])
    raise OSError(f"no free port on {LOOPBACK}")

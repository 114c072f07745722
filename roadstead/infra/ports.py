"""Free loopback ports, remembered a data directory.

Owns: `<data>/ports.json`. Invariant: a data directory keeps its ports between starts as long as they are free, so
that bookmarks, and servers which store their own address (SeaweedFS), stay right.
"""

from __future__ import annotations

import json
import os
import random
import socket
from collections.abc import Sequence
from pathlib import Path

LOOPBACK = "127.0.0.1"
_RANGE = range(20_000, 32_000)
"""Below the ports that Linux gives to outgoing connections and that servers pick for themselves (32768 and up): the
Temporal server once took our UI port for one of its own services before its UI could listen on it."""


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        # Without it a port in TIME_WAIT of our own last run would count as taken.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True


def free_port() -> int:
    """A free port of _RANGE. Raises OSError when a thousand tries find none."""
    for port in random.SystemRandom().sample(_RANGE, 1000):
        if is_free(port):
            return port
    raise OSError(f"no free port in 1000 tries between {_RANGE.start} and {_RANGE.stop - 1}")


def remembered_ports(file: Path, names: Sequence[str]) -> dict[str, int]:
    """A free port for each name; last time's where it is still free."""
    known = _known(file)
    taken: set[int] = set()
    ports: dict[str, int] = {}
    for name in names:
        port = known.get(name, 0)
        while not port or port in taken or not is_free(port):
            port = free_port()
        ports[name] = port
        taken.add(port)
    _remember(file, {**known, **ports})
    return ports


def remembered_row(file: Path, names: list[str]) -> dict[str, int]:
    """Free ports in a row, one for each name; last time's first one where all of them are still free."""
    known = _known(file)
    first = known.get(names[0], 0)
    while not first or not all(is_free(first + i) for i in range(len(names))):
        first = free_port()
    ports = {name: first + i for i, name in enumerate(names)}
    _remember(file, {**known, **ports})
    return ports


def _known(file: Path) -> dict[str, int]:
    known: dict[str, int] = json.loads(file.read_text()) if file.exists() else {}
    return known


def _remember(file: Path, ports: dict[str, int]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(f".{os.getpid()}.part")
    part.write_text(json.dumps(ports, indent=1))
    part.replace(file)

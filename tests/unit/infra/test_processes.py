"""Children are started, watched and stopped in a bounded time, on processes that misbehave."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

import pytest

from roadstead.infra.ports import free_port, is_free, remembered_ports
from roadstead.infra.processes import ProcessFailed, ProcessSpec, Supervisor


def spec(folder: Path, code: str, *, ready_timeout_s: float = 20.0, **changes: object) -> ProcessSpec:
    """A child that runs `code` and is ready when it has made the file `folder/ready`."""
    mark = folder / "ready"

    async def ready() -> bool:
        return mark.exists()

    values = {
        "name": "child",
        "what": "a child of a test",
        "argv": (sys.executable, "-c", f"import signal, time, sys, pathlib\n{code}"),
        "log": folder / "child.log",
        "ready": ready,
        "ready_timeout_s": ready_timeout_s,
        "stop_grace_s": 0.5,
    }
    return ProcessSpec(**{**values, **changes})  # type: ignore[arg-type]


def ready_then(folder: Path, code: str) -> str:
    return f"pathlib.Path({str(folder / 'ready')!r}).touch()\n{code}"


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


async def test_a_child_that_ignores_sigterm_is_gone_after_the_grace(tmp_path: Path) -> None:
    supervisor = Supervisor(print)
    await supervisor.start(
        spec(tmp_path, "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + ready_then(tmp_path, "time.sleep(60)"))
    )
    pid, began = supervisor.pids()["child"], time.monotonic()
    await supervisor.stop()
    assert gone(pid) and time.monotonic() - began < 5


async def test_grandchildren_go_too(tmp_path: Path) -> None:
    code = (
        "import subprocess\n"
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(p.pid, flush=True)\n" + ready_then(tmp_path, "time.sleep(60)")
    )
    supervisor = Supervisor(print)
    await supervisor.start(spec(tmp_path, code))
    grandchild = int((tmp_path / "child.log").read_text())
    await supervisor.stop()
    for _ in range(50):
        if gone(grandchild):
            return
        await asyncio.sleep(0.1)
    pytest.fail("the grandchild is still there")


async def test_a_child_that_ends_while_starting_is_named_with_its_last_words(tmp_path: Path) -> None:
    supervisor = Supervisor(print)
    with pytest.raises(ProcessFailed, match=r"exited with 3 while starting[\s\S]*no such model"):
        await supervisor.start(spec(tmp_path, "print('no such model', flush=True); sys.exit(3)"))
    await supervisor.stop()


async def test_a_child_that_is_never_ready_is_named_with_what_was_awaited(tmp_path: Path) -> None:
    supervisor = Supervisor(print)
    with pytest.raises(ProcessFailed, match=r"not ready after 1 s .waited for a child of a test"):
        await supervisor.start(spec(tmp_path, "time.sleep(60)", ready_timeout_s=1.0))
    await supervisor.stop()


async def test_a_child_that_dies_is_started_again_and_given_up_on_in_the_end(tmp_path: Path) -> None:
    lines: list[str] = []
    supervisor = Supervisor(lines.append)
    await supervisor.start(spec(tmp_path, ready_then(tmp_path, "time.sleep(0.2); print('again', flush=True)")))
    try:
        with pytest.raises(ProcessFailed, match=r"died more than 5 times[\s\S]*again"):
            await asyncio.wait_for(supervisor.watch(), 30)
    finally:
        await supervisor.stop()
    assert sum("starting it again" in line for line in lines) == 5


def test_ports_are_remembered_while_they_are_free(tmp_path: Path) -> None:
    first = remembered_ports(tmp_path / "ports.json", ["a", "b"])
    assert first["a"] != first["b"]
    assert remembered_ports(tmp_path / "ports.json", ["a", "b"]) == first
    with __import__("socket").create_server(("127.0.0.1", first["a"])):
        assert not is_free(first["a"])
        second = remembered_ports(tmp_path / "ports.json", ["a", "b"])
    assert second["a"] != first["a"] and second["b"] == first["b"]
    assert is_free(free_port())


def test_ports_stay_out_of_the_range_that_the_kernel_hands_out() -> None:
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert all(free_port() < first for _ in range(50))

"""A worker process ends within its window whatever hangs, and its pulse tells a live event loop from a hung one.

Every case is a real process that runs `host.main` with workers that misbehave.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from roadstead.infra.roles import _beats
from roadstead.workers.host import pulse_file
from tests.support import tiny

HARD_S = 1.5
"""In place of ten seconds."""

_PROCESS = """
import asyncio, sys, threading, time
from roadstead.workers import host

host._HARD_S, host._PULSE_S = {hard_s}, 0.2

async def connect(address, namespace, **_):
    return None

host.connect = connect

{body}

host.main("rollout", make)
"""

QUIET = """
async def make(config, client, folder, metrics):
    return [], []
"""
CLEAN_UP_SLEEPS = """
async def forever():
    try:
        await asyncio.sleep(3600)
    finally:
        await asyncio.sleep(3600)

class Worker:
    def config(self):
        return {}
    async def __aenter__(self):
        return self
    async def __aexit__(self, *_):
        await forever()

async def make(config, client, folder, metrics):
    return [Worker()], [forever()]
"""
THREAD_BLOCKS = """
async def make(config, client, folder, metrics):
    asyncio.get_running_loop().run_in_executor(None, time.sleep, 3600)
    return [], []
"""
LOOP_BLOCKS = """
async def block():
    await asyncio.sleep(0.5)
    time.sleep(3600)

async def make(config, client, folder, metrics):
    return [], [block()]
"""
START_BLOCKS = """
async def make(config, client, folder, metrics):
    print("up", flush=True)
    await asyncio.sleep(3600)
"""
COMPANION_FAILS = """
class Worker:
    def config(self):
        return {}
    async def __aenter__(self):
        return self
    async def __aexit__(self, *_):
        await asyncio.sleep(3600)

async def fail():
    await asyncio.sleep(0.3)
    raise RuntimeError("the watcher is broken")

async def make(config, client, folder, metrics):
    return [Worker()], [fail()]
"""


class Process:
    def __init__(self, folder: Path, body: str) -> None:
        config = folder / "config.yaml"
        config.write_text(tiny.config(folder, "tiny", temporal={"address": "127.0.0.1:1"}).dump())
        self.log = folder / "log"
        self.pulse = pulse_file(folder, "rollout")
        code = _PROCESS.format(hard_s=HARD_S, body=body)
        with self.log.open("wb") as log:
            self.child = subprocess.Popen(
                [sys.executable, "-c", code, "--config", str(config), "--folder", str(folder)],
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def until_up(self) -> None:
        """Its pulse beats, or it said that it is up."""
        deadline = time.monotonic() + 30
        while not self.pulse.exists() and "up\n" not in self.log.read_text():
            assert self.child.poll() is None and time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)

    def end(self) -> tuple[int, float]:
        """Exit code and seconds from now."""
        began = time.monotonic()
        return self.child.wait(30), time.monotonic() - began


@pytest.fixture
def started(tmp_path: Path) -> Iterator[list[Process]]:
    processes: list[Process] = []
    yield processes
    for process in processes:
        process.child.kill()
        process.child.wait()


@pytest.mark.parametrize(
    ("body", "wait_s"),
    [(CLEAN_UP_SLEEPS, 0.0), (THREAD_BLOCKS, 0.0), (LOOP_BLOCKS, 1.0), (START_BLOCKS, 0.0)],
    ids=["a clean-up sleeps for ever", "a thread blocks", "the event loop hangs", "it is still starting"],
)
def test_sigterm_ends_a_worker_within_its_window_whatever_hangs(
    tmp_path: Path, started: list[Process], body: str, wait_s: float
) -> None:
    """frameworks.md #43, #29: exit code and time."""
    started.append(process := Process(tmp_path, body))
    process.until_up()
    time.sleep(wait_s)
    process.child.send_signal(signal.SIGTERM)
    code, took = process.end()
    assert (code, took + 0.05 >= HARD_S and took < HARD_S + 3) == (75, True), (code, took)
    assert "did not stop in time" in process.log.read_text()


def test_a_worker_with_nothing_in_its_way_leaves_at_once_with_0(tmp_path: Path, started: list[Process]) -> None:
    started.append(process := Process(tmp_path, QUIET))
    process.until_up()
    process.child.send_signal(signal.SIGTERM)
    code, took = process.end()
    assert code == 0 and took < HARD_S


def test_a_broken_companion_ends_the_worker_even_when_its_clean_up_hangs(
    tmp_path: Path, started: list[Process]
) -> None:
    """Nobody sent a signal: the window counts from the failure."""
    started.append(process := Process(tmp_path, COMPANION_FAILS))
    process.until_up()
    code, took = process.end()
    assert code == 75 and took < HARD_S + 3


async def test_the_pulse_stands_still_with_the_event_loop(tmp_path: Path, started: list[Process]) -> None:
    """Seen as the supervisor sees it: a stopped process, a process that goes on, a loop that blocks."""
    started.append(process := Process(tmp_path, QUIET))
    process.until_up()
    alive = _beats(process.pulse)
    assert await alive()
    for _ in range(2):
        time.sleep(0.8)
        assert await alive()
    os.kill(process.child.pid, signal.SIGSTOP)
    time.sleep(0.5)
    await alive()
    time.sleep(0.8)
    assert not await alive()
    os.kill(process.child.pid, signal.SIGCONT)
    time.sleep(0.8)
    assert await alive()
    process.pulse.unlink()
    assert not await alive()


async def test_a_blocked_event_loop_has_no_pulse(tmp_path: Path, started: list[Process]) -> None:
    started.append(process := Process(tmp_path, LOOP_BLOCKS))
    process.until_up()
    alive = _beats(process.pulse)
    time.sleep(1.0)
    await alive()
    time.sleep(0.8)
    assert not await alive()

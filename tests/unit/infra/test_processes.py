"""Children are started, watched and stopped in a bounded time, on processes that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from roadstead.infra import processes
from roadstead.infra.ports import free_port, is_free, remembered_ports
from roadstead.infra.processes import Broken, ProcessFailed, ProcessSpec, Supervisor


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


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fifth of the real times."""
    monkeypatch.setattr(processes, "_ASK_EVERY_S", 0.3)
    monkeypatch.setattr(processes, "_TURN_S", 0.2)


def beating(folder: Path, code: str = "") -> ProcessSpec:
    """A child that touches `folder/pulse` ten times a second, and hangs after a second and a half without."""
    pulse, last = folder / "pulse", [0]

    async def alive() -> bool:
        before, last[0] = last[0], pulse.stat().st_mtime_ns if pulse.exists() else 0
        return last[0] != before

    async def ready() -> bool:
        return pulse.exists()

    beat = f"{code}\nwhile True:\n    pathlib.Path({str(pulse)!r}).touch()\n    time.sleep(0.1)"
    return spec(folder, beat, ready=ready, alive=alive, hang_s=1.5, leftovers=(pulse,))


@contextlib.asynccontextmanager
async def watched(*specs: ProcessSpec) -> AsyncIterator[tuple[Supervisor, list[str]]]:
    """Started and watched for the block; and what was reported."""
    lines: list[str] = []
    supervisor = Supervisor(lines.append)
    watch = None
    try:
        await supervisor.start(*specs)
        watch = asyncio.ensure_future(supervisor.watch())
        yield supervisor, lines
        if watch.done():
            await watch
    finally:
        if watch is not None:
            watch.cancel()
        await supervisor.stop()


async def until(holds: Callable[[], bool], within_s: float = 20.0) -> None:
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline, f"it did not happen within {within_s:.0f} s"
        await asyncio.sleep(0.05)


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return state(pid) == "Z"


def state(pid: int) -> str:
    """One letter: T is stopped, Z dead and not yet reaped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


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
    await supervisor.start(spec(tmp_path, ready_then(tmp_path, "time.sleep(0.2); print('again', flush=True); exit(7)")))
    try:
        with pytest.raises(ProcessFailed, match=r"died more than 5 times[\s\S]*exit code 7[\s\S]*again"):
            await asyncio.wait_for(supervisor.watch(), 30)
    finally:
        await supervisor.stop()
    restarts = [line for line in lines if "starting it again" in line]
    assert len(restarts) == 5
    for number, line in enumerate(restarts):
        assert line.startswith("child ended with 7; starting it again (exit code 7 after 0."), line
        assert f"{4 - number} more restarts within 120 s; log {tmp_path / 'child.log'}" in line


async def test_the_line_of_a_killed_child_names_the_signal(tmp_path: Path) -> None:
    async with watched(spec(tmp_path, ready_then(tmp_path, "time.sleep(60)"))) as (supervisor, lines):
        first = supervisor.pids()["child"]
        os.kill(first, signal.SIGKILL)
        await until(lambda: len([x for x in lines if x.startswith("ready")]) == 2)
        assert supervisor.pids()["child"] != first
    assert any(line.startswith("child ended with -9; starting it again (SIGKILL after ") for line in lines), lines


async def test_a_stopped_child_is_found_killed_and_replaced(tmp_path: Path) -> None:
    """SIGSTOP: it neither exits nor answers. Its whole session goes before the next one comes."""
    code = "import subprocess\nsubprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
    async with watched(beating(tmp_path, code)) as (supervisor, lines):
        first, began = supervisor.pids()["child"], time.monotonic()
        grandchild = int(Path(f"/proc/{first}/task/{first}/children").read_text())
        os.kill(first, signal.SIGSTOP)
        await until(lambda: len([x for x in lines if x.startswith("ready")]) == 2)
        took = time.monotonic() - began
        assert supervisor.pids()["child"] != first and gone(first)
        await until(lambda: gone(grandchild))
    hung = next(line for line in lines if "hangs" in line)
    assert "child hangs; starting it again (no sign of life for 1." in hung and "; killed; 4 more restarts" in hung
    assert 1.4 <= took < 10


async def test_a_child_that_hangs_for_less_than_the_limit_is_left_alone(tmp_path: Path) -> None:
    async with watched(beating(tmp_path)) as (supervisor, lines):
        first = supervisor.pids()["child"]
        for _ in range(2):
            os.kill(first, signal.SIGSTOP)
            await asyncio.sleep(0.7)
            os.kill(first, signal.SIGCONT)
            await asyncio.sleep(1)
        assert supervisor.pids()["child"] == first
    assert not any("again" in line for line in lines)


async def test_a_probe_that_never_answers_holds_nobody_up(tmp_path: Path) -> None:
    """The other child is restarted while the first one's probe waits; the first one counts as hung in time."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()

    async def never() -> bool:
        await asyncio.sleep(3600)
        return True

    silent = spec(tmp_path / "a", ready_then(tmp_path / "a", "time.sleep(60)"), name="silent", alive=never, hang_s=2.0)
    other = spec(tmp_path / "b", ready_then(tmp_path / "b", "time.sleep(60)"), name="other")
    async with watched(silent, other) as (supervisor, lines):
        os.kill(supervisor.pids()["other"], signal.SIGKILL)
        await until(lambda: any("other ended" in line for line in lines))
        assert not any("silent hangs" in line for line in lines), "the exit is seen at once"
        await until(lambda: any("silent hangs" in line for line in lines))


async def test_a_child_that_says_it_is_broken_is_not_waited_for(tmp_path: Path) -> None:
    """It runs, it would be silent for an hour before it counts as hung, and its probe knows better."""
    broken = tmp_path / "broken"

    async def alive() -> bool:
        if broken.exists():
            broken.unlink()
            raise Broken("its core has died")
        return True

    child = spec(tmp_path, ready_then(tmp_path, "time.sleep(60)"), alive=alive, hang_s=3600.0)
    async with watched(child) as (supervisor, lines):
        first = supervisor.pids()["child"]
        broken.touch()
        await until(lambda: len([x for x in lines if x.startswith("ready")]) == 2)
        assert gone(first) and supervisor.pids()["child"] != first
    assert any("child is broken; starting it again (its core has died; killed; 4 more" in x for x in lines), lines


async def test_one_lost_answer_is_not_waited_for_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next question is asked on time, and its answer counts."""
    monkeypatch.setattr(processes, "_ANSWER_S", 0.4)
    asked = 0

    async def first_one_lost() -> bool:
        nonlocal asked
        asked += 1
        await asyncio.sleep(3600 if asked == 1 else 0)
        return True

    child = spec(tmp_path, ready_then(tmp_path, "time.sleep(60)"), alive=first_one_lost, hang_s=1.5)
    async with watched(child) as (_, lines):
        await asyncio.sleep(3)
    assert asked > 2 and not any("hangs" in line for line in lines), lines


async def test_after_a_restart_the_start_deadline_counts_again(tmp_path: Path) -> None:
    """The second incarnation takes longer to start than a hang may last, and is not taken for hung."""
    mark = tmp_path / "second"
    slow = f"m = pathlib.Path({str(mark)!r})\ntime.sleep(2.5 if m.exists() else 0); m.touch()\n"
    async with watched(beating(tmp_path, slow)) as (supervisor, lines):
        os.kill(supervisor.pids()["child"], signal.SIGKILL)
        await until(lambda: len([x for x in lines if x.startswith("ready")]) == 2)
        await asyncio.sleep(2)
        assert not any("hangs" in line for line in lines), lines
        assert len([x for x in lines if "again" in x]) == 1


async def test_a_restart_that_does_not_come_up_is_tried_again_and_named(tmp_path: Path) -> None:
    mark = tmp_path / "broken"
    code = f"m = pathlib.Path({str(mark)!r})\nm.exists() and sys.exit(3)\nm.touch()\n"
    lines: list[str] = []
    supervisor = Supervisor(lines.append)
    await supervisor.start(beating(tmp_path, code))
    try:
        os.kill(supervisor.pids()["child"], signal.SIGKILL)
        with pytest.raises(ProcessFailed, match=r"died more than 5 times.*it did not start .*exited with 3"):
            await asyncio.wait_for(supervisor.watch(), 30)
    finally:
        await supervisor.stop()
    assert sum("child did not start; starting it again (child: exited with 3" in line for line in lines) == 4


async def test_a_stopped_watch_does_not_take_its_own_absence_for_a_hang(tmp_path: Path) -> None:
    """The supervisor itself was stopped for longer than hang_s: nobody had asked the child anything."""

    async def slow() -> bool:
        await asyncio.sleep(0.4)
        return True

    child = spec(tmp_path, ready_then(tmp_path, "time.sleep(60)"), alive=slow, hang_s=1.5)
    async with watched(child) as (supervisor, lines):
        for _ in range(2):
            await asyncio.sleep(0.5)
            time.sleep(2.0)  # the whole loop stands still
        await asyncio.sleep(1.0)
        assert not any("hangs" in line for line in lines), lines
        assert gone(supervisor.pids()["child"]) is False


async def test_a_child_that_hangs_at_stop_is_gone_after_the_grace(tmp_path: Path) -> None:
    """A stopped process does not even see SIGTERM."""
    supervisor = Supervisor(print)
    await supervisor.start(spec(tmp_path, ready_then(tmp_path, "time.sleep(60)")))
    pid = supervisor.pids()["child"]
    os.kill(pid, signal.SIGSTOP)
    await until(lambda: state(pid) == "T")
    began = time.monotonic()
    await supervisor.stop()
    assert gone(pid) and 0.5 <= time.monotonic() - began < 5


async def test_a_clean_up_that_sleeps_for_ever_does_not_hold_the_others(tmp_path: Path) -> None:
    """frameworks.md #43: the run is over and the pod stays. One hung child costs its grace, not everybody's sum."""
    code = "import atexit; atexit.register(time.sleep, 3600); signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n"
    specs = []
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        specs.append(spec(tmp_path / name, code + ready_then(tmp_path / name, "time.sleep(3600)"), name=name))
    supervisor = Supervisor(print)
    await supervisor.start(*specs)
    pids, began = list(supervisor.pids().values()), time.monotonic()
    await supervisor.stop()
    assert all(map(gone, pids)) and 0.5 <= time.monotonic() - began < 2.5


async def test_a_stop_that_fails_for_one_child_still_ends_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that hangs in the kernel survives SIGKILL: it is reported, last."""
    specs = []
    for name in ("stuck", "earlier"):
        (tmp_path / name).mkdir()
        specs.append(spec(tmp_path / name, ready_then(tmp_path / name, "time.sleep(60)"), name=name))
    supervisor = Supervisor(print)
    await supervisor.start(specs[1])
    await supervisor.start(specs[0])
    pids = supervisor.pids()
    real = processes.ManagedProcess.kill

    async def kill(self: processes.ManagedProcess) -> None:
        await real(self)
        if self.spec.name == "stuck":
            raise ProcessFailed("stuck: process 1 is still there")

    monkeypatch.setattr(processes.ManagedProcess, "kill", kill)
    with pytest.raises(ProcessFailed, match="still there"):
        await supervisor.stop()
    assert all(map(gone, pids.values()))


async def test_leftovers_of_a_killed_child_are_gone_before_the_next_one_starts(tmp_path: Path) -> None:
    left = tmp_path / "left"
    code = f"f = pathlib.Path({str(left)!r})\nprint('there' if f.exists() else 'clean', flush=True)\nf.touch()\n"
    async with watched(spec(tmp_path, code + ready_then(tmp_path, "time.sleep(60)"), leftovers=(left,))) as (s, _):
        os.kill(s.pids()["child"], signal.SIGKILL)
        await until(lambda: (tmp_path / "child.log").read_text().splitlines() == ["clean", "clean"])
    assert not left.exists()


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

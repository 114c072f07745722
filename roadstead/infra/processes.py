"""Child processes: started together, watched, restarted, stopped in a bounded time.

Owns: the children it started, their log files, their restarts. Never touches: processes it did not start.
Invariant: no child outlives this process. An orderly stop ends each child's whole session; if this process is
killed, the kernel kills the children (PR_SET_PDEATHSIG) and they set the same for theirs. A child that ends, or that
gives no sign of life for its `hang_s`, is replaced: its session is killed first, so that there are never two of it.
A crash leaves: log files.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from roadstead.process import die_with_parent

# A child that dies more often than this within the window is broken, not unlucky: say so instead of spinning.
_RESTARTS, _WINDOW_S = 5, 120.0
_POLL_S = 0.1
_ASK_EVERY_S, _ANSWER_S = 2.0, 10.0
"""Signs of life: asked so often, waited for so long. A late answer on a busy machine is a sign of life too."""
HANG_S = 30.0
"""At least three questions in a row without an answer: a child that is starved of its core for some seconds is not
taken for a hung one."""
_TURN_S = 1.0
"""The most silence that one turn of the watch counts: time in which nobody looked, because this process itself was
stopped or starved, says nothing about the child."""
_REAP_S = 10.0


Probe = Callable[[], Awaitable[bool]]


class ProcessFailed(RuntimeError):
    """A child could not be started or kept alive; the text ends with the last lines of its log."""


class Broken(RuntimeError):
    """Raised by a probe for signs of life that was told the opposite: there is nothing to wait for."""


@dataclass(frozen=True)
class ProcessSpec:
    name: str
    what: str
    """For people: what it is and where."""
    argv: tuple[str, ...]
    log: Path
    ready: Probe
    """Asked again and again until True; must not raise for "not yet"."""
    ready_timeout_s: float
    alive: Probe | None = None
    """A sign of life of a child that was ready: True when it works. It may take its time; it raises Broken when it
    knows that the child won't work again. None: an exit is the only sign that it does not."""
    hang_s: float = HANG_S
    """Silence after which it counts as hung, is killed and started again."""
    env: Mapping[str, str] = field(default_factory=dict)
    """On top of this process's environment."""
    stop_grace_s: float = 10.0
    leftovers: tuple[Path, ...] = ()
    """Files that it leaves when killed, and that must not be taken for the next one's; removed before a start and
    after a stop."""


@dataclass(frozen=True)
class _Down:
    """Why a child must be replaced."""

    what: str
    details: str


class _Question:
    """A probe asked again and again, one at a time; nobody waits for it."""

    def __init__(self, probe: Probe, every_s: float) -> None:
        self._probe, self._every_s = probe, every_s
        self._asked: asyncio.Future[bool] | None = None
        self._due = 0.0

    def heard(self) -> bool:
        """Whether a yes arrived since the last call."""
        if self._asked is None:
            if time.monotonic() >= self._due:
                self._asked = asyncio.ensure_future(self._ask())
            return False
        if not self._asked.done():
            return False
        asked, self._asked, self._due = self._asked, None, time.monotonic() + self._every_s
        try:
            return asked.result()
        except TimeoutError:
            return False

    async def _ask(self) -> bool:
        return await asyncio.wait_for(self._probe(), _ANSWER_S)

    def cancel(self) -> None:
        if self._asked is not None:
            self._asked.cancel()


class ManagedProcess:
    def __init__(self, spec: ProcessSpec) -> None:
        self.spec = spec
        self._child: subprocess.Popen[bytes] | None = None
        self._started = 0.0
        self._deaths: deque[float] = deque()

    @property
    def pid(self) -> int:
        assert self._child is not None, "started"
        return self._child.pid

    def start(self) -> None:
        self._remove_leftovers()
        self.spec.log.parent.mkdir(parents=True, exist_ok=True)
        self._started = time.monotonic()
        with self.spec.log.open("ab") as log:
            # A session of its own: Ctrl-C reaches us alone, and we stop the children in order.
            self._child = subprocess.Popen(
                self.spec.argv,
                env={**os.environ, **self.spec.env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )

    def exit_code(self) -> int | None:
        return self._child.poll() if self._child else None

    async def wait_ready(self) -> float:
        """Seconds until it was ready. Raises ProcessFailed when it exits or the deadline passes."""
        began, question = time.monotonic(), _Question(self.spec.ready, _POLL_S)
        try:
            while not question.heard():
                if (code := self.exit_code()) is not None:
                    raise ProcessFailed(f"{self.spec.name}: exited with {code} while starting\n{self.log_tail()}")
                if time.monotonic() - began > self.spec.ready_timeout_s:
                    raise ProcessFailed(
                        f"{self.spec.name}: not ready after {self.spec.ready_timeout_s:.0f} s "
                        f"(waited for {self.spec.what})\n{self.log_tail()}"
                    )
                await asyncio.sleep(_POLL_S / 2)
        finally:
            question.cancel()
        return time.monotonic() - began

    async def wait_down(self) -> _Down:
        """Wait until a child that was ready ends, hangs or says that it is broken."""
        question = _Question(self.spec.alive, _ASK_EVERY_S) if self.spec.alive else None
        silent, turn = 0.0, time.monotonic()
        try:
            while True:
                if (code := self.exit_code()) is not None:
                    up = time.monotonic() - self._started
                    return _Down(f"ended with {code}", f"{_name(code)} after {up:.1f} s up")
                now = time.monotonic()
                silent, turn = silent + min(now - turn, _TURN_S), now
                try:
                    if question is None or question.heard():
                        silent = 0.0
                except Broken as error:
                    return _Down("is broken", f"{error}; killed")
                if silent >= self.spec.hang_s:
                    since = time.strftime("%H:%M:%SZ", time.gmtime(time.time() - silent))
                    return _Down("hangs", f"no sign of life for {silent:.1f} s, since {since}; killed")
                await asyncio.sleep(_POLL_S)
        finally:
            if question is not None:
                question.cancel()

    def restarts_left(self) -> int:
        """Counts a death; how many more it may die within the window. Below 0: it may not be started again."""
        now = time.monotonic()
        self._deaths.append(now)
        while now - self._deaths[0] > _WINDOW_S:
            self._deaths.popleft()
        return _RESTARTS - len(self._deaths)

    async def stop(self) -> None:
        """SIGTERM, the grace, then SIGKILL to its whole session. Raises ProcessFailed when even that ends it not."""
        if self._child is None:
            return
        if self._child.poll() is None:
            self._child.terminate()
            deadline = time.monotonic() + self.spec.stop_grace_s
            while self._child.poll() is None and time.monotonic() < deadline:
                await asyncio.sleep(_POLL_S / 2)
        await self.kill()
        self._remove_leftovers()

    async def kill(self) -> None:
        """SIGKILL to its whole session, and wait until the child is gone. Raises ProcessFailed as `stop` does."""
        with contextlib.suppress(ProcessLookupError):  # the whole session is gone already, which is what we want
            os.killpg(self.pid, signal.SIGKILL)
        deadline = time.monotonic() + _REAP_S
        while self.exit_code() is None:
            if time.monotonic() > deadline:
                raise ProcessFailed(
                    f"{self.spec.name}: process {self.pid} is still there {_REAP_S:.0f} s after SIGKILL; it hangs in "
                    "the kernel (a disk, a network file system, a GPU driver): look at the machine"
                )
            await asyncio.sleep(_POLL_S / 2)

    def _remove_leftovers(self) -> None:
        for path in self.spec.leftovers:
            path.unlink(missing_ok=True)

    def log_tail(self, lines: int = 15) -> str:
        try:
            text = self.spec.log.read_text(errors="replace")
        except FileNotFoundError:
            return "(no log)"
        tail = "\n".join(f"    {line}" for line in text.splitlines()[-lines:])
        return f"  last lines of {self.spec.log}:\n{tail}"


class Supervisor:
    """Groups of children: each group starts at once, groups stop in reverse order."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._groups: list[list[ManagedProcess]] = []

    async def start(self, *specs: ProcessSpec) -> None:
        """Start the specs together and wait until all are ready. Raises ProcessFailed; then stop() cleans up."""
        group = [ManagedProcess(spec) for spec in specs]
        self._groups.append(group)
        for process in group:
            self._report(f"starting {process.spec.name}: {process.spec.what}")
            process.start()
        await asyncio.gather(*(self._ready(p) for p in group))

    async def watch(self) -> None:
        """Replace children that end or hang, for ever. Raises ProcessFailed when one keeps dying."""
        keepers = [asyncio.ensure_future(self._keep(p)) for group in self._groups for p in group]
        try:
            await asyncio.gather(*keepers, asyncio.Event().wait())
        finally:
            for keeper in keepers:
                keeper.cancel()

    async def _keep(self, process: ManagedProcess) -> None:
        while True:
            down = await process.wait_down()
            while True:
                await process.kill()
                self._start_again(process, down)
                try:
                    await self._ready(process)
                    break
                except ProcessFailed as error:
                    down = _Down("did not start", str(error).splitlines()[0])

    def _start_again(self, process: ManagedProcess, down: _Down) -> None:
        name, left = process.spec.name, process.restarts_left()
        if left < 0:
            raise ProcessFailed(
                f"{name}: died more than {_RESTARTS} times within {_WINDOW_S:.0f} s, at last it {down.what} "
                f"({down.details})\n{process.log_tail()}"
            )
        self._report(
            f"{name} {down.what}; starting it again ({down.details}; {left} more restarts within {_WINDOW_S:.0f} s; "
            f"log {process.spec.log})"
        )
        process.start()

    async def _ready(self, process: ManagedProcess) -> None:
        seconds = await process.wait_ready()
        self._report(f"ready    {process.spec.name} after {seconds:.1f} s")

    def pids(self) -> dict[str, int]:
        return {p.spec.name: p.pid for group in self._groups for p in group}

    async def stop(self) -> None:
        """All of them, whatever one of them does. Raises the first failure in the end."""
        failures: list[BaseException] = []
        for group in reversed(self._groups):
            ends = await asyncio.gather(*(p.stop() for p in group), return_exceptions=True)
            failures += [end for end in ends if end is not None]
        self._groups.clear()
        if failures:
            raise failures[0]


def _name(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:  # a real-time signal
        return f"signal {-code}"

"""Child processes: started together, watched, restarted, stopped in a bounded time.

Owns: the children it started, their log files, their restarts. Never touches: processes it did not start.
Invariant: no child outlives this process. An orderly stop ends each child's whole session; if this process is
killed, the kernel kills the children (PR_SET_PDEATHSIG) and they set the same for theirs.
A crash leaves: log files.
"""

from __future__ import annotations

import asyncio
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


class ProcessFailed(RuntimeError):
    """A child could not be started or kept alive; the text ends with the last lines of its log."""


@dataclass(frozen=True)
class ProcessSpec:
    name: str
    what: str
    """For people: what it is and where."""
    argv: tuple[str, ...]
    log: Path
    ready: Callable[[], Awaitable[bool]]
    """Asked again and again until True; must not raise for "not yet"."""
    ready_timeout_s: float
    env: Mapping[str, str] = field(default_factory=dict)
    """On top of this process's environment."""
    stop_grace_s: float = 10.0
    leftovers: tuple[Path, ...] = ()
    """Files that it leaves outside its data when killed; removed after it stopped."""


class ManagedProcess:
    def __init__(self, spec: ProcessSpec) -> None:
        self.spec = spec
        self._child: subprocess.Popen[bytes] | None = None
        self._deaths: deque[float] = deque()

    @property
    def pid(self) -> int:
        assert self._child is not None, "started"
        return self._child.pid

    def start(self) -> None:
        self.spec.log.parent.mkdir(parents=True, exist_ok=True)
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
        began = time.monotonic()
        while True:
            if (code := self.exit_code()) is not None:
                raise ProcessFailed(f"{self.spec.name}: exited with {code} while starting\n{self.log_tail()}")
            if await self.spec.ready():
                return time.monotonic() - began
            if time.monotonic() - began > self.spec.ready_timeout_s:
                raise ProcessFailed(
                    f"{self.spec.name}: not ready after {self.spec.ready_timeout_s:.0f} s "
                    f"(waited for {self.spec.what})\n{self.log_tail()}"
                )
            await asyncio.sleep(_POLL_S)

    def may_restart(self) -> bool:
        now = time.monotonic()
        self._deaths.append(now)
        while now - self._deaths[0] > _WINDOW_S:
            self._deaths.popleft()
        return len(self._deaths) <= _RESTARTS

    async def stop(self) -> None:
        """SIGTERM, the grace, then SIGKILL to its whole session."""
        if self._child is None:
            return
        if self._child.poll() is None:
            self._child.terminate()
            deadline = time.monotonic() + self.spec.stop_grace_s
            while self._child.poll() is None and time.monotonic() < deadline:
                await asyncio.sleep(_POLL_S / 2)
        self._kill_session()
        await asyncio.to_thread(self._child.wait, 10)
        for path in self.spec.leftovers:
            path.unlink(missing_ok=True)

    def _kill_session(self) -> None:
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            return  # the whole session is gone already, which is what we want

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

        async def ready(process: ManagedProcess) -> None:
            seconds = await process.wait_ready()
            self._report(f"ready    {process.spec.name} after {seconds:.1f} s")

        await asyncio.gather(*(ready(p) for p in group))

    async def watch(self) -> None:
        """Restart children that exit, for ever. Raises ProcessFailed when one keeps dying."""
        while True:
            for process in [p for group in self._groups for p in group]:
                code = process.exit_code()
                if code is None:
                    continue
                if not process.may_restart():
                    raise ProcessFailed(
                        f"{process.spec.name}: died more than {_RESTARTS} times within {_WINDOW_S:.0f} s, last "
                        f"with {code}\n{process.log_tail()}"
                    )
                self._report(f"{process.spec.name} ended with {code}; starting it again (log {process.spec.log})")
                process.start()
            await asyncio.sleep(_POLL_S * 2)

    def pids(self) -> dict[str, int]:
        return {p.spec.name: p.pid for group in self._groups for p in group}

    async def stop(self) -> None:
        for group in reversed(self._groups):
            await asyncio.gather(*(p.stop() for p in group))
        self._groups.clear()

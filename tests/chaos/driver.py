"""One chaos run: starts a training run, breaks it as scheduled, brings it back, and collects what was seen.

Owns: the order of things in one run, the times of each blow. Never touches: what counts as right (`checks`).
Invariant: it helps a run in no way but the one a person has: `roadstead resume` after its host is gone.
A crash leaves: the stand's folder.
"""

from __future__ import annotations

import asyncio
import re
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.schedule import COMMIT_POINTS, ORDERLY, STORE_FAULTS, Fault, Schedule
from tests.chaos.stand import Gone, Host, Late, Line, Stand, Tokens, Trap
from tests.support.s3_proxy import Fault as StoreFault

RUN_S = 420.0
"""A run that is not through by then hangs: five times what one without faults takes."""
_NEXT_STEP_S = 150.0
"""From blow to next step at most: a hang (30 s), the load of a model (30 s), a lost activity (15 s), a busy machine."""
_HANG_S = 60.0
"""A hang is found after 30 s; more on a machine where the supervisor itself gets no core."""
_GRACE_S = 25.0
"""`--grace` of run and resume, which is their default."""
_WITHIN_S = 40.0
"""`roadstead stop --within`."""
_TERM_S = 10.0
"""Bound of one process's end on SIGTERM: the workers' watchdog, the supervisor's grace for everything else."""
_CTRL_C_S = 20.0
"""Bound of an exit on Ctrl-C: the workers' watchdogs (10 s), and the start of what reports it."""
_STOPPED, _INTERRUPTED = 3, 130
_SLACK_S = 3.0
_IN_FLIGHT_S = 4.0
"""Two or three steps: one of them generates."""
_DETECTED = {"ended with", "hangs", "is broken", "did not start"}
_RANK_FAILED = re.compile(r"^[EWI](\d{4} \d\d:\d\d:\d\d\.\d+) .*failed \(exitcode", re.MULTILINE)
_RANK_READY = re.compile(r"^(\S+ \S+,\d+) INFO roadstead\.training\.rank rank 0 holds", re.MULTILINE)


@dataclass
class Blow:
    """A fault that struck, and what was seen of it. Times are Unix seconds."""

    fault: Fault
    at: float
    ended_at: float | None = None
    """Of a fault that ends by itself: pause, proxy."""
    detected_at: float | None = None
    """Of the supervisor's line, or torchrun's for a rank."""
    resumed_at: float | None = None
    """When `roadstead resume` was called."""
    ready_at: float | None = None
    """When what was broken was ready again: for engine, trainer and machine that is the load of their models."""
    allowed_s: float | None = None
    """Bound of an orderly exit."""
    exit_s: float | None = None
    code: int | None = None
    admitted_at: float | None = None
    """First reserved_at since."""
    trained_at: float | None = None
    """First train-rows object since, of a step that had none."""
    stall_s: float | None = None
    """Longest time without one, from it to the next blow."""
    wrong: list[str] = field(default_factory=list)

    @property
    def since(self) -> float:
        """What its figures are counted from: the blow, or the resume after an orderly end, which takes its time."""
        return self.resumed_at if self.fault.kind in ORDERLY and self.resumed_at else self.at


@dataclass
class Outcome:
    """Everything of one run that the checks and the report need."""

    schedule: Schedule
    name: str
    config: Path
    began: float
    seconds: float = 0.0
    blows: list[Blow] = field(default_factory=list)
    generated: int = 0
    """Tokens that the engines generated, by their own counters."""
    wrong: list[str] = field(default_factory=list)


class Driver:
    def __init__(self, stand: Stand, plan: Schedule) -> None:
        self._stand, self._plan = stand, plan
        self._tokens: Tokens | None = None
        self._name = f"chaos-{plan.seed}"
        self._host: Host | None = None
        self._hosts: list[Host] = []
        file = stand.write_config(
            self._name, plan.features, seed=plan.seed, training__steps=plan.steps, training__checkpoint_every=3
        )
        self.outcome = Outcome(plan, self._name, file, time.time())

    async def run(self) -> Outcome:
        """The run from its start to its end, or to what went wrong, which is then in the outcome."""
        outcome, stand = self.outcome, self._stand
        try:
            async with Tokens(stand.engine_ports).counting() as tokens, asyncio.timeout(RUN_S):
                self._tokens = tokens
                await self._start("run", str(outcome.config))
                try:
                    for fault in self._plan.faults:
                        await self._strike(fault)
                    code = await self.host.wait(RUN_S)
                    if code != 0:
                        outcome.wrong.append(f"the run ended with {code}:\n{self.host.tail(25)}")
                    await asyncio.sleep(0.6)  # the counter's last look
                finally:
                    outcome.generated = tokens.total
        except (Gone, Late) as error:
            outcome.wrong.append(str(error))
        except TimeoutError:
            outcome.wrong.append(f"not through after {RUN_S:.0f} s; last lines:\n{self.host.tail(25)}")
        finally:
            stand.trap = None
            stand.proxy.heal()
            await self._end()
        outcome.seconds = time.time() - outcome.began
        return outcome

    @property
    def host(self) -> Host:
        assert self._host is not None, "started"
        return self._host

    def lines(self, name: str) -> list[Line]:
        """What the supervisor of that process said."""
        if name in {"temporal", "s3"}:
            return self._stand.server_lines
        return [line for host in self._hosts for line in host.lines]

    # -- blows --------------------------------------------------------------------------------------------

    async def _strike(self, fault: Fault) -> None:
        stand, name = self._stand, self._name
        before = stand.recorded(name)
        verb, _, what = fault.kind.partition(":")
        if verb.split("-")[0] not in {"before", "after"}:
            await self._progress(before + fault.gap)
            await asyncio.sleep(fault.delay_s)
            if self.host.ended is not None:
                return  # the run was through before
        blow = Blow(fault, time.time())
        self.outcome.blows.append(blow)
        strike = {
            "kill": self._kill,
            "term": self._term,
            "hang": self._hang,
            "pause": self._pause,
            "before": self._at_commit_point,
            "after": self._at_commit_point,
            "before-machine": self._at_commit_point,
            "after-machine": self._at_commit_point,
            "store": self._break_store,
            "connections": self._break_connections,
            "machine": self._machine,
            "machine-db-lost": self._machine,
            "machine-in-resume": self._machine_in_resume,
            "stop": self._stop,
            "sigterm": self._signal,
            "ctrl-c": self._signal,
        }[verb]
        await strike(blow, what)
        await self._progress(stand.recorded(name) + 1 if stand.recorded(name) < self._plan.steps else 0)

    async def _kill(self, blow: Blow, component: str) -> None:
        pids = await self._pids(component)
        if component in {"engine", "engine-1", "engine-core", "rollout-worker"}:
            await self._half_generated()
        blow.at = time.time()
        self._stand.kill(pids, signal.SIGKILL)
        await self._recovered(blow, component)

    async def _term(self, blow: Blow, component: str) -> None:
        """A preemption notice to one process: its supervisor takes the end for a death and replaces it."""
        pids = await self._pids(component)
        blow.at, blow.allowed_s = time.time(), _TERM_S
        self._stand.kill(pids, signal.SIGTERM)
        await self._recovered(blow, component)
        if blow.detected_at is None:
            return
        blow.exit_s = blow.detected_at - blow.at
        if blow.exit_s > _TERM_S + _SLACK_S:
            blow.wrong.append(f"{component} took {blow.exit_s:.1f} s to end on SIGTERM, {_TERM_S:.0f} s are allowed")

    async def _hang(self, blow: Blow, component: str) -> None:
        pids = await self._pids(component)
        blow.at = time.time()
        self._stand.kill(pids, signal.SIGSTOP)
        await self._recovered(blow, component)
        still = [pid for pid in pids if pid in self._stand.pids(component, self._name)]
        if still:
            blow.wrong.append(f"{component} was stopped and is still there: {still}")

    async def _pause(self, blow: Blow, component: str) -> None:
        pids = await self._pids(component)
        blow.at = time.time()
        self._stand.kill(pids, signal.SIGSTOP)
        await asyncio.sleep(blow.fault.for_s)
        self._stand.kill(pids, signal.SIGCONT)
        blow.ended_at = time.time()
        await asyncio.sleep(1.0)
        if (line := self._line(self._process(component), blow.at)) is not None:
            blow.wrong.append(f"a pause of {blow.fault.for_s} s was taken for a failure: {line.text}")

    async def _at_commit_point(self, blow: Blow, point: str) -> None:
        """Kill the writer at its next PUT of that kind, from inside the proxy: the request waits meanwhile."""
        stand, whole = self._stand, blow.fault.component == "machine"
        spot = COMMIT_POINTS[point]
        sprung = asyncio.Event()

        def spring(key: str) -> None:
            blow.at = time.time()
            if whole:
                stand.kill([self.host.process.pid], signal.SIGKILL)
                stand.kill_servers()
            else:
                stand.kill(stand.pids(spot.writer, self._name), signal.SIGKILL)
            sprung.set()

        # The first ones are the model's own upload, and a step must be recorded for the figures to mean anything.
        await self._progress(1)
        moment = blow.fault.kind.partition(":")[0].split("-")[0]
        stand.trap = Trap(moment, f"*/{self._name}/{spot.key.removeprefix('*/')}", spring)
        # A host that was killed by it is no surprise.
        ended = (lambda: sprung.is_set() or self.host.ended is not None) if whole else sprung.is_set
        await stand.until(ended, _NEXT_STEP_S, f"a PUT of {spot.key}", None if whole else self.host)
        if not sprung.is_set():
            stand.trap = None
            self.outcome.blows.remove(blow)  # the run was through before that commit point came again
            return
        if whole:
            await self._resume_machine(blow, lost=False)
        else:
            await self._recovered(blow, spot.writer)

    async def _break_store(self, blow: Blow, what: str) -> None:
        proxy = self._stand.proxy
        blow.at = time.time()
        match what:
            case "errors":
                proxy.inject(StoreFault.SLOW_DOWN, share=0.3)
                proxy.inject(StoreFault.INTERNAL, share=0.3)
            case "delays":
                proxy.inject(StoreFault.DELAY)
            case "lost-answers":
                proxy.inject(StoreFault.RESET_AFTER, method="PUT", share=0.5)
            case "resets":
                proxy.inject(StoreFault.RESET_BEFORE, share=0.5)
            case _:
                raise ValueError(f"no such store fault: {what}; known: {', '.join(STORE_FAULTS)}")
        await asyncio.sleep(blow.fault.for_s)
        proxy.heal()
        blow.ended_at = time.time()

    async def _break_connections(self, blow: Blow, what: str) -> None:
        blow.at = time.time()
        await (self._stand.tcp.cut if what == "cut" else self._stand.tcp.freeze)(blow.fault.for_s)
        blow.ended_at = time.time()

    async def _machine(self, blow: Blow, _: str) -> None:
        await self._half_generated()
        blow.at = time.time()
        self._stand.kill([self.host.process.pid], signal.SIGKILL)
        self._stand.kill_servers()
        await self._resume_machine(blow, lost=blow.fault.kind == "machine-db-lost")

    async def _machine_in_resume(self, blow: Blow, _: str) -> None:
        blow.at = time.time()
        self._stand.kill([self.host.process.pid], signal.SIGKILL)
        self._stand.kill_servers()
        await self._machine_back(blow, lost=False)
        await self._start("resume", self._name)
        await asyncio.sleep(blow.fault.for_s)
        self._stand.kill([self.host.process.pid], signal.SIGKILL)
        self._stand.kill_servers()
        await self._resume_machine(blow, lost=False)

    async def _resume_machine(self, blow: Blow, *, lost: bool) -> None:
        await self._machine_back(blow, lost=lost)
        await self._resume(blow)

    async def _machine_back(self, blow: Blow, *, lost: bool) -> None:
        """The host is dead, and everything with it; the servers are there again."""
        killed = time.time()
        await self.host.wait(10.0)
        await self._stand.until(lambda: not self._stand.left(self._name), 10.0, "the kernel to end the host's children")
        if lost:
            await self._stand.forget_temporal()
        else:
            await self._stand.servers_up(killed - 1.0)

    async def _stop(self, blow: Blow, _: str) -> None:
        blow.at = time.time()
        command = await self._stand.call("stop", self._name, "--within", f"{_WITHIN_S:.0f}s", within_s=_WITHIN_S + 30)
        if command.code != 0:
            blow.wrong.append(f"`{command.command}` ended with {command.code}:\n{command.tail()}")
        await self._ended(blow, _WITHIN_S, _STOPPED)
        await self._resume(blow)

    async def _signal(self, blow: Blow, _: str) -> None:
        number, within_s, code = {
            "sigterm": (signal.SIGTERM, _GRACE_S, _STOPPED),
            "ctrl-c": (signal.SIGINT, _CTRL_C_S, _INTERRUPTED),
        }[blow.fault.kind]
        blow.at = time.time()
        self._stand.kill([self.host.process.pid], number)
        await self._ended(blow, within_s, code)
        await self._resume(blow)

    async def _ended(self, blow: Blow, within_s: float, code: int) -> None:
        """An orderly end: in time, with its code, leaving nobody."""
        blow.allowed_s = within_s
        blow.code = await self.host.wait(within_s + 30)
        assert self.host.ended is not None
        blow.exit_s = self.host.ended - blow.at
        finished = blow.code == 0 and self._stand.recorded(self._name) == self._plan.steps
        if blow.code != code and not finished:
            blow.wrong.append(f"{blow.fault.kind}: exit code {blow.code}, expected {code}:\n{self.host.tail(20)}")
        if blow.exit_s > within_s + _SLACK_S:
            blow.wrong.append(f"{blow.fault.kind}: took {blow.exit_s:.1f} s, {within_s:.0f} s were allowed")
        if left := self._stand.left(self._name):
            blow.wrong.append(f"{blow.fault.kind}: left {left}")

    # -- helpers ------------------------------------------------------------------------------------------

    async def _start(self, *arguments: str) -> None:
        self._host = await self._stand.host(*arguments, "--grace", f"{_GRACE_S:.0f}s")
        self._hosts.append(self._host)

    async def _resume(self, blow: Blow) -> None:
        blow.resumed_at = time.time()
        await self._start("resume", self._name)
        host = self.host

        def up() -> bool:
            return any("run " in x.text and (" goes on" in x.text or "nothing to do" in x.text) for x in host.lines)

        await self._stand.until(up, _NEXT_STEP_S, "the resume", host if not host.ended else None)
        ready = [x.at for x in host.lines if x.text.startswith("ready ")]
        blow.ready_at = max(ready, default=None)

    async def _recovered(self, blow: Blow, component: str) -> None:
        """Wait until somebody noticed, and until what was broken is ready."""
        if component.startswith("trainer-rank") and not blow.fault.kind.startswith("hang"):
            await self._stand.until(
                lambda: self._rank(blow), _NEXT_STEP_S, "the trainer's rank to come back", self.host
            )
            return
        process = self._process(component)
        await self._stand.until(
            lambda: self._line(process, blow.at) is not None, _HANG_S, f"{process} to be missed", self.host
        )
        line = self._line(process, blow.at)
        if line is None:
            return  # the run was through first
        blow.detected_at = line.at

        def ready() -> bool:
            found = [x.at for x in self.lines(process) if x.at > line.at and x.text.startswith(f"ready    {process} ")]
            blow.ready_at = found[0] if found else None
            return bool(found)

        await self._stand.until(ready, _NEXT_STEP_S, f"{process} to be ready again", self.host)

    def _process(self, component: str) -> str:
        """The process that the supervisor has for it."""
        if component in {"engine", "engine-core"}:
            return "engine-0" if "two-engines" in self._plan.features else "engine"
        return "trainer" if component.startswith("trainer-rank") else component

    def _line(self, process: str, since: float) -> Line | None:
        for line in self.lines(process):
            if line.at >= since and any(line.text.startswith(f"{process} {word}") for word in _DETECTED):
                return line
        return None

    def _rank(self, blow: Blow) -> bool:
        """torchrun's own log says when it saw the rank's end, the rank's when it holds a version again."""
        log = (self._stand.data / "logs" / self._name / "trainer.log").read_text(errors="replace")
        seen = [_torch_time(x) for x in _RANK_FAILED.findall(log)]
        ready = [_log_time(x) for x in _RANK_READY.findall(log)]
        blow.detected_at = next((t for t in seen if t >= blow.at - 0.01), None)
        blow.ready_at = next((t for t in ready if t > blow.at), None)
        return blow.ready_at is not None

    async def _half_generated(self) -> None:
        """Wait for responses in generation, which the blow is to lose; and read the counter that goes with its engine.

        Not for ever: near the step target nothing is left to generate.
        """
        assert self._tokens is not None
        deadline = time.monotonic() + _IN_FLIGHT_S
        await self._tokens.look()
        while not self._tokens.running and time.monotonic() < deadline and self.host.ended is None:
            await asyncio.sleep(0.02)
            await self._tokens.look()

    async def _pids(self, component: str) -> list[int]:
        await self._stand.until(
            lambda: bool(self._stand.pids(component, self._name)), 60.0, f"{component} to be there", self.host
        )
        return self._stand.pids(component, self._name)

    async def _progress(self, steps: int) -> None:
        """Wait until so many steps are recorded, or all."""
        wanted = min(steps, self._plan.steps)
        await self._stand.until(
            lambda: self._stand.recorded(self._name) >= wanted,
            _NEXT_STEP_S,
            f"the record of step {wanted - 1}",
            self.host,
        )

    async def _end(self) -> None:
        """Leave nothing of this run running, whatever happened."""
        for host in self._hosts:
            if host.ended is None:
                self._stand.kill([host.process.pid], signal.SIGKILL)
                await host.wait(10.0)
        try:
            await self._stand.until(lambda: not self._stand.left(self._name), 10.0, "the run's processes to end")
        except Late:
            left = self._stand.left(self._name)
            self.outcome.wrong.append(f"left running: {left}")
            self._stand.kill([int(line.split()[0]) for line in left], signal.SIGKILL)


def _torch_time(text: str) -> float:
    """torchrun's log has no year: 1130 09:25:11.123000."""
    now = time.localtime()
    return _parsed(f"{now.tm_year}{text}", "%Y%m%d %H:%M:%S")


def _log_time(text: str) -> float:
    return _parsed(text.replace(",", "."), "%Y-%m-%d %H:%M:%S")


def _parsed(text: str, form: str) -> float:
    whole, _, fraction = text.rpartition(".")
    return time.mktime(time.strptime(whole, form)) + float(f"0.{fraction}")


def first_after(times: Iterable[float], moment: float) -> float | None:
    return min((t for t in times if t > moment), default=None)

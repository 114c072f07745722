"""The machine under test: its servers, the proxies before them, and the process that hosts a run.

Owns: every process it starts, the folder they live in, the times at which things were seen. Never touches: verdicts.
Invariant: everything that a run says to Temporal and S3 goes through the proxies. The servers are kept up by the
product's own supervisor, as in a run that owns its stack; they and the engine's imports are what a run costs, so the
servers stay up from run to run.
A crash leaves: nothing but the folder: the kernel ends the children.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import aiohttp
import httpx
from aiohttp import web

from roadstead.infra import s3_server, temporal_server
from roadstead.infra.ports import LOOPBACK, free_port, is_free, remembered_ports
from roadstead.infra.processes import Supervisor
from roadstead.process import die_with_parent
from tests.chaos import features
from tests.chaos.tasks import HELD_OUT
from tests.support import tiny
from tests.support.s3_proxy import S3Proxy
from tests.support.tcp_proxy import TcpProxy

ROOT = Path(__file__).parents[2]
BUCKET, PREFIX = "roadstead", "runs"
_LOOK_S = 0.05
_SCRAPE_S = 0.25
_MODULES = {
    **{f"{role}-worker": f"roadstead.workers.{role}" for role in ("orchestrator", "ledger", "rollout", "train")},
    "engine": "roadstead.inference.launcher",
    "engine-1": "roadstead.inference.launcher",
    "trainer": "roadstead.training.launcher",
    "trainer-rank": "roadstead.training.rank",
    "trainer-rank-1": "roadstead.training.rank",
}
_OF_SEVERAL: dict[str, Callable[[int], bool]] = {
    "engine": lambda pid: re.search(r"/engine(-0)? ", _command(pid)) is not None,
    "engine-1": lambda pid: "/engine-1 " in _command(pid),
    "trainer-rank": lambda pid: _variable(pid, "RANK") == "0",
    "trainer-rank-1": lambda pid: _variable(pid, "RANK") == "1",
}
"""Which of a module's processes is the component."""


class Gone(RuntimeError):
    """The host of the run ended when it should not have; the text ends with its last lines."""


class Late(RuntimeError):
    """Something did not happen in time; the text says what."""


@dataclass(frozen=True)
class Line:
    at: float
    """Unix seconds at which it was read."""
    text: str


@dataclass
class Host:
    """`roadstead run` or `resume` of one run, and what it said."""

    command: str
    process: asyncio.subprocess.Process
    began: float
    lines: list[Line] = field(default_factory=list)
    ended: float | None = None

    @property
    def code(self) -> int | None:
        return self.process.returncode

    def tail(self, count: int = 12) -> str:
        return "\n".join(f"    {line.text}" for line in self.lines[-count:])

    async def wait(self, within_s: float) -> int:
        """Its exit code. Raises Late."""
        try:
            async with asyncio.timeout(within_s):
                while self.ended is None:
                    await asyncio.sleep(_LOOK_S)
        except TimeoutError as error:
            raise Late(
                f"`{self.command}` did not end within {within_s:.0f} s; its last lines:\n{self.tail()}"
            ) from error
        assert self.code is not None
        return self.code


class Stand:
    """Use as `async with Stand(folder) as stand`."""

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self.folder, self.data = folder, folder / "data"
        self._say = say
        self._cleanup = contextlib.AsyncExitStack()
        self.server_lines: list[Line] = []
        self.puts: list[tuple[float, str]] = []
        """(time, key) of every PUT that the server has answered."""
        self.trap: Trap | None = None
        self._servers: Supervisor | None = None
        self._watch: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Stand:
        self.data.mkdir(parents=True)
        self.ports = remembered_ports(self.data / "ports.json", [*temporal_server.PORTS, *s3_server.PORTS])
        self._cleanup.push_async_callback(self.stop_servers)
        await self.start_servers()
        self.keys = s3_server.credentials(self.data)
        self.s3_url = f"http://{LOOPBACK}:{self.ports['s3']}"
        self.proxy = await self._cleanup.enter_async_context(
            _Proxy(self.s3_url, on_request=self._on_request, delay_s=0.4)
        )
        self.tcp = await self._cleanup.enter_async_context(TcpProxy(f"{LOOPBACK}:{self.ports['temporal']}"))
        await asyncio.to_thread(tiny.build_model, self.folder / "model")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._cleanup.aclose()

    # -- the servers --------------------------------------------------------------------------------------

    async def start_servers(self) -> None:
        self._servers = Supervisor(lambda text: self.server_lines.append(Line(time.time(), text)))
        await self._servers.start(
            temporal_server.temporal_spec(self.data, self.ports), s3_server.s3_spec(self.data, self.ports, BUCKET)
        )
        self._watch = asyncio.create_task(self._servers.watch())

    async def stop_servers(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        if self._servers is not None:
            await self._servers.stop()

    async def forget_temporal(self) -> None:
        """As a machine that comes back without Temporal's disk."""
        await self.stop_servers()
        shutil.rmtree(self.data / "temporal")
        await self.start_servers()

    async def servers_up(self, since: float, within_s: float = 60.0) -> None:
        """Wait until both were reported ready again since then."""

        def up() -> bool:
            ready = {n for n in ("temporal", "s3") for x in self.server_lines if x.at > since and _is_ready(x.text, n)}
            return len(ready) == 2

        await self.until(up, within_s, "the servers to come back")

    # -- the run's host -----------------------------------------------------------------------------------

    def write_config(self, name: str, names: Sequence[str], **changes: Any) -> Path:
        """names: of features."""
        wanted = features.changes(names)
        if evaluation := wanted.get("evaluation"):
            held_out = self.folder / "held_out.jsonl"
            held_out.write_text("".join(json.dumps({"prompt": "1+1=", "prompt_id": x}) + "\n" for x in HELD_OUT))
            wanted["evaluation"] = {**evaluation, "prompts": str(held_out)}
        count = wanted.get("engine__replicas", 1)
        config = tiny.config(
            self.folder,
            name,
            storage={"endpoint_url": self.proxy.url},
            temporal={"address": self.tcp.address},
            # Long for so small a model: a fault should meet responses that are half generated.
            rollout={"group_size": 4, "max_tokens": 112, "ignore_eos": True},
            engine={"max_model_len": 128, "port": _row(count), "update_timeout_s": 20},
            **changes,
            **wanted,
        )
        self.engine_ports = [config.engine.port + i for i in range(count)]
        file = self.folder / f"{name}.yaml"
        file.write_text(config.dump())
        return file

    async def host(self, *arguments: str) -> Host:
        """`roadstead ARGUMENTS`, as a process of its own session whose lines are kept with their times."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "roadstead.cli.main", *arguments, "--data", str(self.data)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            cwd=ROOT,
            env={**os.environ, **self.keys.environment, "PYTHONUNBUFFERED": "1", "COLUMNS": "200"},
            preexec_fn=die_with_parent,
            limit=1 << 20,
        )
        host = Host(f"roadstead {' '.join(arguments)}", process, time.time())
        reader = asyncio.create_task(_read(host))
        self._cleanup.callback(reader.cancel)
        self._cleanup.callback(lambda: host.process.returncode is None and host.process.kill())
        return host

    async def call(self, *arguments: str, within_s: float) -> Host:
        """A command that ends by itself."""
        host = await self.host(*arguments)
        await host.wait(within_s)
        return host

    # -- what runs ----------------------------------------------------------------------------------------

    def pids(self, component: str, run: str) -> list[int]:
        """Processes of a component of the run; [] while it is down."""
        if component in {"temporal", "s3"}:
            assert self._servers is not None
            return [self._servers.pids()[component]]
        if component == "engine-core":
            return [
                child
                for parent in self.pids("engine", run)
                for child in _children(parent)
                if "resource_tracker" not in _command(child)
            ]
        module, folder = _MODULES[component], f"/runs/{run}/"
        mine = _OF_SEVERAL.get(component, lambda pid: True)
        return [
            pid
            for pid in _all()
            if f"-m {module} " in (line := _command(pid))
            and folder in line
            and "torch.distributed.run" not in line
            and mine(pid)
        ]

    def left(self, run: str) -> list[str]:
        """Processes that belong to the run."""
        return [f"{pid} {_command(pid)[:160]}" for pid in _all() if f"/runs/{run}/" in _command(pid)]

    def kill(self, pids: list[int], number: signal.Signals) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill_servers(self) -> None:
        self.kill([*self.pids("temporal", ""), *self.pids("s3", "")], signal.SIGKILL)

    # -- what was written ---------------------------------------------------------------------------------

    def recorded(self, run: str) -> int:
        """Steps whose record was written."""
        return len({key for _, key in self.puts if fnmatchcase(key, f"{PREFIX}/{run}/steps/step=*.json")})

    async def until(self, holds: Callable[[], bool], within_s: float, what: str, host: Host | None = None) -> bool:
        """Wait until it holds; False when the host ended well before it did. Raises Late; Gone when it ended badly."""
        deadline = time.monotonic() + within_s
        while not holds():
            if host is not None and host.ended is not None:
                if host.code == 0:
                    return False
                raise Gone(f"`{host.command}` ended with {host.code} while waiting for {what}:\n{host.tail(25)}")
            if time.monotonic() > deadline:
                raise Late(f"waited {within_s:.0f} s for {what}" + (f":\n{host.tail(25)}" if host else ""))
            await asyncio.sleep(_LOOK_S)
        return True

    def _on_request(self, moment: str, method: str, key: str) -> bool:
        if method != "PUT":
            return False
        if moment == "after":
            self.puts.append((time.time(), key))
        trap = self.trap
        if trap is None or moment != trap.moment or not fnmatchcase(key, trap.key):
            return False
        self.trap = None
        trap.spring(key)
        return True  # the request is not sent, or its answer is lost: its writer is dead either way


@dataclass
class Trap:
    """What happens at the next PUT of a key."""

    moment: str
    key: str
    spring: Callable[[str], None]


class Tokens:
    """Tokens that the engines generated, over all their incarnations: their own counters, read again and again.

    A killed engine takes what it generated since the last look with it: nothing where the driver looks before it
    strikes, at most a quarter of a second's worth where it can't (commit points, a core that crashes).
    """

    def __init__(self, ports: Sequence[int]) -> None:
        self._counters = {port: _Counter() for port in ports}

    @property
    def running(self) -> int:
        """Responses in generation, when it was last read."""
        return sum(counter.running for counter in self._counters.values())

    @property
    def total(self) -> int:
        return sum(counter.before + counter.last for counter in self._counters.values())

    @contextlib.asynccontextmanager
    async def counting(self) -> AsyncIterator[Tokens]:
        task = asyncio.create_task(self._watch())
        try:
            yield self
        finally:
            task.cancel()

    async def look(self) -> None:
        async with httpx.AsyncClient(timeout=2.0, verify=False) as client:
            for port, counter in self._counters.items():
                with contextlib.suppress(httpx.HTTPError):
                    counter.see((await client.get(f"http://{LOOPBACK}:{port}/metrics")).text)

    async def _watch(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(_SCRAPE_S)


@dataclass
class _Counter:
    before: int = 0
    """Of incarnations that are gone."""
    last: int = 0
    running: int = 0

    def see(self, text: str) -> None:
        now, self.running = _gauge(text, "generation_tokens_total"), _gauge(text, "num_requests_running")
        if now < self.last:  # another process
            self.before += self.last
        self.last = now


def _gauge(text: str, name: str) -> int:
    found = re.search(rf"^vllm:{name}\{{[^}}]*\}} (\S+)$", text, re.MULTILINE)
    return int(float(found[1])) if found else 0


class _Proxy(S3Proxy):
    """A server that is down is a broken connection to its clients too, not an answer of the proxy's own."""

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        try:
            return await super()._handle(request)
        except aiohttp.ClientError:
            if request.transport is not None:
                request.transport.abort()
            return web.Response()


async def _read(host: Host) -> None:
    assert host.process.stdout is not None
    async for raw in host.process.stdout:
        host.lines.append(Line(time.time(), raw.decode(errors="replace").rstrip()))
    await host.process.wait()
    host.ended = time.time()


def _is_ready(text: str, name: str) -> bool:
    return text.startswith(f"ready    {name} ")


def _all() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _command(pid: int) -> str:
    try:
        return (Path("/proc") / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""  # it ended while we looked


def _variable(pid: int, name: str) -> str:
    """Of its environment as it was started with."""
    try:
        values = (Path("/proc") / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return ""
    return next((v.partition(b"=")[2].decode() for v in values if v.startswith(f"{name}=".encode())), "")


def _row(count: int) -> int:
    """The first of so many free ports in a row."""
    while not all(is_free((first := free_port()) + i) for i in range(count)):
        pass
    return first


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in (Path("/proc") / str(pid) / "task").iterdir():
            found += [int(child) for child in (task / "children").read_text().split()]
    return found

"""The signs of life of an engine, from a server that behaves as vLLM's does around the death of its core."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from aiohttp import web

from roadstead.infra import roles
from roadstead.infra.health import answers, status_of
from roadstead.infra.ports import free_port
from roadstead.infra.processes import HANG_S, Broken, Probe, ProcessSpec
from tests.support import tiny


class Core:
    """Answers /weight_info with `status`, when `answering` lets it; /health is always well."""

    def __init__(self) -> None:
        self.status = 200
        self.answering = asyncio.Event()
        self.answering.set()
        self.port = free_port()

    async def weight_info(self, _: web.Request) -> web.Response:
        await self.answering.wait()
        return web.json_response({"weight_version": "3"}, status=self.status)

    async def health(self, _: web.Request) -> web.Response:
        return web.Response()


@pytest_asyncio.fixture(loop_scope="session")
async def core() -> AsyncIterator[Core]:
    core, application = Core(), web.Application()
    application.router.add_get("/weight_info", core.weight_info)
    application.router.add_get("/health", core.health)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", core.port).start()
    yield core
    core.answering.set()
    await runner.cleanup()


def engine(folder: Path, port: int, update_timeout_s: float = 20.0) -> ProcessSpec:
    config = tiny.config(folder, "x", engine={"port": port, "max_model_len": 128, "update_timeout_s": update_timeout_s})
    return roles.engines_and_trainer(config, folder / "c.yaml", folder, folder)[0]


def alive(spec: ProcessSpec) -> Probe:
    assert spec.alive is not None
    return spec.alive


async def test_an_engine_is_ready_and_alive_when_its_core_answers(tmp_path: Path, core: Core) -> None:
    spec = engine(tmp_path, core.port)
    assert await spec.ready() and await alive(spec)()


async def test_an_engine_whose_core_hangs_is_silent_although_its_server_is_well(tmp_path: Path, core: Core) -> None:
    spec = engine(tmp_path, core.port)
    core.answering.clear()
    assert await answers(f"http://127.0.0.1:{core.port}/health")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(alive(spec)(), 0.5)


async def test_an_engine_whose_core_died_says_so(tmp_path: Path, core: Core) -> None:
    spec = engine(tmp_path, core.port)
    core.status = 500
    assert not await spec.ready()
    with pytest.raises(Broken, match=r"its core has died: .*answers 500"):
        await alive(spec)()


async def test_a_port_nobody_listens_on_is_not_ready_yet_or_not_any_more(tmp_path: Path) -> None:
    spec = engine(tmp_path, port := free_port())
    assert await status_of(f"http://127.0.0.1:{port}/weight_info") is None
    assert not await spec.ready()
    with pytest.raises(Broken, match="is closed"):
        await alive(spec)()


def test_an_engine_may_be_silent_for_as_long_as_an_update_may_take(tmp_path: Path) -> None:
    assert engine(tmp_path, 1, update_timeout_s=20).hang_s == HANG_S
    assert engine(tmp_path, 1, update_timeout_s=300).hang_s == 300

"""The engine on a real vLLM server: it is an `Engine` by the conformance suite, and it ends without leaving a process.

One server and a tiny random Qwen3 for the whole file; the tests run in order, each on the version that the one before
left. The reference is a Hugging Face forward pass in float32, in this process.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from roadstead.inference.conformance import CHECKS, Check
from roadstead.inference.engine import EngineDown, EngineError, GenerateRequest, UpdateFailed
from tests.support.vllm_stand import VllmStand, make_version, vllm_stand

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmStand]:
    with vllm_stand(tmp_path_factory.mktemp("engine")) as stand:
        yield stand


@pytest.fixture(scope="module")
async def stand(server: VllmStand) -> AsyncIterator[VllmStand]:
    await server.started()
    yield server
    await server.aclose()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_vllm_is_an_engine(stand: VllmStand, check: Check) -> None:
    await check(stand)


async def test_it_says_which_build_it_is(stand: VllmStand) -> None:
    info = await stand.engine.info()
    assert re.fullmatch(r"vllm \d+\.\d+\.\d+\+cpu", info.build) and info.max_model_len == 512


async def test_weights_of_another_model_are_refused(stand: VllmStand) -> None:
    now = await stand.engine.version()
    version, folder = stand.new_version()
    make_version(stand.root, version, layers=1)
    with pytest.raises(UpdateFailed, match="differ in name or shape"):
        await stand.engine.load_weights(folder, version)
    assert await stand.engine.version() == now


async def test_a_killed_server_leaves_no_process(stand: VllmStand) -> None:
    children = stand.children()
    assert children, "the engine core must be a process of its own for this test to mean anything"
    waiting = asyncio.ensure_future(
        stand.engine.generate(GenerateRequest("lost", (1, 2, 3), 500, 1.0, 0, ignore_eos=True))
    )
    await asyncio.sleep(0.1)
    os.kill(stand.process.pid, signal.SIGKILL)
    stand.process.wait(10)
    with pytest.raises(EngineError):
        await waiting
    with pytest.raises(EngineDown):
        await stand.engine.version()
    async with asyncio.timeout(30):
        while any(Path(f"/proc/{pid}").exists() for pid in children):
            await asyncio.sleep(0.02)

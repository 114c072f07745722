"""Weights change under requests in flight, and every token still says whose it is.

The property, on a real vLLM server: the logprob of each token equals the forward pass of the version stamped on it, to
1e-4 nats in float32, whatever was in flight, shared or streamed when updates came. A stamp one token off costs 0.4 nats
and more, KV of other weights as much. One server for the file; the tests run in order, and the last one kills it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from roadstead.inference.conformance import TOLERANCE
from roadstead.inference.engine import EngineDown, GenerateRequest, Generation, Partial
from roadstead.inference.vllm_client import VllmEngine
from roadstead.staleness import check_cover, versions_of_spans
from tests.support.vllm_stand import VOCABULARY, VllmStand, vllm_stand, write_manifest

pytestmark = pytest.mark.timeout(240)

_SHARED = 130
"""Prompt tokens that all requests begin with: more than one block of the prefix cache, which is 128 on the CPU."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmStand]:
    with vllm_stand(tmp_path_factory.mktemp("live")) as stand:
        yield stand


@pytest.fixture(scope="module")
async def stand(server: VllmStand) -> AsyncIterator[VllmStand]:
    await server.started()
    yield server
    await server.aclose()


class Traffic:
    """As many requests in flight as `slots`, one after another in each, until `finished`."""

    def __init__(self, engine: VllmEngine, slots: int) -> None:
        self._engine = engine
        self.slots = range(slots)
        self.arrived = [0] * slots
        """Tokens of the slot's response in flight."""
        self.in_flight = 0
        self.finished = False
        self.answers: list[tuple[tuple[int, ...], Generation, list[Partial]]] = []

    async def run(self) -> None:
        await asyncio.gather(*(self._slot(slot) for slot in self.slots))

    def streams(self, slot: int) -> bool:
        return slot % 4 != 0

    async def _slot(self, slot: int) -> None:
        turn = 0
        while not self.finished:
            prompt = (*(1 + 7 * j % (VOCABULARY - 1) for j in range(_SHARED)), *range(1, 2 + slot % 8))
            tokens = 160 + 15 * (slot % 9)
            request = GenerateRequest(f"slot-{slot}-{turn}", prompt, tokens, 1.0, 100 * slot + turn, ignore_eos=True)
            partials: list[Partial] = []

            def arrived(partial: Partial, partials: list[Partial] = partials) -> None:
                self.arrived[slot] = len(partial.token_ids)
                partials.append(partial)

            self.in_flight += 1
            answer = await self._engine.generate(request, arrived if self.streams(slot) else None)
            self.in_flight -= 1
            self.arrived[slot] = 0
            self.answers.append((prompt, answer, partials))
            turn += 1

    async def under_way(self, tokens: int) -> None:
        """Wait until most slots are in the middle of a response."""
        streams = [slot for slot in self.slots if self.streams(slot)]
        async with asyncio.timeout(90):
            while sum(self.arrived[slot] >= tokens for slot in streams) < 0.8 * len(streams):
                await asyncio.sleep(0.002)


@pytest.mark.parametrize(("kv_cache", "slots"), [("recompute", 64), ("keep", 16)])
async def test_every_logprob_is_that_of_the_version_stamped_on_the_token(
    stand: VllmStand, kv_cache: Any, slots: int
) -> None:
    engine = stand.client(kv_cache=kv_cache)
    first = await engine.version()
    planned = [stand.new_version() for _ in range(3)]
    traffic = Traffic(engine, slots)
    running = asyncio.ensure_future(traffic.run())
    updates = [first]
    for version, folder in planned:
        await traffic.under_way(10)
        assert traffic.in_flight == slots
        started = time.monotonic()
        await engine.load_weights(folder, version)
        print(f"update under {slots} requests, KV {kv_cache}: {time.monotonic() - started:.3f} s")
        updates.append(version)
    traffic.finished = True
    await running

    made_by = [{span.version for span in answer.version_spans} for _, answer, _ in traffic.answers]
    met = {update: sum(set(update) <= versions for versions in made_by) for update in pairwise(updates)}
    assert min(met.values()) >= slots // 2, f"each update must meet most requests in mid-response: {met}"
    crossed = Counter(len(versions) - 1 for versions in made_by)
    assert crossed[2] + crossed[3] >= slots // 4, f"some must cross several boundaries: {crossed}"
    worst = 0.0
    for prompt, answer, partials in traffic.answers:
        sampled = versions_of_spans(answer.version_spans)
        assert set(sampled) <= set(updates) and sampled == sorted(sampled)
        if kv_cache == "keep" and len(answer.version_spans) > 1:
            assert answer.kv_version_spans is not None
            check_cover(answer.kv_version_spans, len(sampled))
            assert versions_of_spans(answer.kv_version_spans) == [*sampled[1:], sampled[-1]]
        else:
            assert answer.kv_version_spans is None
        wanted = stand.reference(prompt, answer.token_ids, 1.0, answer.version_spans, answer.kv_version_spans)
        worst = max(worst, *(abs(a - b) for a, b in zip(wanted, answer.logprobs, strict=True)))
        for partial in partials:
            n = len(partial.token_ids)
            assert partial.token_ids == answer.token_ids[:n] and partial.logprobs == answer.logprobs[:n]
            assert versions_of_spans(partial.version_spans) == sampled[:n]
    tokens = sum(len(answer.token_ids) for _, answer, _ in traffic.answers)
    print(f"{tokens} tokens, largest difference {worst:.1e} nats; requests by boundaries crossed: {dict(crossed)}")
    assert worst < TOLERANCE


async def test_the_probe_sees_a_change_of_any_one_tensor(stand: VllmStand) -> None:
    """Or a small update would be taken for one that was not done, and the engine ejected."""
    _, folder = stand.new_version()
    names = sorted(load_file(folder / "model.safetensors"))
    seen = set()
    for name in ["", *(n for n in names if "layers.0" not in n)]:
        version, changed = stand.new_version()
        tensors = load_file(folder / "model.safetensors")
        if name:
            tensors[name] *= 1.001
        save_file(tensors, changed / "model.safetensors", metadata={"format": "pt"})
        write_manifest(changed, version)
        await stand.engine.load_weights(changed, version)  # refused when it computes what was computed before
        seen.add((await stand.post("/collective_rpc", {"method": "logits_digest"})).json()["results"][0])
        version, same = stand.new_version()
        save_file(tensors, same / "model.safetensors", metadata={"format": "pt"})
        write_manifest(same, version)
        await stand.engine.load_weights(same, version)
        assert await stand.engine.version() == version
    assert len(seen) == len(names) - 11 + 1 and all(len(digest) == 64 for digest in seen)


async def test_what_was_streamed_before_the_core_was_killed_is_stamped(stand: VllmStand) -> None:
    first = await stand.engine.version()
    prompts = [tuple(range(1, 5 + i)) for i in range(6)]
    streams: list[list[Partial]] = [[] for _ in prompts]
    waiting = [
        asyncio.ensure_future(
            stand.engine.generate(GenerateRequest(f"killed-{i}", prompt, 450, 1.0, i, ignore_eos=True), stream.append)
        )
        for i, (prompt, stream) in enumerate(zip(prompts, streams, strict=True))
    ]

    async def arrived(tokens: int) -> None:
        async with asyncio.timeout(60):
            while min(len(stream[-1].token_ids) if stream else 0 for stream in streams) < tokens:
                await asyncio.sleep(0.002)

    await arrived(10)
    version, folder = stand.new_version()
    await stand.engine.load_weights(folder, version)
    await arrived(max(len(stream[-1].token_ids) for stream in streams) + 10)
    (core,) = stand.children()
    os.kill(core, signal.SIGKILL)
    for call in waiting:
        with pytest.raises(EngineDown):
            await call
    for prompt, stream in zip(prompts, streams, strict=True):
        last = stream[-1]
        assert 20 <= len(last.token_ids) < 450
        assert [span.version for span in last.version_spans] == [first, version]
        wanted = stand.reference(prompt, last.token_ids, 1.0, last.version_spans, None)
        assert max(abs(a - b) for a, b in zip(wanted, last.logprobs, strict=True)) < TOLERANCE
    async with asyncio.timeout(30):
        while stand.process.poll() is None and Path(f"/proc/{core}").exists():
            await asyncio.sleep(0.02)

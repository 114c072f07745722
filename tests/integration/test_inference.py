"""The engine on a real vLLM server: its logprobs, its version stamps and its end.

One server and a tiny random Qwen3 for the whole file; the tests run in order, each on the version that the
one before left. The reference is a Hugging Face forward pass in float32, in this process.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from roadstead import config
from roadstead.inference.engine import (
    BadRequest,
    EngineDown,
    EngineError,
    GenerateRequest,
    Generation,
    NotAttached,
    UpdateFailed,
)
from roadstead.inference.folders import version_folder
from roadstead.inference.vllm_client import VllmEngine
from roadstead.storage.objects import canonical_json, sha256_file
from roadstead.storage.weights import WeightFile, WeightsManifest

pytestmark = pytest.mark.timeout(240)

VOCABULARY = 64
TOLERANCE = 1e-4
"""Nats. Measured: under 1e-5 in float32; a version boundary one token off costs 0.4 and more."""
STARTUP_TIMEOUT_S = 180.0
"""Start-up takes 10 s of CPU time; the wall time is a matter of who shares the cores."""
STAGE_TIMEOUT_S = 20.0
SERVE = (
    "import sys; from pathlib import Path; from roadstead import config; "
    "from roadstead.inference import launcher; "
    "launcher.serve(config.load(Path(sys.argv[1])), Path(sys.argv[2]), int(sys.argv[3]))"
)
RUN = """
name: engine-test
model: {path: unused, dtype: float32}
data: {prompts: unused.jsonl}
training: {steps: 1}
engine: {max_model_len: 512, max_num_seqs: 32, kv_cache_bytes: 67108864}
"""


def make_version(root: Path, version: int, layers: int = 2) -> Path:
    """A complete version as `storage.weights.download` leaves it, of random weights."""
    folder = version_folder(root, version)
    torch.manual_seed(1000 + version)
    Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=layers,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=32,
            max_position_embeddings=512,
            tie_word_embeddings=False,
            eos_token_id=0,
            initializer_range=0.2,  # logprobs then differ by nats between versions
        )
    ).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({str(i): i for i in range(VOCABULARY)}, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="0").save_pretrained(folder)
    files = tuple(
        WeightFile(name=f.name, key=f.name, bytes=f.stat().st_size, sha256=sha256_file(f))
        for f in sorted(folder.iterdir())
    )
    manifest = WeightsManifest(
        run_id="engine-test", version=version, digest="", files=files, parent_digest=None, batch_digest=None
    )
    (folder / "manifest.json").write_bytes(canonical_json(manifest.model_dump(mode="json")))
    return folder


@dataclass
class Server:
    process: subprocess.Popen[bytes]
    url: str
    root: Path
    log: Path

    def children(self) -> list[int]:
        """Processes that the server started, alive now."""
        listed = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(pid) for pid in listed.split()]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("versions")
    for version in range(3):
        make_version(root, version)
    run, log = root.parent / "run.yaml", root.parent / "server.log"
    run.write_text(RUN)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", SERVE, str(run), str(version_folder(root, 0)), str(port)],
            cwd=Path(config.__file__).parents[1],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    yield Server(process, f"http://127.0.0.1:{port}", root, log)
    process.kill()
    process.wait(10)


@pytest.fixture(scope="module")
async def engine(server: Server) -> AsyncIterator[VllmEngine]:
    """Attached: the first attach waits for the server's start."""
    engine = VllmEngine(server.url, "e0", STAGE_TIMEOUT_S)
    deadline = time.monotonic() + STARTUP_TIMEOUT_S
    while True:
        try:
            assert await engine.attach() == 0
            break
        except EngineDown:
            log = server.log.read_text()[-3000:]
            assert server.process.poll() is None, f"the server ended while it was starting:\n{log}"
            assert time.monotonic() < deadline, f"no server after {STARTUP_TIMEOUT_S} s:\n{log}"
            await asyncio.sleep(0.2)
    yield engine
    await engine.aclose()


def request(name: str, prompt: list[int], tokens: int, temperature: float = 1.0, seed: int = 0) -> GenerateRequest:
    return GenerateRequest(name, tuple(prompt), tokens, temperature, seed, ignore_eos=True)


def prompts(count: int) -> list[list[int]]:
    return [[1 + (7 * i + 3 * j) % (VOCABULARY - 1) for j in range(5 + 4 * i)] for i in range(count)]


class Reference:
    """Logprobs of a response under each version, by one full forward pass: KV all of that version."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._models: dict[int, Any] = {}

    @torch.no_grad()
    def logprobs(self, version: int, prompt: list[int], response: tuple[int, ...], temperature: float) -> list[float]:
        if version not in self._models:
            self._models[version] = AutoModelForCausalLM.from_pretrained(
                version_folder(self._root, version), dtype=torch.float32, attn_implementation="eager"
            ).eval()
        logits = self._models[version](torch.tensor([prompt + list(response)])).logits[0].float()
        table = torch.log_softmax(logits / temperature, dim=-1)
        return [table[len(prompt) - 1 + i, token].item() for i, token in enumerate(response)]

    def error(self, prompt: list[int], generation: Generation, temperature: float) -> float:
        """Largest difference in nats of a token to the version stamped on it."""
        worst = 0.0
        for span in generation.version_spans:
            wanted = self.logprobs(span.version, prompt, generation.token_ids, temperature)
            pairs = zip(wanted[span.start : span.end], generation.logprobs[span.start : span.end], strict=True)
            worst = max(worst, *(abs(a - b) for a, b in pairs))
        return worst


@pytest.fixture(scope="module")
def reference(server: Server) -> Reference:
    return Reference(server.root)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_logprobs_are_the_behaviour_policys(engine: VllmEngine, reference: Reference, temperature: float) -> None:
    given = prompts(4)
    answers = await asyncio.gather(
        *(engine.generate(request(f"t{i}", p, 60, temperature, seed=i)) for i, p in enumerate(given))
    )
    for prompt, answer in zip(given, answers, strict=True):
        assert len(answer.token_ids) == 60 and answer.finish_reason == "length"
        assert [(s.version, s.start, s.end) for s in answer.version_spans] == [(0, 0, 60)]
        assert reference.error(prompt, answer, temperature) < TOLERANCE


async def test_a_bad_request_is_not_retryable_and_harms_nothing(engine: VllmEngine) -> None:
    with pytest.raises(BadRequest):
        await engine.generate(request("unknown-token", [VOCABULARY + 5], 4))
    with pytest.raises(BadRequest):
        await engine.generate(request("too-long", [1] * 600, 4))
    assert await engine.version() == 0
    info = await engine.info()
    assert re.fullmatch(r"vllm \d+\.\d+\.\d+\+cpu", info.build) and info.max_model_len == 512


async def test_an_aborted_request_ends(engine: VllmEngine) -> None:
    waiting = asyncio.ensure_future(engine.generate(request("unwanted", [1, 2, 3], 500)))
    await asyncio.sleep(0.1)
    await engine.abort("unwanted")
    with pytest.raises(EngineDown, match="abort"):
        await waiting


async def test_requests_in_flight_survive_an_update(server: Server, engine: VllmEngine, reference: Reference) -> None:
    given = prompts(12)
    before = await generated_tokens(server.url)
    waiting = [asyncio.ensure_future(engine.generate(request(f"u{i}", p, 400, seed=i))) for i, p in enumerate(given)]
    await until(lambda: generated_tokens(server.url), lambda tokens: tokens > before + 20 * len(given), "tokens")
    started = time.monotonic()
    await engine.load_weights(version_folder(server.root, 1), 1)
    print(f"update with {len(given)} requests in flight: {time.monotonic() - started:.3f} s")
    for prompt, answer in zip(given, await asyncio.gather(*waiting), strict=True):
        assert [span.version for span in answer.version_spans] == [0, 1]
        assert reference.error(prompt, answer, 1.0) < TOLERANCE
        old = reference.logprobs(0, prompt, answer.token_ids, 1.0)
        after = range(answer.version_spans[1].start, len(old))
        assert max(abs(old[i] - answer.logprobs[i]) for i in after) > 0.5, "the versions must be tellable apart"
    assert await engine.version() == 1


async def test_damaged_or_foreign_weights_are_refused_and_the_old_serve_on(
    server: Server, engine: VllmEngine, reference: Reference
) -> None:
    folder = version_folder(server.root, 2)
    file = folder / "model.safetensors"
    good = file.read_bytes()
    file.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(UpdateFailed, match="sha256"):
        await engine.load_weights(folder, 2)
    with pytest.raises(UpdateFailed, match="differ in name or shape"):
        await engine.load_weights(make_version(server.root, 3, layers=1), 3)
    assert await engine.version() == 1
    answer = await engine.generate(request("after-refusal", [5, 6, 7], 30))
    assert [span.version for span in answer.version_spans] == [1]
    assert reference.error([5, 6, 7], answer, 1.0) < TOLERANCE

    file.write_bytes(good)
    await engine.load_weights(folder, 2)
    answer = await engine.generate(request("after-repair", [5, 6, 7], 30))
    assert [span.version for span in answer.version_spans] == [2]
    assert reference.error([5, 6, 7], answer, 1.0) < TOLERANCE


async def test_an_update_whose_client_died_is_found_and_repeated(server: Server, engine: VllmEngine) -> None:
    async with httpx.AsyncClient(base_url=server.url) as dying:
        (await dying.post("/pause?mode=keep&clear_cache=true")).raise_for_status()
        (await dying.post("/start_weight_update")).raise_for_status()
        (await dying.post("/update_weight_version", json={"new_version": "loading-1"})).raise_for_status()
    with pytest.raises(NotAttached):
        await engine.version()
    assert await engine.attach() is None
    await engine.load_weights(version_folder(server.root, 1), 1)
    assert await engine.attach() == 1
    assert [s.version for s in (await engine.generate(request("cured", [1], 5))).version_spans] == [1]


async def test_a_killed_server_leaves_no_process(server: Server, engine: VllmEngine) -> None:
    children = server.children()
    assert children, "the engine core must be a process of its own for this test to mean anything"
    waiting = asyncio.ensure_future(engine.generate(request("lost", [1, 2, 3], 500)))
    await asyncio.sleep(0.1)
    os.kill(server.process.pid, signal.SIGKILL)
    server.process.wait(10)
    with pytest.raises(EngineError):
        await waiting
    with pytest.raises(EngineDown):
        await engine.version()

    async def alive() -> list[int]:
        return [pid for pid in children if Path(f"/proc/{pid}").exists()]

    await until(alive, lambda pids: not pids, "the end of the engine core")


async def generated_tokens(url: str) -> float:
    async with httpx.AsyncClient() as client:
        text = (await client.get(f"{url}/metrics")).text
    return sum(float(n) for n in re.findall(r"^vllm:generation_tokens_total\{.*\} (\S+)$", text, re.MULTILINE))


async def until(look: Callable[[], Any], enough: Callable[[Any], bool], what: str, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not enough(seen := await look()):
        assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}, last saw {seen}"
        await asyncio.sleep(0.02)

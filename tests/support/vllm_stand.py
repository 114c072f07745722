"""A real vLLM server with tiny random weights, and a Hugging Face forward pass in float32 as its reference."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from roadstead import config
from roadstead.inference.engine import EngineDown
from roadstead.inference.folders import version_folder
from roadstead.inference.vllm_client import VllmEngine
from roadstead.staleness import VersionSpan, versions_of_spans
from roadstead.storage.objects import canonical_json, sha256_file
from roadstead.storage.weights import WeightFile, WeightsManifest, tensors_digest
from tests.support.vllm_hooks import IGNORE_LOADS

VOCABULARY = 64
STARTUP_TIMEOUT_S = 180.0
"""Start-up takes 10 s of CPU time; the wall time is a matter of who shares the cores."""
STAGE_TIMEOUT_S = 20.0
_MANIFEST = "manifest.json"
_WEIGHTS = "model.safetensors"
_RUN = """
name: engine-test
model: {path: unused, dtype: float32}
data: {prompts: unused.jsonl}
training: {steps: 1}
engine: {max_model_len: 512, max_num_seqs: 64, kv_cache_bytes: 134217728}
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
    write_manifest(folder, version)
    return folder


def write_manifest(folder: Path, version: int) -> None:
    """Of what is in the folder now."""
    files = tuple(
        WeightFile(name=f.name, key=f.name, bytes=f.stat().st_size, sha256=sha256_file(f))
        for f in sorted(folder.iterdir())
        if f.name != _MANIFEST
    )
    manifest = WeightsManifest(
        run_id="engine-test",
        version=version,
        digest=tensors_digest(folder),
        files=files,
        parent_digest=None,
        batch_digest=None,
    )
    (folder / _MANIFEST).write_bytes(canonical_json(manifest.model_dump(mode="json")))


class Reference:
    """Logprobs of a response, given which version sampled each token on KV of which."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._models: dict[int, Any] = {}

    def _model(self, version: int) -> Any:
        if version not in self._models:
            self._models[version] = AutoModelForCausalLM.from_pretrained(
                version_folder(self._root, version), dtype=torch.float32, attn_implementation="eager"
            ).eval()
        return self._models[version]

    @torch.no_grad()
    def __call__(
        self,
        prompt: Sequence[int],
        response: Sequence[int],
        temperature: float,
        spans: Sequence[VersionSpan],
        kv_spans: Sequence[VersionSpan] | None,
    ) -> list[float]:
        if kv_spans is None:  # one full pass a version, all KV of its own
            logits = {
                version: self._model(version)(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
                for version in {span.version for span in spans}
            }
            sampled = versions_of_spans(spans)
            rows = torch.stack([logits[version][i] for i, version in enumerate(sampled)])
        else:  # each stretch of tokens is taken in by the version that wrote its KV, on the KV before it
            stretches = [(spans[0].version, list(prompt))]
            stretches += [(span.version, list(response[span.start : span.end])) for span in kv_spans]
            past, found = None, []
            for version, tokens in stretches:
                out = self._model(version)(torch.tensor([tokens]), past_key_values=past, use_cache=True)
                past = out.past_key_values
                found.append(out.logits[0])
            rows = torch.cat(found)[len(prompt) - 1 : -1]
        table = torch.log_softmax(rows.float() / temperature, dim=-1)
        return [table[i, token].item() for i, token in enumerate(response)]


class VllmStand:
    """`roadstead.inference.conformance.Stand` over one server."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, root: Path, log: Path) -> None:
        self.process, self.url, self.root, self.log = process, url, root, log
        self.reference = Reference(root)
        self._clients: list[VllmEngine] = []
        self._version = 0
        self.engine = self.client()

    def client(self, *, stage_timeout_s: float | None = None, **options: Any) -> VllmEngine:
        given = {k: v for k, v in options.items() if v is not None}
        self._clients.append(VllmEngine(self.url, "e0", stage_timeout_s or STAGE_TIMEOUT_S, **given))
        return self._clients[-1]

    async def started(self) -> None:
        """The first attach waits for the server's start."""
        deadline = time.monotonic() + STARTUP_TIMEOUT_S
        while True:
            try:
                assert await self.engine.attach() == 0
                return
            except EngineDown:
                log = self.log.read_text()[-3000:]
                assert self.process.poll() is None, f"the server ended while it was starting:\n{log}"
                assert time.monotonic() < deadline, f"no server after {STARTUP_TIMEOUT_S} s:\n{log}"
                await asyncio.sleep(0.2)

    async def aclose(self) -> None:
        for client in self._clients:
            await client.aclose()

    def children(self) -> list[int]:
        """Processes that the server started, alive now: the engine core."""
        listed = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(pid) for pid in listed.split()]

    def new_version(self) -> tuple[int, Path]:
        self._version += 1
        return self._version, make_version(self.root, self._version)

    def damage(self, folder: Path) -> None:
        file = folder / _WEIGHTS
        body = file.read_bytes()
        file.write_bytes(body[:-1] + bytes([body[-1] ^ 1]))

    async def running(self) -> int:
        return int((await self.post("/collective_rpc", {"method": "requests"})).json()["results"][0])

    async def pause(self) -> None:
        await self.post("/pause?mode=keep&clear_cache=false")

    async def break_off(self) -> None:
        await self.pause()
        await self.post("/start_weight_update")
        await self.post("/update_weight_version", {"new_version": "loading-1"})

    def ignore_loads(self, ignore: bool) -> None:
        flag = self.root / IGNORE_LOADS
        flag.touch() if ignore else flag.unlink()

    def hang(self, hang: bool) -> None:
        for pid in self.children():
            os.kill(pid, signal.SIGSTOP if hang else signal.SIGCONT)

    async def post(self, path: str, body: Any = None) -> httpx.Response:
        async with httpx.AsyncClient(base_url=self.url, timeout=30) as client:
            response = await client.post(path, json=body)
        return response.raise_for_status()


@contextmanager
def vllm_stand(folder: Path) -> Iterator[VllmStand]:
    """Started, not yet answering; killed at the end."""
    torch.set_num_threads(1)
    root = folder / "versions"
    make_version(root, 0)
    run, log = folder / "run.yaml", folder / "server.log"
    run.write_text(_RUN)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tests.support.vllm_hooks", str(run), str(version_folder(root, 0)), str(port)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=Path(config.__file__).parents[1], stdout=output, stderr=subprocess.STDOUT
        )
    try:
        yield VllmStand(process, f"http://127.0.0.1:{port}", root, log)
    finally:
        process.kill()
        process.wait(10)

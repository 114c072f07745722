"""An engine in memory that behaves as the real one does, for tests without a server.

Owns: a server's state (`FakeServer`) and a client of it (`FakeEngine`). Both pass `roadstead.inference.conformance`, as
vLLM does: what a unit test sees here holds there.
Invariant: a logprob depends on the weights and on the KV of everything before it, and KV on the weights that wrote it
and all KV before: a stale cache or a wrong stamp shows, as in a transformer.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import random
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from roadstead.inference.engine import (
    BadRequest,
    EngineDown,
    EngineInfo,
    EngineStalled,
    GenerateRequest,
    Generation,
    GenerationAborted,
    NotAttached,
    OnPartial,
    Partial,
    UpdateFailed,
)
from roadstead.inference.folders import version_folder
from roadstead.inference.vllm_answer import kv_spans
from roadstead.staleness import VersionSpan, spans_of_tokens

VOCABULARY = 16
MAX_MODEL_LEN = 512
_WEIGHTS = "model.safetensors"
_STEP_S = 0.0005


def make_version(root: Path, version: int, content: str | None = None) -> Path:
    """A version as `storage.weights.download` leaves it. `content`: its weights; by default those of no other."""
    folder = version_folder(root, version)
    folder.mkdir(parents=True, exist_ok=True)
    body = (content or f"weights {version}").encode()
    (folder / _WEIGHTS).write_bytes(body)
    digest = hashlib.sha256(body).hexdigest()
    files = [{"name": _WEIGHTS, "key": "k", "bytes": len(body), "sha256": digest}]
    (folder / "manifest.json").write_text(json.dumps({"version": version, "digest": digest, "files": files}))
    return folder


def next_kv(weights: str, kv: str, token: int) -> str:
    """KV of a token, given that of all before it."""
    return hashlib.sha256(f"{weights}/{kv}/{token}".encode()).hexdigest()


def table(weights: str, kv: str, temperature: float) -> list[float]:
    """Logprobs of the next token, (vocabulary,)."""
    draw = random.Random(f"{weights}/{kv}")
    logits = [draw.uniform(-2, 2) / temperature for _ in range(VOCABULARY)]
    norm = math.log(sum(math.exp(x) for x in logits))
    return [x - norm for x in logits]


def reference(weights: str, prompt: Sequence[int], response: Sequence[int], temperature: float) -> list[float]:
    """Logprobs of a response when one version makes all of it."""
    kv, logprobs = "", []
    for token in prompt:
        kv = next_kv(weights, kv, token)
    for token in response:
        logprobs.append(table(weights, kv, temperature)[token])
        kv = next_kv(weights, kv, token)
    return logprobs


class FakeServer:
    """What survives a client. `launched`: the folder of the version that it was started from."""

    def __init__(self, launched: Path) -> None:
        self.launched = launched
        self.restart()
        self.dead = self.hung = False
        self.ignores_loads = False
        """Acknowledges weights, and keeps its own."""
        self.step_s = 0.0
        """Between two tokens."""
        self.stalls_loads = False
        """In the middle."""
        self.refuses_loads = 0
        """The next so many."""
        self.loads: list[int] = []
        self.attached = 0

    def restart(self) -> None:
        """As a new process: started from `launched`, and of no version until attached."""
        self.weights = (self.launched / _WEIGHTS).read_text()
        self.digest = hashlib.sha256(self.weights.encode()).hexdigest()
        self.label: int | None = None
        self.loading = self.paused = self.draining = False
        self.running: dict[str, bool] = {}
        """Request id -> whether it is to be ended."""
        self.cache: dict[tuple[int, ...], str] = {}
        """KV by the tokens up to and with its own."""

    async def answer(self, stage: str, timeout_s: float, engine_id: str) -> None:
        """What every call begins with: a dead server refuses it, a hung one lets it run into its deadline."""
        if self.dead:
            raise EngineDown(f"{engine_id}: connection refused")
        since, waited = datetime.now(UTC), 0.0
        while self.hung:
            await asyncio.sleep(0.01)
            waited += 0.01
            if waited > timeout_s:
                raise EngineStalled(engine_id, stage, since, f"the core ({timeout_s:g} s allowed)")


class FakeEngine:
    """`Engine` of a `FakeServer`, with the policies of `VllmEngine`."""

    def __init__(
        self,
        server: FakeServer,
        engine_id: str = "fake",
        stage_timeout_s: float = 0.2,
        *,
        partial_rollout: bool = True,
        on_update: Literal["wait", "abort"] = "wait",
        kv_cache: Literal["recompute", "keep"] = "recompute",
        drain_timeout_s: float = 10.0,
    ) -> None:
        self.server, self.engine_id, self._stage_timeout_s = server, engine_id, stage_timeout_s
        self._mode = kv_cache if partial_rollout else on_update
        self._drain_timeout_s = drain_timeout_s
        self._updated: set[str] = set()
        """Requests that an update ended."""

    async def _call(self, stage: str) -> None:
        await self.server.answer(stage, self._stage_timeout_s, self.engine_id)

    async def aclose(self) -> None:
        """Nothing is held."""

    async def info(self) -> EngineInfo:
        await self._call("info")
        return EngineInfo(self.engine_id, "fake 1.0", MAX_MODEL_LEN)

    # -- generation ---------------------------------------------------------------------------------------

    async def generate(self, req: GenerateRequest, on_partial: OnPartial | None = None) -> Generation:
        await self._call("generate")
        if len(req.prompt_token_ids) + 1 > MAX_MODEL_LEN or max(req.prompt_token_ids) >= VOCABULARY:
            raise BadRequest(f"{self.engine_id}: request {req.request_id} refused: the prompt")
        self.server.running[req.request_id] = False
        try:
            return await self._generate(req, on_partial)
        finally:
            self.server.running.pop(req.request_id, None)
            self._updated.discard(req.request_id)

    async def _generate(self, req: GenerateRequest, on_partial: OnPartial | None) -> Generation:
        server, draw = self.server, random.Random(req.seed)
        tokens: list[int] = []
        logprobs: list[float] = []
        versions: list[int] = []
        kv, made_by, admitted = "", "", server.label
        while True:
            await asyncio.sleep(_STEP_S if server.paused or server.draining else server.step_s)
            await self._call("generate")
            if server.running.get(req.request_id, True):
                if req.request_id in self._updated:
                    raise GenerationAborted(f"{self.engine_id}: {req.request_id} was ended by a weight update")
                raise EngineDown(f"{self.engine_id}: {req.request_id} was aborted")
            if server.paused or (server.draining and not tokens):
                continue
            if server.label is None or server.loading:
                raise EngineDown(f"{self.engine_id}: tokens of unknown weights")
            if not tokens or (made_by != server.weights and not self._keeps_kv()):
                kv, made_by = self._prefill((*req.prompt_token_ids, *tokens)), server.weights
            elif tokens:
                kv = next_kv(server.weights, kv, tokens[-1])
            logprob = self._table(kv, req.temperature)
            token = draw.choices(range(VOCABULARY), [math.exp(x) for x in logprob])[0]
            tokens.append(token)
            logprobs.append(logprob[token])
            versions.append(self._stamp(admitted))
            spans = tuple(spans_of_tokens(versions))
            kept = self._kv_column(spans) if self._mode == "keep" and len(spans) > 1 else None
            if on_partial is not None:
                on_partial(Partial(tuple(tokens), tuple(logprobs), spans, kept))
            full = len(tokens) >= min(req.max_tokens, MAX_MODEL_LEN - len(req.prompt_token_ids))
            if full or (token == 0 and not req.ignore_eos):
                return Generation(tuple(tokens), tuple(logprobs), spans, "length" if full else "stop", kept)

    # What tests of the suite do wrong, one at a time.

    def _stamp(self, admitted: int | None) -> int:
        assert self.server.label is not None
        return self.server.label

    def _table(self, kv: str, temperature: float) -> list[float]:
        return table(self.server.weights, kv, temperature)

    def _keeps_kv(self) -> bool:
        return self._mode == "keep"

    def _kv_column(self, spans: tuple[VersionSpan, ...]) -> tuple[VersionSpan, ...]:
        return kv_spans(spans)

    def _require_change(self, digest: object, before: str) -> None:
        if digest != self.server.digest and self.server.weights == before:
            raise UpdateFailed(f"{self.engine_id}: it still serves the old weights")

    def _take(self, weights: str) -> None:
        self.server.weights = weights
        self.server.cache.clear()

    def _resume(self) -> None:
        self.server.paused = self.server.draining = False

    def _label(self, version: int) -> int:
        return version

    def _prefill(self, tokens: tuple[int, ...]) -> str:
        kv = ""
        for end in range(1, len(tokens) + 1):
            kv = self.server.cache.setdefault(tokens[:end], next_kv(self.server.weights, kv, tokens[end - 1]))
        return kv

    async def abort(self, request_id: str) -> None:
        await self._call("abort")
        if request_id in self.server.running:
            self.server.running[request_id] = True

    # -- weights ------------------------------------------------------------------------------------------

    async def version(self) -> int:
        await self._call("read")
        if self.server.label is None or self.server.loading:
            raise NotAttached(f"{self.engine_id}: of no version; attach it")
        return self.server.label

    async def attach(self) -> int | None:
        await self._call("attach")
        if self.server.loading:
            return None
        if self.server.label is None:
            self.server.label = json.loads((self.server.launched / "manifest.json").read_text())["version"]
            self.server.attached += 1
        self.server.paused = False
        return self.server.label

    async def load_weights(self, folder: Path, version: int) -> None:
        server = self.server
        await self._call("read")
        manifest = json.loads((folder / "manifest.json").read_text())
        if manifest["version"] != version:
            raise UpdateFailed(f"{folder}: its manifest says version {manifest['version']}, expected {version}")
        if server.running and server.label is not None and version < server.label:
            raise UpdateFailed(f"{self.engine_id}: version {version} is older than {server.label}, which has requests")
        server.loads.append(version)
        try:
            await self._pause()
            await self._call("update")
            if server.stalls_loads:
                server.loading, since = True, datetime.now(UTC)
                await asyncio.sleep(self._stage_timeout_s)
                raise EngineStalled(self.engine_id, "update", since, f"weights ({self._stage_timeout_s:g} s allowed)")
            self._replace(folder, manifest, version)
        finally:
            self._resume()

    async def _pause(self) -> None:
        running, since = list(self.server.running), datetime.now(UTC)
        await self._call("pause")
        if self._mode == "abort":
            for request_id in running:
                self.server.running[request_id] = True
                self._updated.add(request_id)
        elif self._mode == "wait":
            self.server.draining, waited = True, 0.0
            while set(running) & set(self.server.running):
                await asyncio.sleep(_STEP_S)
                waited += _STEP_S
                if waited > self._drain_timeout_s:
                    raise EngineStalled(self.engine_id, "drain", since, "the requests in flight")
        self.server.paused = True

    def _replace(self, folder: Path, manifest: dict[str, object], version: int) -> None:
        server = self.server
        body = (folder / _WEIGHTS).read_bytes()
        found = hashlib.sha256(body).hexdigest()
        if server.refuses_loads or found != manifest["digest"]:
            server.refuses_loads = max(0, server.refuses_loads - 1)
            raise UpdateFailed(f"{self.engine_id}: sha256 {found}, announced {manifest['digest']}")
        server.loading = True
        before = server.weights
        if not server.ignores_loads:
            self._take(body.decode())
        self._require_change(manifest["digest"], before)
        server.loading, server.digest, server.label = False, found, self._label(version)

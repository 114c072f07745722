"""An engine that is a vLLM server, spoken to over HTTP.

Owns: the requests, their deadlines, the order of a weight update, and the version label of the engine's
tokens.
Never touches: the server process, S3, the files of a version (the worker reads them; the client reads the
manifest).
Invariant: while the engine's label is a number, its weights are that version. Before weights are touched the
label becomes `loading-<version>`, and a number again only when the outcome is known; tokens sampled in
between are refused, not guessed.
A crash leaves: an engine that may be paused or labelled `loading-...`. `attach` ends the first and reports
the second, and the next `load_weights` cures it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_exponential

from roadstead.inference.engine import (
    BadRequest,
    EngineDown,
    EngineError,
    EngineInfo,
    EngineStalled,
    GenerateRequest,
    Generation,
    NotAttached,
    UpdateFailed,
)
from roadstead.inference.vllm_answer import parse_generation

_FRESH_LABEL = "default"
"""What vLLM calls the weights that it was started with."""
_LOADING_PREFIX = "loading-"
_ENGINE_ID_PREFIX = "generate-tokens-"
"""vLLM prefixes our request ids with it. An abort without it answers "aborted": 1 and the request runs on."""
_READ_ATTEMPTS = 3
"""For requests that may arrive twice."""
_GENERATE_TIMEOUT_S = 1800.0
"""Queueing included. Only a last resort: a hung engine is found by its liveness, after a stage's deadline."""


class VllmEngine:
    """`Engine` over vLLM's token API and its weight-update API (server in dev mode, on this machine).

    `stage_timeout_s`: deadline in seconds of each request but `generate`, and how often a generation's engine
    must show that its core is alive. Use from one event loop.
    """

    def __init__(
        self,
        base_url: str,
        engine_id: str,
        stage_timeout_s: float,
        *,
        generate_timeout_s: float = _GENERATE_TIMEOUT_S,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.engine_id = engine_id
        self._stage_timeout_s = stage_timeout_s
        self._generate_timeout_s = generate_timeout_s
        # Never a used connection: vLLM closes one after a 500 or 5 s of idleness, and a request that meets
        # that end looks like a crash. No limit on new ones: vLLM queues, and an update must not wait.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._http = httpx.AsyncClient(base_url=base_url, timeout=None, limits=limits, transport=transport)

    async def aclose(self) -> None:
        await self._http.aclose()

    # -- generation ---------------------------------------------------------------------------------------

    async def generate(self, req: GenerateRequest) -> Generation:
        """See `Engine.generate`. While it waits, the engine's core is asked for a sign of life."""
        body = {
            "request_id": req.request_id,
            "token_ids": list(req.prompt_token_ids),
            "sampling_params": {
                "max_tokens": req.max_tokens,
                "temperature": req.temperature,
                "seed": req.seed,
                "ignore_eos": req.ignore_eos,
                "logprobs": 0,  # of the sampled token only
                "detokenize": False,
            },
        }
        answer = asyncio.ensure_future(self._send("POST", "/inference/v1/generate", body))
        try:
            async with self._deadline("generate", self._generate_timeout_s, f"request {req.request_id}"):
                while not (await asyncio.wait({answer}, timeout=self._stage_timeout_s))[0]:
                    await self._label()
                response = answer.result()
        finally:
            answer.cancel()  # the closed connection aborts the request in the engine
            await asyncio.gather(answer, return_exceptions=True)
        if response.is_client_error:
            raise BadRequest(f"{self.engine_id}: request {req.request_id} refused: {_reason(response)}")
        self._require_success(response, f"request {req.request_id}")
        return parse_generation(response.content, f"{self.engine_id}: request {req.request_id}")

    async def abort(self, request_id: str) -> None:
        async with self._deadline("abort", self._stage_timeout_s, f"request {request_id}"):
            response = await self._repeat("POST", "/abort_requests", {"request_ids": [_ENGINE_ID_PREFIX + request_id]})
        self._require_success(response, f"abort of {request_id}")

    # -- what it is ---------------------------------------------------------------------------------------

    async def info(self) -> EngineInfo:
        build = (await self._read("/version"))["version"]
        model = (await self._read("/v1/models"))["data"][0]
        return EngineInfo(self.engine_id, f"vllm {build}", model["max_model_len"])

    async def version(self) -> int:
        label = await self._label()
        if not label.isdecimal():
            raise NotAttached(f"{self.engine_id}: its weights are labelled {label!r}, not a policy version; attach it")
        return int(label)

    async def attach(self) -> int | None:
        """See `Engine.attach`. Reads the manifest of the folder that the server was started from."""
        label = await self._label()
        if label.startswith(_LOADING_PREFIX):
            return None
        if label == _FRESH_LABEL:
            folder = Path((await self._read("/v1/models"))["data"][0]["root"])
            version = _manifest(folder)["version"]
            await self._stage("attach", "/init_weight_transfer_engine", {"init_info": {"root": str(folder.parent)}})
            await self._stage("attach", "/update_weight_version", {"new_version": str(version)})
        elif (await self._read("/is_paused"))["is_paused"]:
            # The label is a number, so whoever paused it died before the weights were touched or after they
            # were in.
            await self._stage("resume", "/resume")
        return await self.version()

    # -- weights ------------------------------------------------------------------------------------------

    async def load_weights(self, folder: Path, version: int) -> None:
        """See `Engine.load_weights`. pause, start, update, finish, resume; each with its own deadline."""
        manifest = _manifest(folder)
        if manifest["version"] != version:
            raise UpdateFailed(f"{folder}: its manifest says version {manifest['version']}, expected {version}")
        digests = {f["name"]: f["sha256"] for f in manifest["files"] if f["name"].endswith(".safetensors")}
        before = await self._label()
        try:
            await self._replace(folder, version, digests, before)
        except BaseException as error:
            try:
                await self._stage("resume", "/resume")
            except EngineError as second:
                error.add_note(f"and it could not be resumed: {second}")
            raise
        await self._stage("resume", "/resume")
        if (now := await self._label()) != str(version):
            raise UpdateFailed(f"{self.engine_id}: acknowledged version {version}, reads back {now!r}")

    async def _replace(self, folder: Path, version: int, digests: dict[str, str], before: str) -> None:
        # keep: requests in flight stay. clear_cache: their KV is computed again with the new weights; cached
        # blocks of the old ones would otherwise serve new requests under the new label.
        await self._stage("pause", "/pause?mode=keep&clear_cache=true")
        await self._start()
        await self._stage("update", "/update_weight_version", {"new_version": f"{_LOADING_PREFIX}{version}"})
        try:
            await self._stage(
                "update",
                "/update_weights",
                {"update_info": {"path": str(folder.resolve()), "sha256": digests}},
            )
        except UpdateFailed:
            # Refused by the worker, which does so only before it touches a parameter.
            await self._stage("update", "/update_weight_version", {"new_version": before})
            raise
        await self._stage("finish", "/finish_weight_update", {"weight_version": str(version)})

    async def _start(self) -> None:
        try:
            await self._stage("start", "/start_weight_update")
        except UpdateFailed:
            # A client that died or gave up left its update open: close it. The worker's finish does no more.
            await self._stage("start", "/finish_weight_update")
            await self._stage("start", "/start_weight_update")

    async def _stage(self, stage: str, path: str, body: dict[str, Any] | None = None) -> None:
        """One step of an update. Raises EngineStalled, EngineDown, UpdateFailed."""
        async with self._deadline(stage, self._stage_timeout_s, f"POST {path}"):
            response = await self._send("POST", path, body)
        if not response.is_success:
            raise UpdateFailed(f"{self.engine_id}: {stage} refused: {_reason(response)}")

    # -- HTTP ---------------------------------------------------------------------------------------------

    async def _label(self) -> str:
        """The label of the weights, by a round trip to the engine core: also the proof that it lives."""
        return str((await self._read("/weight_info"))["weight_version"])

    async def _read(self, path: str) -> Any:
        async with self._deadline("read", self._stage_timeout_s, f"GET {path}"):
            response = await self._repeat("GET", path)
        self._require_success(response, f"GET {path}")
        return response.json()

    async def _repeat(self, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        """Send a request that may arrive twice, so a broken connection is no reason to give up."""
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(EngineDown),
            stop=stop_after_attempt(_READ_ATTEMPTS),
            wait=wait_exponential(multiplier=0.05),
            reraise=True,
        )
        return await retrying(self._send, method, path, body)

    async def _send(self, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        try:
            return await self._http.request(method, path, json=body)
        except httpx.TransportError as error:
            raise EngineDown(f"{self.engine_id} at {self._http.base_url}: {method} {path}: {error!r}") from error

    def _require_success(self, response: httpx.Response, what: str) -> None:
        if not response.is_success:
            raise EngineDown(f"{self.engine_id}: {what} failed: {_reason(response)}")

    @asynccontextmanager
    async def _deadline(self, stage: str, seconds: float, waiting_for: str) -> AsyncIterator[None]:
        since = datetime.now(UTC)
        try:
            async with asyncio.timeout(seconds):
                yield
        except TimeoutError as error:
            raise EngineStalled(self.engine_id, stage, since, f"{waiting_for} ({seconds:g} s allowed)") from error


def _manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a local version. Raises UpdateFailed when there is none."""
    try:
        manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_bytes())
    except (OSError, ValueError) as error:
        raise UpdateFailed(f"{folder / 'manifest.json'}: {error}; download the version again") from error
    return manifest


def _reason(response: httpx.Response) -> str:
    return f"HTTP {response.status_code}: {response.text[:500]}"

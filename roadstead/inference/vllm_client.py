"""An engine that is a vLLM server, spoken to over HTTP.

Owns: the requests, and what this client knows of the engine.
Never touches: the server process, S3, the files of a version; `vllm_update` has the order of a weight update.
Invariant: what it returns is finished, and every token carries the version whose weights sampled it, as stamped by the
engine; tokens sampled under a label that is no version are refused, not guessed. KV of older weights serves no request
but those that were generating when the update came.
A crash leaves: see `vllm_update`; the engine aborts the requests of a client that is gone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import httpx

from roadstead.inference.engine import (
    BadRequest,
    EngineDown,
    EngineInfo,
    GenerateRequest,
    Generation,
    GenerationAborted,
    NotAttached,
    OnPartial,
)
from roadstead.inference.labels import FRESH, LOADING_PREFIX, new_label, version_of
from roadstead.inference.vllm_answer import AbortedByEngine, Response
from roadstead.inference.vllm_http import VllmHttp, reason
from roadstead.inference.vllm_update import PauseMode, Updater, read_manifest

_ENGINE_ID_PREFIX = "generate-tokens-"
"""vLLM prefixes our request ids with it. An abort without it answers "aborted": 1 and the request runs on."""
_GENERATE_TIMEOUT_S = 1800.0
"""Queueing included. Only a last resort: a hung engine is found by its liveness, after a stage's deadline."""


class _OldSalt(Exception):
    """The request was admitted under other weights than those that sampled its first token."""


class VllmEngine:
    """`Engine` over vLLM's token API and its weight-update API (server in dev mode, on this machine).

    `stage_timeout_s`: deadline in seconds of each request but `generate`, and how often a generation's engine must show
    that its core is alive. `partial_rollout`, `on_update` and `kv_cache` are the configuration's keys.
    `drain_timeout_s`: how long an update under `on_update: wait` waits for the requests in flight; None: as long as one
    request may take. Use from one event loop, and one client an engine: another's update is taken for an accident.
    """

    def __init__(
        self,
        base_url: str,
        engine_id: str,
        stage_timeout_s: float,
        *,
        generate_timeout_s: float = _GENERATE_TIMEOUT_S,
        partial_rollout: bool = True,
        on_update: Literal["wait", "abort"] = "wait",
        kv_cache: Literal["recompute", "keep"] = "recompute",
        drain_timeout_s: float | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.engine_id = engine_id
        self._generate_timeout_s = generate_timeout_s
        self._mode: PauseMode = kv_cache if partial_rollout else on_update
        self._http = VllmHttp(base_url, engine_id, stage_timeout_s, transport)
        self._updater = Updater(self._http, self._mode, drain_timeout_s or generate_timeout_s)
        self._label: str | None = None
        """Of the weights, when last heard of; the salt of the prefix cache under `keep`."""
        self._in_flight: list[str] = []
        self._aborted: set[str] = set()
        """Of the requests in flight, those that `abort` was called for."""

    async def aclose(self) -> None:
        await self._http.aclose()

    # -- generation ---------------------------------------------------------------------------------------

    async def generate(self, req: GenerateRequest, on_partial: OnPartial | None = None) -> Generation:
        """See `Engine.generate`. While it waits, the engine's core is asked for a sign of life."""
        self._in_flight.append(req.request_id)
        try:
            async with self._http.deadline("generate", self._generate_timeout_s, f"request {req.request_id}"):
                while True:
                    try:
                        return await self._http.while_alive(self._ask(req, on_partial))
                    except _OldSalt:
                        # It waited in the engine's queue while weights changed, and may have found KV of the old ones.
                        continue
        finally:
            self._in_flight.remove(req.request_id)
            if req.request_id not in self._in_flight:
                self._aborted.discard(req.request_id)

    async def _ask(self, req: GenerateRequest, on_partial: OnPartial | None) -> Generation:
        what, mark = f"{self.engine_id}: request {req.request_id}", self._updater.mark()
        salt = (self._label or await self._heard()) if self._mode == "keep" else None
        # The first token is looked at under `keep`, when it is early enough to ask again.
        stream = on_partial is not None or salt is not None
        response = Response(what, kept_kv=salt is not None)
        async with self._http.stream("POST", "/inference/v1/generate", _body(req, stream, salt)) as http:
            if not http.is_success:
                await http.aread()
                if http.is_client_error:
                    raise BadRequest(f"{what} refused: {reason(http)}")
                raise EngineDown(f"{what} failed: {reason(http)}")
            if stream:
                await self._read(http, response, salt, on_partial)
            else:
                response.add(await http.aread())
        try:
            generation = response.generation()
        except AbortedByEngine:
            if req.request_id not in self._aborted and self._updater.aborted_since(mark):
                raise GenerationAborted(f"{what} was ended by a weight update; ask again") from None
            raise EngineDown(f"{what} was aborted, and not by a weight update") from None
        if self._mode in ("wait", "abort") and len(generation.version_spans) > 1:
            # The scheduler had preempted it, so the engine did not count it as in flight when it paused.
            raise GenerationAborted(f"{what} met a weight update in the queue: {generation.version_spans}; ask again")
        return generation

    async def _read(
        self, http: httpx.Response, response: Response, salt: str | None, on_partial: OnPartial | None
    ) -> None:
        """Chunks until one has a finish reason. A dead engine ends its streams with HTTP 200 and `[DONE]`, too."""
        async for line in http.aiter_lines():
            if not line.startswith("data:"):
                continue
            response.add(line.removeprefix("data:"))
            if salt is not None and response.first_label not in (None, salt):
                self._label = None
                raise _OldSalt
            if on_partial is not None:
                on_partial(response.partial())
            if response.finish_reason is not None:
                return
        raise EngineDown(f"{response.what}: the stream ended without a finish reason")

    async def abort(self, request_id: str) -> None:
        if request_id in self._in_flight:
            self._aborted.add(request_id)
        async with self._http.deadline("abort", self._http.timeout_s, f"request {request_id}"):
            body = {"request_ids": [_ENGINE_ID_PREFIX + request_id]}
            response = await self._http.repeat("POST", "/abort_requests", body)
        self._http.require_success(response, f"abort of {request_id}")

    # -- what it is ---------------------------------------------------------------------------------------

    async def info(self) -> EngineInfo:
        build = (await self._http.read("/version"))["version"]
        model = (await self._http.read("/v1/models"))["data"][0]
        return EngineInfo(self.engine_id, f"vllm {build}", model["max_model_len"])

    async def version(self) -> int:
        version = version_of(await self._heard())
        assert version is not None
        return version

    async def attach(self) -> int | None:
        """See `Engine.attach`. Reads the manifest of the folder that the server was started from."""
        label = await self._http.label()
        if label.startswith(LOADING_PREFIX):
            return None
        if label == FRESH:
            folder = Path((await self._http.read("/v1/models"))["data"][0]["root"])
            version = read_manifest(folder)["version"]
            root = {"init_info": {"root": str(folder.parent)}}
            await self._http.stage("attach", "/init_weight_transfer_engine", root)
            await self._http.stage("attach", "/update_weight_version", {"new_version": new_label(version)})
        elif (await self._http.read("/is_paused"))["is_paused"]:
            # The label is a version, so whoever paused it died before the weights were touched or after they were in.
            await self._http.stage("resume", "/resume")
        return await self.version()

    async def _heard(self) -> str:
        """The engine's label, which must be of a version. Raises NotAttached."""
        label = await self._http.label()
        if version_of(label) is None:
            self._label = None
            raise NotAttached(f"{self.engine_id}: its weights are labelled {label!r}, not a policy version; attach it")
        self._label = label
        return label

    # -- weights ------------------------------------------------------------------------------------------

    async def load_weights(self, folder: Path, version: int) -> None:
        """See `Engine.load_weights`."""
        self._label = await self._updater.load(folder, version, len(self._in_flight))


def _body(req: GenerateRequest, stream: bool, salt: str | None) -> dict[str, Any]:
    body: dict[str, Any] = {
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
        "stream": stream,
    }
    return body if salt is None else body | {"cache_salt": salt}

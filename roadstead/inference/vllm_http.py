"""Requests to a vLLM server, each with a deadline and a name.

Owns: the connections, the deadlines of single requests, and what an HTTP status means. Never touches: what the requests
are for.
Invariant: every call ends in an answer, or in an `EngineError` that says what was waited for and since when.
A crash leaves: a request that may or may not have arrived.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any, TypeVar

import httpx
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_exponential

from roadstead.inference.engine import EngineDown, EngineStalled, UpdateFailed

T = TypeVar("T")

_READ_ATTEMPTS = 3
"""For requests that may arrive twice."""


class VllmHttp:
    """`timeout_s`: deadline in seconds of each request that isn't given one of its own."""

    def __init__(
        self, base_url: str, engine_id: str, timeout_s: float, transport: httpx.AsyncBaseTransport | None
    ) -> None:
        self.engine_id = engine_id
        self.timeout_s = timeout_s
        # Never a used connection: vLLM closes one after a 500 or 5 s of idleness, and a request that meets
        # that end looks like a crash. No limit on new ones: vLLM queues, and an update must not wait.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._client = httpx.AsyncClient(base_url=base_url, timeout=None, limits=limits, transport=transport)

    async def aclose(self) -> None:
        await self._client.aclose()

    async def label(self) -> str:
        """The label of the weights, by a round trip to the engine core: also the proof that it lives."""
        return str((await self.read("/weight_info"))["weight_version"])

    async def read(self, path: str) -> Any:
        """The JSON of a GET. Raises EngineDown, EngineStalled."""
        async with self.deadline("read", self.timeout_s, f"GET {path}"):
            response = await self.repeat("GET", path)
        self.require_success(response, f"GET {path}")
        return response.json()

    async def stage(self, stage: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        """One step of an update, a POST. Raises EngineStalled, EngineDown, UpdateFailed."""
        async with self.deadline(stage, self.timeout_s, f"POST {path}"):
            response = await self.send("POST", path, body)
        self.require_stage(response, stage)
        return response

    async def while_alive(self, call: Coroutine[Any, Any, T]) -> T:
        """Await a call that may take long; each `timeout_s` the engine's core must show that it lives.

        Raises EngineDown, EngineStalled when it doesn't. However this ends, the call has ended too.
        """
        task = asyncio.ensure_future(call)
        try:
            while not (await asyncio.wait({task}, timeout=self.timeout_s))[0]:
                await self.label()
            return task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def repeat(self, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        """Send a request that may arrive twice, so a broken connection is no reason to give up."""
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(EngineDown),
            stop=stop_after_attempt(_READ_ATTEMPTS),
            wait=wait_exponential(multiplier=0.05),
            reraise=True,
        )
        return await retrying(self.send, method, path, body)

    async def send(self, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        async with self.stream(method, path, body) as response:
            await response.aread()
        return response

    @asynccontextmanager
    async def stream(self, method: str, path: str, body: dict[str, Any] | None = None) -> AsyncIterator[httpx.Response]:
        """A response whose body is still to come; a connection that breaks while it does is EngineDown."""
        try:
            async with self._client.stream(method, path, json=body) as response:
                yield response
        except httpx.TransportError as error:
            raise EngineDown(f"{self.engine_id} at {self._client.base_url}: {method} {path}: {error!r}") from error

    def require_success(self, response: httpx.Response, what: str) -> None:
        if not response.is_success:
            raise EngineDown(f"{self.engine_id}: {what} failed: {reason(response)}")

    def require_stage(self, response: httpx.Response, stage: str) -> None:
        if not response.is_success:
            raise UpdateFailed(f"{self.engine_id}: {stage} refused: {reason(response)}")

    @asynccontextmanager
    async def deadline(self, stage: str, seconds: float, waiting_for: str) -> AsyncIterator[None]:
        since = datetime.now(UTC)
        try:
            async with asyncio.timeout(seconds):
                yield
        except TimeoutError as error:
            raise EngineStalled(self.engine_id, stage, since, f"{waiting_for} ({seconds:g} s allowed)") from error


def reason(response: httpx.Response) -> str:
    return f"HTTP {response.status_code}: {response.text[:500]}"

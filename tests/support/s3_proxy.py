"""A proxy in front of a real S3 server that breaks what networks and stores break, and tells of every request.

Owns: one loopback port, the faults that were asked for, and the log of what crossed. Never touches: the signature
(Host and headers go through as they came; SeaweedFS checks the signature against the Host header it receives, so the
proxy's own address is what was signed and what is checked), nor a body, unless a fault says so.
Invariant: a request without a fault is forwarded once and answered with the server's own answer.
A crash leaves: nothing; the server behind it keeps what it acknowledged.

Commit points are S3 keys: a chaos driver gives `on_request` and kills a process before or after the PUT of a key.
The hook returns True to drop the request: at "before" it is not forwarded, at "after" its answer is lost.

    with proxy_in_thread(address.endpoint_url) as proxy:          # or: async with S3Proxy(url) as proxy
        proxy.inject(Fault.SLOW_DOWN, method="PUT", key="*/_COMMIT.json", times=2)
        store = ObjectStore(dataclasses.replace(address, endpoint_url=proxy.url))
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import inspect
import random
import socket
import struct
import threading
import time
import urllib.parse
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, Self
from xml.etree import ElementTree

import aiohttp
from aiohttp import web
from yarl import URL

LOOPBACK = "127.0.0.1"
Moment = Literal["before", "after"]
Hook = Callable[[Moment, str, str], "bool | Awaitable[bool | None] | None"]
"""(moment, method, key) -> True to drop the request. Methods: PUT, GET, HEAD, DELETE, POST, LIST."""

_HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "expect", "content-length"}
_NAMESPACE = "{http://s3.amazonaws.com/doc/2006-03-01/}"
_START_S = 10.0


class Fault(enum.Enum):
    SLOW_DOWN = (503, "SlowDown")
    INTERNAL = (500, "InternalError")
    DISK_FULL = (507, "InsufficientStorage")
    ACCESS_DENIED = (403, "AccessDenied")
    """Read-only credentials, when asked for with method="PUT"."""
    TIME_SKEWED = (403, "RequestTimeTooSkewed")
    CONFLICT = (409, "ConditionalRequestConflict")
    """AWS answers it when two conditional writes race; nothing landed."""
    RESET_BEFORE = (0, "the connection breaks before the server sees the request")
    RESET_AFTER = (1, "the server did it, its answer is lost")
    TRUNCATED_UPLOAD = (2, "the server gets the head and half of the body, then the connection breaks")
    SHORT_UPLOAD = (3, "the server gets half of the body as if it were the whole: a broken middlebox")
    TRUNCATED_READ = (4, "the client gets half of the body, then the connection breaks")
    SHORT_READ = (5, "the client gets half of the body as if it were the whole")
    STALL = (6, "no answer for `stall_s`, then the connection breaks")
    DELAY = (7, "the right answer, `delay_s` late")
    STALE_LIST = (8, "a listing without the keys that were put since the fault was asked for")


@dataclass
class _Rule:
    fault: Fault
    method: str
    key: str
    left: int | None
    share: float
    since: int
    """Number of PUTs that had crossed when the fault was asked for."""


@dataclass(frozen=True)
class Crossing:
    """One request that reached the proxy."""

    method: str
    key: str
    fault: Fault | None
    status: int
    """The server's answer; 0: it was not asked, or its answer was not waited for."""


class S3Proxy:
    """`upstream`: http://host:port of the server. All methods may be called from any thread."""

    def __init__(
        self,
        upstream: str,
        *,
        on_request: Hook | None = None,
        seed: int = 0,
        stall_s: float = 5.0,
        delay_s: float = 0.3,
    ) -> None:
        self._upstream = upstream.rstrip("/")
        self.on_request = on_request
        self._stall_s, self._delay_s = stall_s, delay_s
        self._random = random.Random(seed)
        self._rules: list[_Rule] = []
        self._lock = threading.Lock()
        self._cleanup = contextlib.AsyncExitStack()
        self._puts: list[str] = []
        self.crossings: list[Crossing] = []
        self.url = ""

    # -- asking for faults --------------------------------------------------------------------------------

    def inject(
        self, fault: Fault, *, method: str = "*", key: str = "*", times: int | None = None, share: float = 1.0
    ) -> None:
        """The first rule that matches a request acts. `key`: a glob; `times`: None for ever; `share`: seeded chance."""
        with self._lock:
            self._rules.append(_Rule(fault, method, key, times, share, len(self._puts)))

    def heal(self) -> None:
        """No faults any more."""
        with self._lock:
            self._rules.clear()

    def crossed(self, method: str = "*", key: str = "*") -> list[Crossing]:
        return [c for c in list(self.crossings) if _matches(method, c.method) and fnmatchcase(c.key, key)]

    # -- life ---------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        self._session = await self._cleanup.enter_async_context(
            aiohttp.ClientSession(
                auto_decompress=False,
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=300),
                skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            )
        )
        application = web.Application(client_max_size=1 << 40)
        application.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.2)
        await runner.setup()
        self._cleanup.push_async_callback(runner.cleanup)
        listener = socket.create_server((LOOPBACK, 0))
        await web.SockSite(runner, listener).start()
        self.url = f"http://{LOOPBACK}:{listener.getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._cleanup.aclose()

    # -- one request --------------------------------------------------------------------------------------

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        path = urllib.parse.unquote(request.raw_path.partition("?")[0])
        key = path.lstrip("/").partition("/")[2]
        method = "LIST" if request.method == "GET" and "list-type" in request.query else request.method
        if method == "LIST":
            key = request.query.get("prefix", "")
        body = await request.read()
        rule = self._rule(method, key)
        fault = rule.fault if rule else None
        if await self._hook("before", method, key):
            return self._lost(request, method, key, fault, 0)
        if fault is not None and fault.value[0] >= 400:
            status, code = fault.value
            self.crossings.append(Crossing(method, key, fault, status))
            return web.Response(status=status, body=_error_body(code, key), content_type="application/xml")
        if fault is Fault.RESET_BEFORE:
            return self._lost(request, method, key, fault, 0)
        if fault is Fault.STALL:
            self.crossings.append(Crossing(method, key, fault, 0))
            await asyncio.sleep(self._stall_s)
            _reset(request)
            return web.Response()
        if fault is Fault.TRUNCATED_UPLOAD:
            await self._send_half(request, body)
            return self._lost(request, method, key, fault, 0)
        if fault is Fault.DELAY:
            await asyncio.sleep(self._delay_s)
        sent = body[: len(body) // 2] if fault is Fault.SHORT_UPLOAD else body
        async with self._session.request(
            request.method,
            URL(self._upstream + request.raw_path, encoded=True),
            headers=[(k, v) for k, v in request.headers.items() if k.lower() not in _HOP_BY_HOP],
            data=sent if sent or request.method in {"PUT", "POST"} else None,
            allow_redirects=False,
        ) as answer:
            content = await answer.read()
            status, headers = answer.status, answer.headers
        if method == "PUT" and status < 300:
            self._puts.append(key)
        if await self._hook("after", method, key) or fault is Fault.RESET_AFTER:
            return self._lost(request, method, key, fault, status)
        self.crossings.append(Crossing(method, key, fault, status))
        if fault is Fault.STALE_LIST and rule is not None and status < 300:
            content = _without(content, set(self._puts[rule.since :]))
        length = len(content) if request.method != "HEAD" else int(headers.get("Content-Length", 0))
        if fault is Fault.SHORT_READ:
            content, length = content[: length // 2], length // 2
        reply = web.StreamResponse(
            status=status, headers=[(k, v) for k, v in headers.items() if k.lower() not in _HOP_BY_HOP]
        )
        reply.content_length = length
        await reply.prepare(request)
        if fault is Fault.TRUNCATED_READ:
            await reply.write(content[: length // 2])
            await asyncio.sleep(0.05)  # let the half arrive, so that it is the body that breaks and not the head
            _reset(request)
        elif content:
            await reply.write(content)
        return reply

    def _rule(self, method: str, key: str) -> _Rule | None:
        with self._lock:
            for rule in self._rules:
                if rule.left == 0 or not _matches(rule.method, method) or not fnmatchcase(key, rule.key):
                    continue
                if rule.share < 1 and self._random.random() >= rule.share:
                    continue
                if rule.left is not None:
                    rule.left -= 1
                return rule
        return None

    async def _hook(self, moment: Moment, method: str, key: str) -> bool:
        if self.on_request is None:
            return False
        answer = self.on_request(moment, method, key)
        return bool(await answer if inspect.isawaitable(answer) else answer)

    def _lost(
        self, request: web.Request, method: str, key: str, fault: Fault | None, status: int
    ) -> web.StreamResponse:
        self.crossings.append(Crossing(method, key, fault, status))
        _reset(request)
        return web.Response()

    async def _send_half(self, request: web.Request, body: bytes) -> None:
        """The request's head and half of its body, on a connection of its own that then closes."""
        place = urllib.parse.urlsplit(self._upstream)
        _, writer = await asyncio.open_connection(place.hostname, place.port)
        head = [f"{request.method} {request.raw_path} HTTP/1.1"]
        head += [f"{k}: {v}" for k, v in request.headers.items() if k.lower() not in _HOP_BY_HOP]
        head += [f"Content-Length: {len(body)}", "", ""]
        writer.write("\r\n".join(head).encode() + body[: len(body) // 2])
        await writer.drain()
        await asyncio.sleep(0.05)  # let the server see the half before the end
        writer.close()


@contextlib.contextmanager
def proxy_in_thread(
    upstream: str, *, on_request: Hook | None = None, seed: int = 0, stall_s: float = 5.0, delay_s: float = 0.3
) -> Iterator[S3Proxy]:
    """The proxy with an event loop of its own, for tests that are not asynchronous. The hook runs in its thread."""
    proxy = S3Proxy(upstream, on_request=on_request, seed=seed, stall_s=stall_s, delay_s=delay_s)
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()
    ready = threading.Event()

    async def serve() -> None:
        async with proxy:
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), name="s3-proxy")
    thread.start()
    try:
        if not ready.wait(_START_S):
            raise TimeoutError(f"the S3 proxy did not listen within {_START_S:.0f} s")
        yield proxy
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(_START_S)
        loop.close()


def _matches(pattern: str, method: str) -> bool:
    return pattern in ("*", method)


def _reset(request: web.Request) -> None:
    """A TCP reset, not an orderly end: SO_LINGER of zero seconds."""
    if request.transport is not None:
        request.transport.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
        )
        request.transport.abort()


def _error_body(code: str, key: str) -> bytes:
    return (
        f'<?xml version="1.0" encoding="UTF-8"?><Error><Code>{code}</Code><Message>injected {code}</Message>'
        f"<Resource>{key}</Resource><RequestId>{int(time.time())}</RequestId></Error>"
    ).encode()


def _without(listing: bytes, hidden: set[str]) -> bytes:
    """A ListObjectsV2 answer without `hidden` keys, and without the common prefixes above them."""
    root = ElementTree.fromstring(listing)
    for entry in [*root.findall(f"{_NAMESPACE}Contents"), *root.findall("Contents")]:
        key = entry.findtext(f"{_NAMESPACE}Key") or entry.findtext("Key")
        if key in hidden:
            root.remove(entry)
    for entry in [*root.findall(f"{_NAMESPACE}CommonPrefixes"), *root.findall("CommonPrefixes")]:
        prefix = entry.findtext(f"{_NAMESPACE}Prefix") or entry.findtext("Prefix") or ""
        if any(key.startswith(prefix) for key in hidden):
            root.remove(entry)
    return ElementTree.tostring(root)

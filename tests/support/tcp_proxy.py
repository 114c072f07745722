"""A TCP proxy that loses connections on demand.

Owns: one loopback port and the connections through it. Never touches: the bytes.
Invariant: without a fault every byte goes through, in order, and an end on one side is an end on the other.
A crash leaves: nothing.

    async with TcpProxy("127.0.0.1:7233") as proxy:      # clients connect to proxy.address
        await proxy.cut(3.0)      # every connection breaks now, new ones are refused for three seconds
        await proxy.freeze(20.0)  # every byte waits for twenty seconds, and new connections too: a black hole
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import time
from typing import Self

LOOPBACK = "127.0.0.1"
_CHUNK = 1 << 16


class TcpProxy:
    """`upstream`: host:port. Use from one event loop."""

    def __init__(self, upstream: str) -> None:
        host, _, port = upstream.rpartition(":")
        self._upstream = (host, int(port))
        self._open: set[asyncio.StreamWriter] = set()
        self._refused_until = 0.0
        self._flows = asyncio.Event()
        self._flows.set()
        self.address = ""

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, LOOPBACK, 0)
        self.address = f"{LOOPBACK}:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self._flows.set()
        self._break_all()

    async def cut(self, for_s: float) -> None:
        """Reset every connection, and refuse new ones for the time. Returns when it is over."""
        self._refused_until = time.monotonic() + for_s
        self._break_all()
        await asyncio.sleep(for_s)

    async def freeze(self, for_s: float) -> None:
        """Let nothing through for the time, both ways; then everything that waited goes on. Returns when it is over."""
        self._flows.clear()
        try:
            await asyncio.sleep(for_s)
        finally:
            self._flows.set()

    def _break_all(self) -> None:
        for writer in list(self._open):
            _reset(writer)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if time.monotonic() < self._refused_until:
            _reset(writer)
            return
        await self._flows.wait()
        try:
            up_reader, up_writer = await asyncio.open_connection(*self._upstream)
        except OSError:  # the server is down: so is this connection
            _reset(writer)
            return
        self._open |= {writer, up_writer}
        try:
            await asyncio.gather(self._pump(reader, up_writer), self._pump(up_reader, writer))
        finally:
            self._open -= {writer, up_writer}
            for end in (writer, up_writer):
                end.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):  # a broken connection ends here, and its other side below
            while chunk := await reader.read(_CHUNK):
                await self._flows.wait()
                writer.write(chunk)
                await writer.drain()
        with contextlib.suppress(OSError, RuntimeError):
            writer.write_eof()


def _reset(writer: asyncio.StreamWriter) -> None:
    """A TCP reset, as a network or a dead host gives it."""
    with contextlib.suppress(OSError):
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()

"""The proxy that loses connections: transparent without a fault, and each fault does what it says."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.support.tcp_proxy import TcpProxy


@pytest_asyncio.fixture(loop_scope="session")
async def proxy() -> AsyncIterator[TcpProxy]:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while chunk := await reader.read(100):
            writer.write(chunk)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    async with TcpProxy(f"127.0.0.1:{server.sockets[0].getsockname()[1]}") as proxy:
        yield proxy
    server.close()


class Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def to(cls, proxy: TcpProxy) -> Connection:
        host, _, port = proxy.address.rpartition(":")
        return cls(*await asyncio.open_connection(host, int(port)))

    async def say(self, text: bytes) -> bytes:
        self._writer.write(text)
        await self._writer.drain()
        return await asyncio.wait_for(self._reader.readexactly(len(text)), 5)

    async def ended(self) -> bool:
        try:
            return await asyncio.wait_for(self._reader.read(1), 5) == b""
        except ConnectionError:
            return True


async def test_bytes_go_through_and_an_end_is_an_end(proxy: TcpProxy) -> None:
    connection = await Connection.to(proxy)
    body = bytes(range(256)) * 2000
    assert await connection.say(body) == body
    connection._writer.write_eof()
    assert await connection.ended()


async def test_a_cut_breaks_connections_and_refuses_new_ones_for_its_time(proxy: TcpProxy) -> None:
    before = await Connection.to(proxy)
    assert await before.say(b"there") == b"there"
    cut = asyncio.create_task(proxy.cut(0.5))
    assert await before.ended() and not cut.done()
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await (await Connection.to(proxy)).say(b"still cut")
    await cut
    assert await (await Connection.to(proxy)).say(b"back") == b"back"


async def test_a_freeze_holds_every_byte_and_then_lets_it_go(proxy: TcpProxy) -> None:
    connection, began = await Connection.to(proxy), time.monotonic()
    assert await connection.say(b"there") == b"there"
    freeze = asyncio.create_task(proxy.freeze(0.6))
    await asyncio.sleep(0.05)
    assert await connection.say(b"held") == b"held"
    assert time.monotonic() - began >= 0.6
    await freeze


async def test_a_server_that_is_down_is_a_broken_connection() -> None:
    async with TcpProxy("127.0.0.1:1") as proxy:
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await (await Connection.to(proxy)).say(b"anybody")

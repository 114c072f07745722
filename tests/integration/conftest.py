"""Real servers for the integration tests: one Temporal and one S3 a session, on free loopback ports."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio
from temporalio.client import Client

from roadstead.infra import s3_server, temporal_server
from roadstead.infra.ports import LOOPBACK, remembered_ports
from roadstead.infra.processes import Supervisor
from roadstead.storage.objects import ObjectStore, StoreAddress
from roadstead.workers.host import connect
from tests.support import tiny
from tests.support.workplace import Workplace


@dataclass(frozen=True)
class Servers:
    temporal: str
    s3: StoreAddress


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def servers(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Servers]:
    data: Path = tmp_path_factory.mktemp("stack")
    ports = remembered_ports(data / "ports.json", [*temporal_server.PORTS, *s3_server.PORTS])
    supervisor = Supervisor(print)
    try:
        await supervisor.start(temporal_server.temporal_spec(data, ports), s3_server.s3_spec(data, ports, "roadstead"))
        keys = s3_server.credentials(data)
        os.environ.update(keys.environment)
        yield Servers(
            temporal=f"{LOOPBACK}:{ports['temporal']}",
            s3=StoreAddress(
                bucket="roadstead",
                endpoint_url=f"http://{LOOPBACK}:{ports['s3']}",
                access_key=keys.access_key,
                secret_key=keys.secret_key,
            ),
        )
    finally:
        await supervisor.stop()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def temporal(servers: Servers) -> Client:
    return await connect(servers.temporal, "default")


@pytest.fixture(scope="session")
def store(servers: Servers) -> ObjectStore:
    return ObjectStore(servers.s3)


@pytest.fixture(scope="session")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workplace]:
    """A data directory whose own stack stays up for the session."""
    place = Workplace(tmp_path_factory.mktemp("run"))
    tiny.build_model(place.folder / "model")
    place.roadstead("up")
    try:
        yield place
    finally:
        place.roadstead("down")
        assert place.processes() == [], "nothing may be left running"

"""The watcher against a scripted engine and a scripted store."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from roadstead.inference.engine import EngineDown, EngineStalled, NotAttached, UpdateFailed
from roadstead.inference.folders import remove_old, version_folder
from roadstead.inference.watcher import WeightWatcher
from roadstead.storage import weights
from roadstead.storage.objects import StoreError

POLL_S = 0.005
WAIT_S = 5.0


class Engine:
    """Label, how it became so, and what to do wrong. A class of its own: only these four calls are used."""

    def __init__(self) -> None:
        self.label: int | str = "default"
        self.launched = 0
        self.loads: list[int] = []
        self.attached = 0
        self.failures: list[Exception] = []
        self.dead = False
        self.acknowledges_only = False
        self.hang: asyncio.Event | None = None

    async def attach(self) -> int | None:
        self._alive()
        if self.label == "default":
            self.label = self.launched
            self.attached += 1
        return None if self.label == "loading" else int(self.label)

    async def version(self) -> int:
        self._alive()
        if not isinstance(self.label, int):
            raise NotAttached(f"label {self.label}")
        return self.label

    async def load_weights(self, folder: Path, version: int) -> None:
        self._alive()
        assert folder.name == f"v={version:08d}" and (folder / "manifest.json").exists()
        self.loads.append(version)
        if self.hang:
            await self.hang.wait()
        if self.failures:
            raise self.failures.pop(0)
        if not self.acknowledges_only:
            self.label = version

    def _alive(self) -> None:
        if self.dead:
            raise EngineDown("connection refused")


class Published:
    """What the store holds: the newest version, or an error."""

    def __init__(self) -> None:
        self.newest: int | None = 0
        self.error: Exception | None = None
        self.downloads: list[int] = []
        self.stall_s = 0.0

    def latest_version(self, *_: Any) -> int | None:
        time.sleep(self.stall_s)
        if self.error:
            raise self.error
        return self.newest

    def manifest_of(self, _store: Any, _keys: Any, version: int) -> int:
        return version

    def download(self, _store: Any, manifest: int, folder: Path) -> Path:
        self.downloads.append(manifest)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "manifest.json").touch()
        return folder


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> Published:
    published = Published()
    for name in ("latest_version", "manifest_of", "download"):
        monkeypatch.setattr(weights, name, getattr(published, name))
    return published


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
async def watcher(published: Published, engine: Engine, tmp_path: Path) -> AsyncIterator[WeightWatcher]:
    nothing: Any = None
    scripted: Any = engine
    watcher = WeightWatcher(scripted, nothing, nothing, tmp_path, POLL_S, stage_timeout_s=0.2)
    running = asyncio.create_task(watcher.run())
    yield watcher
    assert not running.done(), "nothing may end the watcher"
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not true():
            await asyncio.sleep(POLL_S)


async def test_new_weights_are_loaded_once(watcher: WeightWatcher, engine: Engine, published: Published) -> None:
    await watcher.at_least(0, WAIT_S)
    published.newest = 1
    await watcher.at_least(1, WAIT_S)
    await asyncio.sleep(10 * POLL_S)  # announced again and again
    assert engine.loads == [1] and watcher.version == 1


async def test_versions_in_between_are_skipped(watcher: WeightWatcher, engine: Engine, published: Published) -> None:
    published.newest = 7
    await watcher.at_least(3, WAIT_S)
    assert engine.loads == [7]


async def test_a_failing_update_keeps_the_old_version_and_is_tried_again(
    watcher: WeightWatcher, engine: Engine, published: Published
) -> None:
    await watcher.at_least(0, WAIT_S)
    engine.failures = [UpdateFailed("sha256"), UpdateFailed("sha256")]
    published.newest = 1
    await until(lambda: len(engine.loads) == 2)
    assert watcher.version == 0
    await watcher.at_least(1, WAIT_S)
    assert engine.loads == [1, 1, 1]


async def test_an_engine_that_acknowledges_but_reads_back_the_old_version_is_not_believed(
    watcher: WeightWatcher, engine: Engine, published: Published
) -> None:
    engine.acknowledges_only = True
    published.newest = 1
    await until(lambda: len(engine.loads) >= 2)
    assert watcher.version == 0
    with pytest.raises(EngineStalled, match="version 1"):
        await watcher.at_least(1, 0.05)
    engine.acknowledges_only = False
    await watcher.at_least(1, WAIT_S)


async def test_a_stall_in_loading_is_named(watcher: WeightWatcher, engine: Engine, published: Published) -> None:
    await watcher.at_least(0, WAIT_S)
    engine.hang = asyncio.Event()
    published.newest = 1
    with pytest.raises(EngineStalled, match=r"'load' since .*the engine serves 0, published is 1") as error:
        await watcher.at_least(1, 0.1)
    assert error.value.stage == watcher.stage == "load"
    engine.hang.set()
    await watcher.at_least(1, WAIT_S)


async def test_a_stall_of_the_store_has_a_deadline_and_a_name(watcher: WeightWatcher, published: Published) -> None:
    await watcher.at_least(0, WAIT_S)
    published.stall_s = 0.4
    await until(lambda: watcher.stage == "waiting to retry 'poll'")
    published.stall_s, published.newest = 0.0, 1
    await watcher.at_least(1, WAIT_S)


async def test_a_dead_engine_is_unknown_until_it_is_back(
    watcher: WeightWatcher, engine: Engine, published: Published
) -> None:
    await watcher.at_least(0, WAIT_S)
    engine.dead = True
    await until(lambda: watcher.version is None)
    published.newest = 2
    with pytest.raises(EngineStalled, match="attach"):
        await watcher.at_least(2, 0.05)
    engine.dead, engine.label, engine.launched = False, "default", 2
    await watcher.at_least(2, WAIT_S)
    assert engine.attached == 2 and engine.loads == []


async def test_an_engine_restarted_between_two_looks_is_attached_again(
    watcher: WeightWatcher, engine: Engine, published: Published
) -> None:
    published.newest = 1
    await watcher.at_least(1, WAIT_S)
    engine.label, engine.launched = "default", 1
    await until(lambda: engine.attached == 2)
    assert engine.loads == [1]


async def test_an_update_broken_off_by_a_crash_is_repeated_even_if_nothing_newer_exists(
    published: Published, engine: Engine, tmp_path: Path
) -> None:
    engine.label = "loading"
    published.newest = 4
    nothing: Any = None
    scripted: Any = engine
    watcher = WeightWatcher(scripted, nothing, nothing, tmp_path, POLL_S, stage_timeout_s=1)
    running = asyncio.create_task(watcher.run())
    await watcher.at_least(4, WAIT_S)
    running.cancel()
    assert engine.loads == [4]


async def test_a_store_that_is_away_does_not_unseat_the_version(watcher: WeightWatcher, published: Published) -> None:
    await watcher.at_least(0, WAIT_S)
    published.error = StoreError("503")
    await until(lambda: watcher.stage == "waiting to retry 'poll'")
    assert watcher.version == 0
    published.error, published.newest = None, 1
    await watcher.at_least(1, WAIT_S)


async def test_old_versions_leave_the_disk(watcher: WeightWatcher, published: Published, tmp_path: Path) -> None:
    for version in range(1, 5):
        published.newest = version
        await watcher.at_least(version, WAIT_S)
    await until(lambda: sorted(p.name for p in tmp_path.iterdir()) == ["v=00000003", "v=00000004"])


def test_parts_of_old_downloads_go_too_and_strangers_stay(tmp_path: Path) -> None:
    for version in (1, 2, 3):
        version_folder(tmp_path, version).mkdir()
    (tmp_path / ".v=00000001-x8k2").mkdir()
    (tmp_path / ".v=00000004-loading").mkdir()
    (tmp_path / "other").mkdir()
    assert remove_old(tmp_path) == [1, 2]
    assert sorted(p.name for p in tmp_path.iterdir()) == [".v=00000004-loading", "other", "v=00000003"]

"""The watcher against an in-memory engine, which test_conformance holds to the real one's behaviour, and a scripted
store."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from roadstead.inference.engine import EngineStalled, GenerateRequest
from roadstead.inference.folders import remove_old, version_folder
from roadstead.inference.watcher import WeightWatcher
from roadstead.storage import weights
from roadstead.storage.objects import StoreError
from tests.support.fake_engine import FakeEngine, FakeServer, make_version

POLL_S = 0.005
WAIT_S = 20.0
STALL_S = 0.3


class Published:
    """What the store holds: the newest version, or an error."""

    def __init__(self) -> None:
        self.newest: int | None = 0
        self.error: Exception | None = None
        self.downloads: list[int] = []
        self.stall_s: dict[str, float] = {}

    def latest_version(self, *_: Any) -> int | None:
        time.sleep(self.stall_s.get("poll", 0))
        if self.error:
            raise self.error
        return self.newest

    def manifest_of(self, _store: Any, _keys: Any, version: int) -> int:
        return version

    def download(self, _store: Any, manifest: int, folder: Path) -> Path:
        time.sleep(self.stall_s.get("download", 0))
        self.downloads.append(manifest)
        return make_version(folder.parent, manifest)


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> Published:
    published = Published()
    for name in ("latest_version", "manifest_of", "download"):
        monkeypatch.setattr(weights, name, getattr(published, name))
    return published


@pytest.fixture
def server(tmp_path: Path) -> FakeServer:
    return FakeServer(make_version(tmp_path, 0))


@asynccontextmanager
async def watching(server: FakeServer, folder: Path, **options: Any) -> AsyncIterator[WeightWatcher]:
    nothing: Any = None
    engine = FakeEngine(server, stage_timeout_s=STALL_S)
    watcher = WeightWatcher(engine, nothing, nothing, folder, POLL_S, STALL_S, **options)
    running = asyncio.create_task(watcher.run())
    try:
        yield watcher
        assert not running.done(), "nothing may end the watcher"
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


@pytest.fixture
async def watcher(published: Published, server: FakeServer, tmp_path: Path) -> AsyncIterator[WeightWatcher]:
    async with watching(server, tmp_path) as watcher:
        yield watcher


async def until(true: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not true():
            await asyncio.sleep(POLL_S)


# -- what is loaded -----------------------------------------------------------------------------------------


async def test_new_weights_are_loaded_once(watcher: WeightWatcher, server: FakeServer, published: Published) -> None:
    await watcher.at_least(0, WAIT_S)
    published.newest = 1
    await watcher.at_least(1, WAIT_S)
    await asyncio.sleep(20 * POLL_S)  # announced again and again
    assert server.loads == [1] and watcher.version == 1


async def test_versions_in_between_are_skipped_and_the_version_is_not_a_count(
    watcher: WeightWatcher, server: FakeServer, published: Published
) -> None:
    published.newest = 7
    await watcher.at_least(3, WAIT_S)
    assert server.loads == [7] and watcher.version == server.label == 7


async def test_an_engine_that_is_ahead_keeps_its_version(
    watcher: WeightWatcher, server: FakeServer, published: Published
) -> None:
    published.newest = 3
    await watcher.at_least(3, WAIT_S)
    published.newest = 2  # a hint that was written late
    await asyncio.sleep(20 * POLL_S)
    assert server.loads == [3] and watcher.version == 3


async def test_a_chooser_holds_an_engine_at_a_version(published: Published, server: FakeServer, tmp_path: Path) -> None:
    seen: list[tuple[int | None, int]] = []
    held = 2

    def choose(current: int | None, newest: int) -> int | None:
        seen.append((current, newest))
        return min(held, newest)

    async with watching(server, tmp_path, choose=choose) as watcher:
        published.newest = 5
        await watcher.at_least(2, WAIT_S)
        await until(lambda: seen[-1] == (2, 5))
        assert server.loads == [2] and watcher.version == 2
        held = 9
        await watcher.at_least(5, WAIT_S)
    assert server.loads == [2, 5]


async def test_a_chooser_that_gives_no_version_leaves_the_engine_alone(
    published: Published, server: FakeServer, tmp_path: Path
) -> None:
    published.newest = 5
    async with watching(server, tmp_path, choose=lambda current, newest: None) as watcher:
        await watcher.at_least(0, WAIT_S)
        await asyncio.sleep(20 * POLL_S)
        assert server.loads == [] and watcher.version == 0


async def test_an_older_version_waits_until_the_engine_has_no_requests(
    published: Published, server: FakeServer, tmp_path: Path
) -> None:
    wanted = 4
    published.newest = 4
    async with watching(server, tmp_path, choose=lambda current, newest: wanted) as watcher:
        await watcher.at_least(4, WAIT_S)
        server.step_s = 0.02
        request = GenerateRequest("r", (1, 2), 40, 1.0, 0, ignore_eos=True)
        waiting = asyncio.ensure_future(FakeEngine(server, stage_timeout_s=WAIT_S).generate(request))
        await until(lambda: server.running)
        wanted = 1
        with capture_logs() as logs:
            await until(lambda: any("older" in entry.get("error", "") for entry in logs))
        assert watcher.version == 4 and 1 not in server.loads and server.running
        assert [span.version for span in (await waiting).version_spans] == [4]
        await until(lambda: watcher.version == 1)
        await until(lambda: watcher.stage == "idle")
        assert version_folder(tmp_path, 1).exists(), "the version that is served stays on disk"


# -- what fails ---------------------------------------------------------------------------------------------


async def test_a_failing_update_keeps_the_old_version_and_is_tried_again(
    watcher: WeightWatcher, server: FakeServer, published: Published
) -> None:
    await watcher.at_least(0, WAIT_S)
    server.refuses_loads = 2
    published.newest = 1
    await until(lambda: len(server.loads) == 2)
    assert watcher.version == 0 and not server.paused
    await watcher.at_least(1, WAIT_S)
    assert server.loads == [1, 1, 1]


async def test_an_engine_that_acknowledges_but_serves_the_old_weights_is_ejected(
    watcher: WeightWatcher, server: FakeServer, published: Published
) -> None:
    await watcher.at_least(0, WAIT_S)
    server.ignores_loads = True
    published.newest = 1
    await until(lambda: len(server.loads) >= 2)
    assert watcher.version is None, "it must get no requests: what it serves is uncertain"
    with pytest.raises(EngineStalled, match="serves None, published is 1"):
        await watcher.at_least(0, 0.05)
    server.ignores_loads = False
    await watcher.at_least(1, WAIT_S)


async def test_an_engine_that_acknowledges_but_reads_back_the_old_version_is_not_believed(
    monkeypatch: pytest.MonkeyPatch, watcher: WeightWatcher, server: FakeServer, published: Published
) -> None:
    await watcher.at_least(0, WAIT_S)
    monkeypatch.setattr(FakeEngine, "_label", lambda self, version: 0)
    published.newest = 1
    await until(lambda: len(server.loads) >= 2)
    assert watcher.version == 0
    monkeypatch.undo()


async def test_a_dead_engine_is_unknown_until_it_is_back(
    watcher: WeightWatcher, server: FakeServer, published: Published, tmp_path: Path
) -> None:
    await watcher.at_least(0, WAIT_S)
    server.dead = True
    await until(lambda: watcher.version is None)
    published.newest = 2
    with pytest.raises(EngineStalled, match="attach"):
        await watcher.at_least(2, 0.05)
    server.launched = make_version(tmp_path, 2)
    server.restart()
    server.dead = False
    await watcher.at_least(2, WAIT_S)
    assert server.attached == 2 and server.loads == []


async def test_an_engine_restarted_between_two_looks_is_attached_again(
    watcher: WeightWatcher, server: FakeServer, published: Published, tmp_path: Path
) -> None:
    published.newest = 1
    await watcher.at_least(1, WAIT_S)
    server.launched = version_folder(tmp_path, 1)
    server.restart()
    await until(lambda: server.attached == 2)
    assert server.loads == [1]


async def test_an_update_broken_off_by_a_crash_is_repeated_even_if_nothing_newer_exists(
    published: Published, server: FakeServer, tmp_path: Path
) -> None:
    server.loading = True
    published.newest = 4
    async with watching(server, tmp_path) as watcher:
        await watcher.at_least(4, WAIT_S)
    assert server.loads == [4]


async def test_a_store_that_is_away_does_not_unseat_the_version(watcher: WeightWatcher, published: Published) -> None:
    await watcher.at_least(0, WAIT_S)
    published.error = StoreError("503")
    await until(lambda: watcher.stage == "waiting to retry 'poll'")
    assert watcher.version == 0 and watcher.stalled is None
    published.error, published.newest = None, 1
    await watcher.at_least(1, WAIT_S)


# -- what stalls --------------------------------------------------------------------------------------------


async def test_a_stall_in_loading_is_named(watcher: WeightWatcher, server: FakeServer, published: Published) -> None:
    await watcher.at_least(0, WAIT_S)
    server.stalls_loads = True
    published.newest = 1
    await until(lambda: watcher.stage == "load")
    began = watcher.since
    with pytest.raises(EngineStalled, match=r"'load' since .*the engine serves 0, published is 1") as error:
        await watcher.at_least(1, 0)
    assert error.value.stage == "load" and error.value.since == began
    await until(lambda: watcher.stalled == "update")
    assert watcher.version is None, "it may be half-way"
    server.stalls_loads = False
    await watcher.at_least(1, WAIT_S)


@pytest.mark.parametrize("stage", ["poll", "download"])
async def test_a_stall_of_the_store_has_a_deadline_and_a_name(
    watcher: WeightWatcher, published: Published, stage: str
) -> None:
    await watcher.at_least(0, WAIT_S)
    with capture_logs() as logs:
        published.stall_s[stage] = 2 * STALL_S
        published.newest = 1 if stage == "download" else 0
        await until(lambda: watcher.stage == f"waiting to retry {stage!r}")
    assert watcher.stalled == stage and watcher.version == 0
    alarm = next(entry for entry in logs if entry["event"] == "weights.stalled")
    assert (alarm["log_level"], alarm["stage"], alarm["serving"]) == ("error", stage, 0)
    assert alarm["since"] and alarm["waiting_for"] == f"{STALL_S} s allowed"
    published.stall_s.clear()
    published.newest = 1
    await watcher.at_least(1, WAIT_S)
    await until(lambda: watcher.stalled is None)


async def test_a_hung_engine_raises_an_alarm_and_leaves_other_engines_alone(
    watcher: WeightWatcher, server: FakeServer, published: Published, tmp_path: Path
) -> None:
    other_server = FakeServer(make_version(tmp_path / "other", 0))
    async with watching(other_server, tmp_path / "other") as other:
        await asyncio.gather(watcher.at_least(0, WAIT_S), other.at_least(0, WAIT_S))
        with capture_logs() as logs:
            server.hung = True
            published.newest = 1
            await other.at_least(1, WAIT_S)
            await until(lambda: watcher.stalled)
        assert watcher.version is None and other.version == 1 and other.stalled is None
        alarm = next(entry for entry in logs if entry["event"] == "weights.stalled")
        assert alarm["waiting_for"].startswith("the core")
        server.hung = False
        await watcher.at_least(1, WAIT_S)


# -- what is told, what stays -------------------------------------------------------------------------------


async def test_each_finished_stage_is_reported_with_its_duration(
    published: Published, server: FakeServer, tmp_path: Path
) -> None:
    stages: list[tuple[str, float]] = []
    published.newest = 1
    published.stall_s["download"] = 0.05
    async with watching(server, tmp_path, on_stage=lambda stage, seconds: stages.append((stage, seconds))) as watcher:
        await watcher.at_least(1, WAIT_S)
        await until(lambda: watcher.stage == "idle")
    assert [stage for stage, _ in stages[:6]] == ["attach", "poll", "download", "load", "read back", "clean up"]
    assert dict(stages)["download"] >= 0.05


async def test_old_versions_leave_the_disk(watcher: WeightWatcher, published: Published, tmp_path: Path) -> None:
    for version in range(1, 5):
        published.newest = version
        await watcher.at_least(version, WAIT_S)
    await until(lambda: sorted(p.name for p in tmp_path.iterdir()) == ["v=00000003", "v=00000004"])


def test_parts_of_old_downloads_go_too_and_strangers_and_what_is_served_stay(tmp_path: Path) -> None:
    for version in (0, 1, 2, 3):
        version_folder(tmp_path, version).mkdir()
    (tmp_path / ".v=00000001-x8k2").mkdir()
    (tmp_path / ".v=00000004-loading").mkdir()
    (tmp_path / "other").mkdir()
    assert remove_old(tmp_path, served=0) == [1, 2]
    left = [".v=00000004-loading", "other", "v=00000000", "v=00000003"]
    assert sorted(p.name for p in tmp_path.iterdir()) == left

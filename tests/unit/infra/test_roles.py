"""The engine processes of a run: how many, with which port, folder and GPU, and whose signs of life."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from roadstead.config import ConfigError
from roadstead.infra import roles
from roadstead.infra.ports import free_port
from roadstead.infra.processes import Broken, ProcessSpec
from roadstead.training.client import TrainerClient
from tests.support import tiny
from tests.unit.infra.test_health import Core, alive, core  # noqa: F401 - a fixture


def specs(folder: Path, **engine: Any) -> dict[str, ProcessSpec]:
    config = tiny.config(folder, "x", engine={"max_model_len": 128, **engine})
    return {spec.name: spec for spec in roles.engines_and_trainer(config, folder / "c.yaml", folder, folder / "logs")}


def argument(spec: ProcessSpec, name: str) -> str:
    return spec.argv[spec.argv.index(name) + 1]


def test_a_single_engine_is_called_as_ever(tmp_path: Path) -> None:
    found = specs(tmp_path, port=2001)
    assert list(found) == ["engine", "trainer"]
    assert found["engine"].log == tmp_path / "logs" / "engine.log"
    assert (argument(found["engine"], "--port"), argument(found["engine"], "--folder")) == (
        "2001",
        str(tmp_path / "engine"),
    )


def test_each_replica_is_a_process_with_a_port_a_folder_and_a_log_of_its_own(tmp_path: Path) -> None:
    found = specs(tmp_path, port=2001, replicas=3)
    assert list(found) == ["engine-0", "engine-1", "engine-2", "trainer"]
    engines = [found[f"engine-{i}"] for i in range(3)]
    assert [argument(spec, "--port") for spec in engines] == ["2001", "2002", "2003"]
    assert [argument(spec, "--folder") for spec in engines] == [str(tmp_path / f"engine-{i}") for i in range(3)]
    assert len({spec.log for spec in engines}) == 3
    assert all("CUDA_VISIBLE_DEVICES" not in spec.env for spec in engines)


async def test_a_replica_is_asked_itself_whether_it_lives(tmp_path: Path, core: Core) -> None:  # noqa: F811
    """The other one is not up; that is its own affair."""
    port = core.port
    found = specs(tmp_path, port=port - 1, replicas=2)
    first, second = found["engine-0"], found["engine-1"]
    assert await second.ready() and await alive(second)()
    assert not await first.ready()
    with pytest.raises(Broken, match=f"127.0.0.1:{port - 1}/weight_info is closed"):
        await alive(first)()


def test_none_is_started_when_the_engines_are_the_users_own(tmp_path: Path) -> None:
    assert list(specs(tmp_path, urls=["http://127.0.0.1:8000", "http://127.0.0.1:8001"])) == ["trainer"]


def gpus(found: dict[str, ProcessSpec]) -> list[str]:
    return [spec.env["CUDA_VISIBLE_DEVICES"] for name, spec in found.items() if name.startswith("engine")]


def test_on_cuda_each_replica_takes_the_next_gpu_that_is_visible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpus(specs(tmp_path, device="cuda", port=free_port())) == ["0"]
    assert gpus(specs(tmp_path, device="cuda", port=free_port(), replicas=3)) == ["0", "1", "2"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6,7")
    assert gpus(specs(tmp_path, device="cuda", port=free_port(), replicas=2)) == ["4", "6"]
    with pytest.raises(ConfigError, match=r"engine\.replicas: 4 want a GPU each, CUDA_VISIBLE_DEVICES=4,6,7 shows 3"):
        specs(tmp_path, device="cuda", port=free_port(), replicas=4)


async def test_a_rank_that_stands_still_is_a_broken_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    silence = {"0": 0.4, "1": 3.0}

    async def status(self: TrainerClient) -> dict[str, Any]:
        return {"version": 4, "since": 0.0, "silence": silence}

    monkeypatch.setattr(TrainerClient, "status", status)
    trainer = alive(specs(tmp_path, port=2001)["trainer"])
    assert await trainer()
    silence["1"] = roles.HANG_S + 3
    with pytest.raises(Broken, match="rank 1 hangs: no sign of life for 33 s"):
        await trainer()

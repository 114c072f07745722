"""Where the engines of a rollout worker are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from roadstead.config import ConfigError, RunConfig, parse
from roadstead.workers import local

FOLDER = Path("/data/runs/r")


def config(**engine: Any) -> RunConfig:
    values = {"name": "r", "model": {"path": "m"}, "data": {"prompts": "p"}, "training": {"steps": 1}, "engine": engine}
    return parse(values, "test")


def test_one_engine_has_the_names_and_the_folder_that_it_always_had() -> None:
    (only,) = local.engines(config(port=2001), FOLDER)
    assert only == local.EnginePlace("engine", "vllm-2001", "http://127.0.0.1:2001", FOLDER / "engine", 2001)


def test_replicas_have_ports_in_a_row_and_a_folder_each() -> None:
    places = local.engines(config(port=2001, replicas=3), FOLDER)
    assert [place.name for place in places] == ["engine-0", "engine-1", "engine-2"]
    assert [place.port for place in places] == [2001, 2002, 2003]
    assert [place.engine_id for place in places] == ["vllm-2001", "vllm-2002", "vllm-2003"]
    assert [place.url for place in places] == [f"http://127.0.0.1:{port}" for port in (2001, 2002, 2003)]
    assert [place.folder for place in places] == [FOLDER / f"engine-{i}" for i in range(3)]


def test_engines_of_the_users_own_are_named_by_host_and_port() -> None:
    urls = ["http://gpu-1.lab:8000", "http://127.0.0.1:8001", "https://[fd00::7]:8000/"]
    places = local.engines(config(urls=urls), FOLDER)
    assert [place.engine_id for place in places] == [
        "vllm-gpu-1.lab-8000",
        "vllm-127.0.0.1-8001",
        "vllm-fd00--7-8000",
    ]
    assert [place.folder for place in places] == [FOLDER / "engine" / place.engine_id for place in places]
    assert [place.url for place in places] == urls and {place.port for place in places} == {None}


@pytest.mark.parametrize("url", ["gpu-1:8000", "http://gpu-1", "http://gpu-1:eight", "http://:8000", "ftp://gpu-1:1"])
def test_what_is_no_address_is_named_with_the_remedy(url: str) -> None:
    with pytest.raises(ConfigError) as error:
        local.engines(config(urls=[url]), FOLDER)
    assert "engine.urls" in str(error.value) and url in str(error.value) and "http://HOST:PORT" in str(error.value)


def test_an_engine_is_given_once() -> None:
    with pytest.raises(ConfigError, match=r"engine\.urls: .*names vllm-gpu-1-8000 twice"):
        local.engines(config(urls=["http://gpu-1:8000", "http://gpu-1:8000/"]), FOLDER)

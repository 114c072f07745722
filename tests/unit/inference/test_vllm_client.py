"""The client against a scripted server: refusals, silence, and what is done after each."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from roadstead.inference.engine import (
    BadRequest,
    EngineDown,
    EngineStalled,
    GenerateRequest,
    NotAttached,
    UpdateFailed,
)
from roadstead.inference.vllm_client import VllmEngine
from roadstead.staleness import VersionSpan

STALL_S = 0.05
REQUEST = GenerateRequest("g0-m1", (5, 6, 7), 3, 0.7, 11, ignore_eos=False)


class Server:
    """As much of vLLM as the client talks to. `broken` maps a path to an answer, or to None for silence."""

    def __init__(self) -> None:
        self.label = "3"
        self.root = ""
        self.paused = False
        self.calls: list[tuple[str, Any]] = []
        self.broken: dict[str, httpx.Response | None] = {}
        self.deaf_to_labels = False
        self.choice: dict[str, Any] = {
            "token_ids": [8, 9, 10],
            "finish_reason": "length",
            "logprobs": {"content": [{"token_id": t, "logprob": -0.5 * t} for t in (8, 9, 10)]},
            "weight_versions": [
                {"version": "3", "start": 0, "end": 2},
                {"version": "4", "start": 2, "end": 3},
            ],
        }

    def paths(self) -> list[str]:
        return [path for path, _ in self.calls]

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        path, body = request.url.path, json.loads(request.content or b"null")
        self.calls.append((path, body))
        if path in self.broken:
            answer = self.broken[path]
            if answer is None:
                await asyncio.sleep(30)
            assert answer is not None
            return answer
        if path == "/pause":
            assert dict(request.url.params) == {"mode": "keep", "clear_cache": "true"}
            self.paused = True
        elif path == "/resume":
            self.paused = False
        elif path == "/update_weight_version" and not self.deaf_to_labels:
            self.label = body["new_version"]
        elif path == "/finish_weight_update" and body and not self.deaf_to_labels:
            self.label = body["weight_version"]
        answers: dict[str, Any] = {
            "/inference/v1/generate": {"choices": [self.choice]},
            "/weight_info": {"weight_version": self.label},
            "/is_paused": {"is_paused": self.paused},
            "/version": {"version": "0.32.0+cpu"},
            "/v1/models": {"data": [{"id": "policy", "root": self.root, "max_model_len": 512}]},
        }
        return httpx.Response(200, json=answers.get(path, {}))


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
async def engine(server: Server) -> AsyncIterator[VllmEngine]:
    transport = httpx.MockTransport(server)
    engine = VllmEngine("http://engine", "e0", STALL_S, generate_timeout_s=0.3, transport=transport)
    yield engine
    await engine.aclose()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "v=00000004"
    folder.mkdir()
    files = [
        {"name": "config.json", "key": "k", "bytes": 1, "sha256": "c"},
        {"name": "model.safetensors", "key": "k", "bytes": 1, "sha256": "abc"},
    ]
    (folder / "manifest.json").write_text(json.dumps({"version": 4, "files": files}))
    return folder


# -- generation ---------------------------------------------------------------------------------------------


async def test_a_finished_generation(engine: VllmEngine, server: Server) -> None:
    answer = await engine.generate(REQUEST)
    assert (answer.token_ids, answer.logprobs) == ((8, 9, 10), (-4.0, -4.5, -5.0))
    assert answer.version_spans == (VersionSpan(3, 0, 2), VersionSpan(4, 2, 3))
    sent = server.calls[0][1]
    assert sent["token_ids"] == [5, 6, 7] and sent["request_id"] == "g0-m1"
    assert sent["sampling_params"].items() >= {"temperature": 0.7, "seed": 11, "logprobs": 0}.items()


@pytest.mark.parametrize(
    "change",
    [
        {"finish_reason": None},
        {"finish_reason": "abort"},
        {"token_ids": [8, 9]},
        {"token_ids": [], "logprobs": {"content": []}, "weight_versions": []},
        {"logprobs": None},
        {"weight_versions": None},
        {"weight_versions": [{"version": "3", "start": 0, "end": 2}]},
        {"weight_versions": [{"version": "3", "start": 1, "end": 3}]},
        {"weight_versions": [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 1, "end": 3}]},
        {"weight_versions": [{"version": "3", "start": 0, "end": 3}, {"version": "4", "start": 3, "end": 3}]},
        {"weight_versions": [{"version": "default", "start": 0, "end": 3}]},
        {"weight_versions": [{"version": "loading-4", "start": 0, "end": 3}]},
    ],
    ids=str,
)
async def test_an_answer_that_proves_too_little_is_refused(
    engine: VllmEngine, server: Server, change: dict[str, Any]
) -> None:
    server.choice |= change
    with pytest.raises(EngineDown, match="g0-m1"):
        await engine.generate(REQUEST)


@pytest.mark.parametrize("body", ['data: {"error": "EngineDeadError"}\n\ndata: [DONE]\n\n', "", '{"error": "dead"}'])
async def test_a_200_without_a_finish_reason_is_a_dead_engine(engine: VllmEngine, server: Server, body: str) -> None:
    server.broken["/inference/v1/generate"] = httpx.Response(200, text=body)
    with pytest.raises(EngineDown):
        await engine.generate(REQUEST)


async def test_a_500_is_retryable_and_a_400_is_not(engine: VllmEngine, server: Server) -> None:
    server.broken["/inference/v1/generate"] = httpx.Response(500, text="EngineDeadError")
    with pytest.raises(EngineDown, match="EngineDeadError"):
        await engine.generate(REQUEST)
    server.broken["/inference/v1/generate"] = httpx.Response(400, text="prompt too long")
    with pytest.raises(BadRequest, match="prompt too long"):
        await engine.generate(REQUEST)


async def test_an_unreachable_engine() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    engine = VllmEngine("http://engine", "e0", 5, transport=httpx.MockTransport(refuse))
    with pytest.raises(EngineDown, match="refused"):
        await engine.generate(REQUEST)
    with pytest.raises(EngineDown, match="refused"):
        await engine.version()
    await engine.aclose()


async def test_a_slow_generation_of_a_living_engine_may_take_its_own_deadline(
    engine: VllmEngine, server: Server
) -> None:
    server.broken["/inference/v1/generate"] = None
    with pytest.raises(EngineStalled) as error:
        await engine.generate(REQUEST)
    assert error.value.stage == "generate"
    assert server.paths().count("/weight_info") >= 2


async def test_a_hung_core_is_found_before_the_generations_deadline(engine: VllmEngine, server: Server) -> None:
    server.broken |= {"/inference/v1/generate": None, "/weight_info": None}
    with pytest.raises(EngineStalled, match="/weight_info"):
        await engine.generate(REQUEST)


async def test_abort_uses_the_engines_own_name_of_a_request(engine: VllmEngine, server: Server) -> None:
    await engine.abort("g0-m1")
    assert server.calls == [("/abort_requests", {"request_ids": ["generate-tokens-g0-m1"]})]


# -- attachment ---------------------------------------------------------------------------------------------


async def test_attach_labels_a_fresh_engine_with_what_it_was_started_from_once(
    engine: VllmEngine, server: Server, folder: Path
) -> None:
    server.label, server.root = "default", str(folder)
    with pytest.raises(NotAttached, match="default"):
        await engine.version()
    assert await engine.attach() == 4
    assert await engine.attach() == 4
    assert ("/init_weight_transfer_engine", {"init_info": {"root": str(folder.parent)}}) in server.calls
    assert server.paths().count("/update_weight_version") == 1


async def test_attach_resumes_an_engine_that_a_dead_client_left_paused(engine: VllmEngine, server: Server) -> None:
    server.paused = True
    assert await engine.attach() == 3
    assert not server.paused


async def test_attach_never_vouches_for_weights_of_a_broken_off_update(engine: VllmEngine, server: Server) -> None:
    server.label, server.paused = "loading-4", True
    assert await engine.attach() is None
    assert server.paused


async def test_info(engine: VllmEngine) -> None:
    info = await engine.info()
    assert (info.engine_id, info.build, info.max_model_len) == ("e0", "vllm 0.32.0+cpu", 512)


# -- updates ------------------------------------------------------------------------------------------------


async def test_an_update_in_order(engine: VllmEngine, server: Server, folder: Path) -> None:
    await engine.load_weights(folder, 4)
    posts = [(path, body) for path, body in server.calls if path != "/weight_info"]
    assert posts == [
        ("/pause", None),
        ("/start_weight_update", None),
        ("/update_weight_version", {"new_version": "loading-4"}),
        (
            "/update_weights",
            {"update_info": {"path": str(folder), "sha256": {"model.safetensors": "abc"}}},
        ),
        ("/finish_weight_update", {"weight_version": "4"}),
        ("/resume", None),
    ]
    assert await engine.version() == 4


@pytest.mark.parametrize(
    ("path", "stage", "label"),
    [
        ("/pause", "pause", "3"),
        ("/start_weight_update", "start", "3"),
        ("/update_weights", "update", "loading-4"),
        ("/finish_weight_update", "finish", "loading-4"),
    ],
)
async def test_a_stall_names_its_stage_and_the_engine_is_resumed(
    engine: VllmEngine, server: Server, folder: Path, path: str, stage: str, label: str
) -> None:
    server.broken[path] = None
    with pytest.raises(EngineStalled, match="since") as error:
        await engine.load_weights(folder, 4)
    assert error.value.stage == stage
    assert server.paths()[-1] == "/resume" and not server.paused
    assert server.label == label, "a version may be claimed only while it is certain"


async def test_a_core_that_hangs_for_good_is_blamed_on_the_stage_it_hung_in(
    engine: VllmEngine, server: Server, folder: Path
) -> None:
    server.broken |= {"/update_weights": None, "/resume": None}
    with pytest.raises(EngineStalled) as error:
        await engine.load_weights(folder, 4)
    assert error.value.stage == "update"
    assert "could not be resumed" in error.value.__notes__[0]


async def test_refused_weights_leave_the_old_label_and_a_running_engine(
    engine: VllmEngine, server: Server, folder: Path
) -> None:
    server.broken["/update_weights"] = httpx.Response(500, text="sha256 mismatch")
    with pytest.raises(UpdateFailed, match="sha256 mismatch"):
        await engine.load_weights(folder, 4)
    assert server.label == "3" and not server.paused
    assert "/finish_weight_update" not in server.paths()


async def test_an_update_left_open_is_closed_first(engine: VllmEngine, server: Server, folder: Path) -> None:
    answers = [httpx.Response(500, text="already active"), httpx.Response(200)]
    plain = server.__call__

    async def once_active(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/start_weight_update":
            return answers.pop(0)
        return await plain(request)

    engine = VllmEngine("http://engine", "e0", STALL_S, transport=httpx.MockTransport(once_active))
    await engine.load_weights(folder, 4)
    assert server.paths().count("/finish_weight_update") == 2
    assert await engine.version() == 4
    await engine.aclose()


async def test_an_acknowledged_update_that_reads_back_old_is_detected(
    engine: VllmEngine, server: Server, folder: Path
) -> None:
    server.deaf_to_labels = True
    with pytest.raises(UpdateFailed, match="reads back '3'"):
        await engine.load_weights(folder, 4)


async def test_a_folder_of_another_version_is_refused_before_the_engine_hears_of_it(
    engine: VllmEngine, server: Server, folder: Path
) -> None:
    with pytest.raises(UpdateFailed, match="expected 5"):
        await engine.load_weights(folder, 5)
    with pytest.raises(UpdateFailed, match=r"manifest\.json"):
        await engine.load_weights(folder.parent, 4)
    assert server.calls == []

"""The client against a scripted server: refusals, silence, and what is done after each."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roadstead.inference.engine import (
    BadRequest,
    EngineDown,
    EngineStalled,
    GenerateRequest,
    GenerationAborted,
    NotAttached,
    Partial,
    UpdateFailed,
)
from roadstead.inference.labels import loading_label, new_label, version_of
from roadstead.inference.vllm_answer import kv_spans
from roadstead.inference.vllm_client import VllmEngine
from roadstead.staleness import (
    VersionSpan,
    check_cover,
    head_version,
    merge_spans,
    spans_of_tokens,
    versions_of_spans,
)

PATIENCE_S = 20.0
STALL_S = 0.3
"""For the tests of a deadline: longer than a busy machine takes for an answer of the scripted server."""
REQUEST = GenerateRequest("g0-m1", (5, 6, 7), 3, 0.7, 11, ignore_eos=False)
V3, V4 = "3.0a", "4.0b"


def chunk(*tokens: int, labels: Any, reason: str | None = None) -> str:
    content = [{"token_id": t, "logprob": -0.5 * t} for t in tokens]
    choice = {"token_ids": tokens, "finish_reason": reason, "logprobs": {"content": content}, "weight_versions": labels}
    return f"data: {json.dumps({'choices': [choice]})}\n\n"


def labelled(*spans: tuple[str, int, int]) -> list[dict[str, Any]]:
    return [{"version": label, "start": start, "end": end} for label, start, end in spans]


class Server:
    """As much of vLLM as the client talks to. `broken` maps a path to an answer, or to None for silence."""

    def __init__(self) -> None:
        self.label = V3
        self.weights = "weights 3"
        self.root = ""
        self.paused = False
        self.pauses: list[dict[str, str]] = []
        self.calls: list[tuple[str, Any]] = []
        self.broken: dict[str, httpx.Response | None] = {}
        self.deaf_to_labels = False
        self.keeps_its_weights = False
        self.chunks: list[str] = [
            chunk(8, labels=labelled((V3, 0, 1))),
            chunk(9, labels=labelled((V3, 0, 2))),
            chunk(10, labels=labelled((V3, 0, 2), (V4, 2, 3)), reason="length"),
        ]
        self.choice: dict[str, Any] = {
            "token_ids": [8, 9, 10],
            "finish_reason": "length",
            "logprobs": {"content": [{"token_id": t, "logprob": -0.5 * t} for t in (8, 9, 10)]},
            "weight_versions": labelled((V3, 0, 2), (V4, 2, 3)),
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
        if path == "/inference/v1/generate" and body["stream"]:
            return httpx.Response(200, text="".join(self.chunks) + "data: [DONE]\n\n")
        if path == "/pause":
            self.pauses.append(dict(request.url.params))
            self.paused = True
        elif path == "/resume":
            self.paused = False
        elif path == "/update_weight_version" and not self.deaf_to_labels:
            self.label = body["new_version"]
        elif path == "/update_weights" and not self.keeps_its_weights:
            self.weights = Path(body["update_info"]["path"]).name
        elif path == "/finish_weight_update" and body and not self.deaf_to_labels:
            self.label = body["weight_version"]
        answers: dict[str, Any] = {
            "/inference/v1/generate": {"choices": [self.choice]},
            "/weight_info": {"weight_version": self.label},
            "/is_paused": {"is_paused": self.paused},
            "/version": {"version": "0.32.0+cpu"},
            "/v1/models": {"data": [{"id": "policy", "root": self.root, "max_model_len": 512}]},
            "/collective_rpc": {"results": [f"logits of {self.weights}"]},
        }
        return httpx.Response(200, json=answers.get(path, {}))


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
async def engine(server: Server) -> AsyncIterator[VllmEngine]:
    engine = client(server)
    yield engine
    await engine.aclose()


@pytest.fixture
async def impatient(server: Server) -> AsyncIterator[VllmEngine]:
    engine = client(server, STALL_S, generate_timeout_s=3 * STALL_S)
    yield engine
    await engine.aclose()


def client(server: Server, stage_timeout_s: float = PATIENCE_S, **options: Any) -> VllmEngine:
    return VllmEngine("http://engine", "e0", stage_timeout_s, transport=httpx.MockTransport(server), **options)


def version(root: Path, number: int, digest: str) -> Path:
    folder = root / f"v={number:08d}"
    folder.mkdir()
    files = [
        {"name": "config.json", "key": "k", "bytes": 1, "sha256": "c"},
        {"name": "model.safetensors", "key": "k", "bytes": 1, "sha256": "abc"},
    ]
    (folder / "manifest.json").write_text(json.dumps({"version": number, "digest": digest, "files": files}))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    version(tmp_path, 3, "digest 3")
    return version(tmp_path, 4, "digest 4")


# -- generation ---------------------------------------------------------------------------------------------


async def test_a_finished_generation(engine: VllmEngine, server: Server) -> None:
    answer = await engine.generate(REQUEST)
    assert (answer.token_ids, answer.logprobs) == ((8, 9, 10), (-4.0, -4.5, -5.0))
    assert answer.version_spans == (VersionSpan(3, 0, 2), VersionSpan(4, 2, 3)) and answer.kv_version_spans is None
    sent = server.calls[0][1]
    assert sent["token_ids"] == [5, 6, 7] and sent["request_id"] == "g0-m1" and "cache_salt" not in sent
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
        {"weight_versions": labelled((V3, 0, 2))},
        {"weight_versions": labelled((V3, 1, 3))},
        {"weight_versions": labelled((V3, 0, 2), (V4, 1, 3))},
        {"weight_versions": labelled((V3, 0, 3), (V4, 3, 3))},
        {"weight_versions": labelled(("default", 0, 3))},
        {"weight_versions": labelled(("loading-4", 0, 3))},
        {"weight_versions": labelled((V3, 0, 2), ("loading-4", 2, 3))},
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
@pytest.mark.parametrize("stream", [False, True])
async def test_a_200_without_a_finish_reason_is_a_dead_engine(
    engine: VllmEngine, server: Server, body: str, stream: bool
) -> None:
    server.broken["/inference/v1/generate"] = httpx.Response(200, text=body)
    with pytest.raises(EngineDown):
        await engine.generate(REQUEST, (lambda _: None) if stream else None)


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
    impatient: VllmEngine, server: Server
) -> None:
    server.broken["/inference/v1/generate"] = None
    with pytest.raises(EngineStalled) as error:
        await impatient.generate(REQUEST)
    assert error.value.stage == "generate"
    assert server.paths().count("/weight_info") >= 2


async def test_a_hung_core_is_found_before_the_generations_deadline(impatient: VllmEngine, server: Server) -> None:
    server.broken |= {"/inference/v1/generate": None, "/weight_info": None}
    with pytest.raises(EngineStalled, match="/weight_info"):
        await impatient.generate(REQUEST)


async def test_abort_uses_the_engines_own_name_of_a_request(engine: VllmEngine, server: Server) -> None:
    await engine.abort("g0-m1")
    assert server.calls == [("/abort_requests", {"request_ids": ["generate-tokens-g0-m1"]})]


# -- streams ------------------------------------------------------------------------------------------------


async def test_a_stream_reports_what_arrived_and_the_version_of_each_token(engine: VllmEngine) -> None:
    partials: list[Partial] = []
    answer = await engine.generate(REQUEST, partials.append)
    assert [p.token_ids for p in partials] == [(8,), (8, 9), (8, 9, 10)]
    assert [p.logprobs for p in partials] == [(-4.0,), (-4.0, -4.5), (-4.0, -4.5, -5.0)]
    assert [p.version_spans for p in partials] == [
        (VersionSpan(3, 0, 1),),
        (VersionSpan(3, 0, 2),),
        (VersionSpan(3, 0, 2), VersionSpan(4, 2, 3)),
    ]
    assert (answer.token_ids, answer.version_spans) == (partials[-1].token_ids, partials[-1].version_spans)


async def test_the_age_of_a_response_is_that_of_its_oldest_token(engine: VllmEngine, server: Server) -> None:
    server.choice["weight_versions"] = labelled((V3, 0, 1), (V4, 1, 2), ("5.0c", 2, 3))
    answer = await engine.generate(REQUEST)
    assert 5 - (head_version(answer.version_spans, [True] * 3) or 0) == 2
    assert 5 - (head_version(answer.version_spans, [False, True, True]) or 0) == 1


async def test_what_was_streamed_before_the_engine_died_is_kept_with_its_versions(
    engine: VllmEngine, server: Server
) -> None:
    server.chunks = [*server.chunks[:2], 'data: {"error": {"message": "EngineDeadError"}}\n\n']
    partials: list[Partial] = []
    with pytest.raises(EngineDown, match="EngineDeadError"):
        await engine.generate(REQUEST, partials.append)
    assert partials[-1] == Partial((8, 9), (-4.0, -4.5), (VersionSpan(3, 0, 2),))


async def test_a_chunk_without_a_stamp_is_refused_with_the_remedy(engine: VllmEngine, server: Server) -> None:
    server.chunks[1] = chunk(9, labels=None)
    partials: list[Partial] = []
    with pytest.raises(EngineDown, match=r"roadstead\.inference\.launcher"):
        await engine.generate(REQUEST, partials.append)
    assert len(partials) == 1


async def test_a_stream_that_just_ends_is_not_success(engine: VllmEngine, server: Server) -> None:
    server.chunks = server.chunks[:2]
    with pytest.raises(EngineDown):
        await engine.generate(REQUEST, lambda _: None)


async def test_an_abort_that_nobody_here_asked_for_is_a_failing_engine(engine: VllmEngine, server: Server) -> None:
    server.chunks[2] = chunk(labels=labelled((V3, 0, 2)), reason="abort")
    for options in ({}, {"partial_rollout": False, "on_update": "abort"}):
        with pytest.raises(EngineDown, match="not by a weight update"):
            await client(server, **options).generate(REQUEST, lambda _: None)


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


def test_labels_say_their_version_and_are_never_the_same() -> None:
    assert len({new_label(7) for _ in range(100)}) == 100
    assert version_of(new_label(7)) == 7
    assert [version_of(label) for label in ("default", loading_label(7), "7", "")] == [None] * 4


# -- updates ------------------------------------------------------------------------------------------------


async def test_an_update_in_order(engine: VllmEngine, server: Server, folder: Path) -> None:
    await engine.load_weights(folder, 4)
    posts = [(path, body) for path, body in server.calls if path != "/weight_info"]
    probe = ("/collective_rpc", {"method": "logits_digest"})
    assert posts == [
        ("/pause", None),
        ("/start_weight_update", None),
        probe,
        ("/update_weight_version", {"new_version": "loading-4"}),
        (
            "/update_weights",
            {"update_info": {"path": str(folder), "sha256": {"model.safetensors": "abc"}}},
        ),
        probe,
        ("/finish_weight_update", {"weight_version": server.label}),
        ("/resume", None),
    ]
    assert server.pauses == [{"mode": "keep", "clear_cache": "true"}]
    assert version_of(server.label) == 4 == await engine.version()


async def test_an_update_of_the_same_version_has_another_label(
    engine: VllmEngine, server: Server, folder: Path
) -> None:
    await engine.load_weights(folder, 4)
    first = server.label
    await engine.load_weights(folder, 4)
    assert first != server.label and version_of(server.label) == 4


@pytest.mark.parametrize(
    ("options", "pause"),
    [
        ({"kv_cache": "recompute"}, {"mode": "keep", "clear_cache": "true"}),
        ({"kv_cache": "keep"}, {"mode": "keep", "clear_cache": "false"}),
        ({"partial_rollout": False, "on_update": "wait"}, {"mode": "wait", "clear_cache": "true"}),
        ({"partial_rollout": False, "on_update": "abort"}, {"mode": "abort", "clear_cache": "true"}),
        ({"partial_rollout": False, "kv_cache": "keep"}, {"mode": "wait", "clear_cache": "true"}),
    ],
)
async def test_the_policy_decides_how_it_is_paused(
    server: Server, folder: Path, options: dict[str, Any], pause: dict[str, str]
) -> None:
    await client(server, **options).load_weights(folder, 4)
    assert server.pauses == [pause]


@pytest.mark.parametrize(
    ("path", "stage", "label"),
    [
        ("/pause", "pause", V3),
        ("/start_weight_update", "start", V3),
        ("/collective_rpc", "probe", V3),
        ("/update_weights", "update", "loading-4"),
        ("/finish_weight_update", "finish", "loading-4"),
    ],
)
async def test_a_stall_names_its_stage_and_the_engine_is_resumed(
    impatient: VllmEngine, server: Server, folder: Path, path: str, stage: str, label: str
) -> None:
    server.broken[path] = None
    with pytest.raises(EngineStalled, match="since") as error:
        await impatient.load_weights(folder, 4)
    assert error.value.stage == stage
    assert server.paths()[-1] == "/resume" and not server.paused
    assert server.label == label, "a version may be claimed only while it is certain"


async def test_a_drain_has_its_own_deadline_and_says_what_it_waits_for(server: Server, folder: Path) -> None:
    server.broken["/pause"] = None
    engine = client(server, STALL_S, partial_rollout=False, drain_timeout_s=4 * STALL_S)
    with pytest.raises(EngineStalled, match="until the requests in flight have ended") as error:
        await engine.load_weights(folder, 4)
    assert error.value.stage == "drain" and server.paths()[-1] == "/resume"
    assert server.paths().count("/weight_info") >= 3, "the core is asked for a sign of life meanwhile"


async def test_a_core_that_hangs_for_good_is_blamed_on_the_stage_it_hung_in(
    impatient: VllmEngine, server: Server, folder: Path
) -> None:
    server.broken |= {"/update_weights": None, "/resume": None}
    with pytest.raises(EngineStalled) as error:
        await impatient.load_weights(folder, 4)
    assert error.value.stage == "update"
    assert "could not be resumed" in error.value.__notes__[0]


async def test_refused_weights_leave_the_old_label_and_a_running_engine(
    engine: VllmEngine, server: Server, folder: Path
) -> None:
    server.broken["/update_weights"] = httpx.Response(500, text="sha256 mismatch")
    with pytest.raises(UpdateFailed, match="sha256 mismatch"):
        await engine.load_weights(folder, 4)
    assert server.label == V3 and not server.paused
    assert "/finish_weight_update" not in server.paths()


async def test_an_update_left_open_is_closed_first(server: Server, folder: Path) -> None:
    answers = [httpx.Response(500, text="already active"), httpx.Response(200)]
    plain = server.__call__

    async def once_active(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/start_weight_update":
            return answers.pop(0)
        return await plain(request)

    engine = VllmEngine("http://engine", "e0", PATIENCE_S, transport=httpx.MockTransport(once_active))
    await engine.load_weights(folder, 4)
    assert server.paths().count("/finish_weight_update") == 2
    assert await engine.version() == 4
    await engine.aclose()


async def test_an_acknowledged_update_that_reads_back_old_is_detected(
    engine: VllmEngine, server: Server, folder: Path
) -> None:
    server.deaf_to_labels = True
    with pytest.raises(UpdateFailed, match=f"reads back '{V3}'"):
        await engine.load_weights(folder, 4)


async def test_a_folder_of_another_version_is_refused_before_the_engine_hears_of_it(
    engine: VllmEngine, server: Server, folder: Path
) -> None:
    with pytest.raises(UpdateFailed, match="expected 5"):
        await engine.load_weights(folder, 5)
    with pytest.raises(UpdateFailed, match=r"manifest\.json"):
        await engine.load_weights(folder.parent, 4)
    assert server.calls == []


# -- the probe ----------------------------------------------------------------------------------------------


async def test_an_engine_that_acknowledges_but_computes_the_same_gets_no_version_and_is_found_out_again(
    engine: VllmEngine, server: Server, folder: Path
) -> None:
    server.keeps_its_weights = True
    for _ in range(2):
        with pytest.raises(UpdateFailed, match="still serves the old ones"):
            await engine.load_weights(folder, 4)
        assert server.label == "loading-4" and not server.paused
    server.keeps_its_weights = False
    await engine.load_weights(folder, 4)
    assert await engine.version() == 4


async def test_equal_weights_may_compute_the_same(engine: VllmEngine, server: Server, tmp_path: Path) -> None:
    """A step that was not applied publishes a version of the same tensors."""
    server.keeps_its_weights = True
    version(tmp_path, 3, "digest 3")
    await engine.load_weights(version(tmp_path, 4, "digest 3"), 4)
    assert await engine.version() == 4


async def test_where_nothing_is_known_of_the_old_weights_there_is_no_verdict(
    engine: VllmEngine, server: Server, tmp_path: Path
) -> None:
    server.keeps_its_weights = True
    await engine.load_weights(version(tmp_path, 4, "digest 4"), 4)  # its predecessor's folder is gone
    with pytest.raises(UpdateFailed, match="still serves the old ones"):
        await engine.load_weights(version(tmp_path, 5, "digest 5"), 5)


# -- kept KV ------------------------------------------------------------------------------------------------


async def test_kept_kv_is_recorded_and_the_prefix_cache_salted_with_the_label(server: Server) -> None:
    answer = await client(server, kv_cache="keep").generate(REQUEST)
    assert answer.version_spans == (VersionSpan(3, 0, 2), VersionSpan(4, 2, 3))
    assert answer.kv_version_spans == (VersionSpan(3, 0, 1), VersionSpan(4, 1, 3))
    assert dict(server.calls)["/inference/v1/generate"]["cache_salt"] == V3


async def test_a_request_that_began_under_other_weights_than_it_was_admitted_under_is_asked_again(
    server: Server, folder: Path
) -> None:
    engine = client(server, kv_cache="keep")
    assert await engine.version() == 3
    server.label = V4  # behind the client's back
    server.chunks = [chunk(8, 9, labels=labelled((V4, 0, 2)), reason="stop")]
    partials: list[Partial] = []
    answer = await engine.generate(REQUEST, partials.append)
    assert answer.version_spans == (VersionSpan(4, 0, 2),) and answer.kv_version_spans is None
    salts = [body["cache_salt"] for path, body in server.calls if path == "/inference/v1/generate"]
    assert salts == [V3, V4]
    assert len(partials) == 1, "nothing of the first try may be reported"


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12))
def test_kv_of_a_token_is_of_the_version_that_sampled_the_next(sampled: list[int]) -> None:
    spans = kv_spans(spans_of_tokens(sampled))
    check_cover(spans, len(sampled))
    assert versions_of_spans(merge_spans(spans)) == [*sampled[1:], sampled[-1]]


# -- without partial rollout --------------------------------------------------------------------------------


async def test_an_update_that_aborts_is_told_apart_from_other_ends(server: Server, folder: Path) -> None:
    """Also for a request that began while the engine was being paused."""
    begun = [asyncio.Event() for _ in range(3)]
    ended = asyncio.Event()
    requests: list[asyncio.Future[Any]] = []
    plain = server.__call__

    def ask() -> None:
        requests.append(asyncio.ensure_future(engine.generate(REQUEST, lambda _: None)))

    async def scripted(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/inference/v1/generate":
            begun[len(requests) - 1].set()
            await ended.wait()
            return httpx.Response(200, text=chunk(labels=None, reason="abort"))
        if request.url.path == "/pause":
            ask()
            await begun[1].wait()
            ended.set()
        return await plain(request)

    transport = httpx.MockTransport(scripted)
    engine = VllmEngine("http://engine", "e0", 5, partial_rollout=False, on_update="abort", transport=transport)
    ask()
    await begun[0].wait()
    await engine.load_weights(folder, 4)
    ask()
    for request in requests[:2]:
        with pytest.raises(GenerationAborted, match="ask again"):
            await request
    with pytest.raises(EngineDown, match="not by a weight update"):
        await requests[2]
    await engine.aclose()


async def test_a_response_of_two_versions_is_not_returned_without_partial_rollout(server: Server) -> None:
    with pytest.raises(GenerationAborted, match="met a weight update"):
        await client(server, partial_rollout=False).generate(REQUEST)


async def test_a_version_does_not_fall_under_a_request(engine: VllmEngine, server: Server, tmp_path: Path) -> None:
    older = version(tmp_path, 2, "digest 2")
    server.broken["/inference/v1/generate"] = None
    waiting = asyncio.ensure_future(engine.generate(REQUEST))
    await asyncio.sleep(0)
    with pytest.raises(UpdateFailed, match="version 2 is older than 3, which serves 1 requests"):
        await engine.load_weights(older, 2)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await engine.load_weights(older, 2)
    assert await engine.version() == 2

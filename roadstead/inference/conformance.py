"""What any implementation of `Engine` must do, as checks that can be run against it.

Owns: the checks. Never touches: a particular engine; whoever implements one gives a `Stand`.
Invariant: a check looks at tokens, logprobs and versions that came out, against a reference that knows the weights;
never at what an engine says about itself. Each leaves the stand with a healthy engine that serves some version.
A crash leaves: whatever the stand's engine was in.

Plain asserts and no test framework, so that an engine outside this repository can be held to them too:

    for check in CHECKS:
        await check(stand)
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Literal, Protocol, TypeVar

from roadstead.inference.engine import (
    BadRequest,
    Engine,
    EngineDown,
    EngineError,
    EngineStalled,
    GenerateRequest,
    Generation,
    GenerationAborted,
    NotAttached,
    Partial,
    UpdateFailed,
)
from roadstead.staleness import VersionSpan, check_cover, versions_of_spans

TOLERANCE = 1e-4
"""Nats, in float32. The versions of a stand must differ by more than APART somewhere in a response."""
APART = 0.1
_WAIT_S = 60.0
_LONG = 400
"""Response tokens of a request that must still be in flight when its test gets to it."""
_SHARED = 280
"""Prompt tokens that requests share: more than two blocks of any cache."""


class Stand(Protocol):
    """An engine's server, and what the suite does to it behind its client's back.

    The server: float32, a vocabulary of ids 1..15 and more, max_model_len 512, prefix cache on.
    """

    @property
    def engine(self) -> Engine:
        """Attached; partial rollout, KV computed anew."""
        ...

    def client(
        self,
        *,
        partial_rollout: bool = True,
        on_update: Literal["wait", "abort"] = "wait",
        kv_cache: Literal["recompute", "keep"] = "recompute",
        stage_timeout_s: float | None = None,
        drain_timeout_s: float | None = None,
    ) -> Engine:
        """Another client of the same server."""
        ...

    def new_version(self) -> tuple[int, Path]:
        """One above all before, of random weights, as `storage.weights.download` leaves it."""
        ...

    def damage(self, folder: Path) -> None:
        """Flip a bit of its weights; again: flip it back."""
        ...

    def reference(
        self,
        prompt: Sequence[int],
        response: Sequence[int],
        temperature: float,
        spans: Sequence[VersionSpan],
        kv_spans: Sequence[VersionSpan] | None,
    ) -> list[float]:
        """Logprobs of the response tokens when `spans` sampled them, on KV of `kv_spans` (None: of the sampler's)."""
        ...

    async def running(self) -> int:
        """Requests in the engine, those that wait in it included."""
        ...

    async def pause(self) -> None:
        """As a client does that dies after it."""
        ...

    async def break_off(self) -> None:
        """As a client that dies when the weights may be half-way in."""
        ...

    def ignore_loads(self, ignore: bool) -> None:
        """Whether the server acknowledges weights without taking them."""
        ...

    def hang(self, hang: bool) -> None:
        """Stop the server's core in its tracks, or let it go on."""
        ...


E = TypeVar("E", bound=EngineError)
Check = Callable[[Stand], Awaitable[None]]
CHECKS: list[Check] = []


def _check(function: Check) -> Check:
    CHECKS.append(function)
    return function


# -- generation -----------------------------------------------------------------------------------------------


@_check
async def logprobs_are_those_of_the_sampled_distribution_and_spans_cover_the_response(stand: Stand) -> None:
    now = await stand.engine.version()
    for temperature in (1.0, 0.7):
        answers = await asyncio.gather(
            *(stand.engine.generate(_request(f"plain-{i}", _prompt(5 + i), 40, i, temperature)) for i in range(3))
        )
        for i, answer in enumerate(answers):
            assert len(answer.token_ids) == 40 and answer.finish_reason == "length"
            _require_all(answer, now)
            _require_equal(stand, _prompt(5 + i), answer, temperature)


@_check
async def a_seed_repeats_and_another_does_not(stand: Stand) -> None:
    first, again, other = [
        await stand.engine.generate(_request(f"seed-{i}", _prompt(9), 30, seed)) for i, seed in enumerate((7, 7, 8))
    ]
    assert first.token_ids == again.token_ids != other.token_ids
    assert max(abs(a - b) for a, b in zip(first.logprobs, again.logprobs, strict=True)) < TOLERANCE


@_check
async def partials_are_beginnings_of_the_answer_with_the_same_stamps(stand: Stand) -> None:
    watch = _Watch()
    answer = await stand.engine.generate(_request("partial", _prompt(9), 50), watch)
    plain = await stand.engine.generate(_request("not-partial", _prompt(9), 50))
    assert answer.token_ids == plain.token_ids
    assert len(watch.seen) > 2, "the response came in one piece"
    assert [len(p.token_ids) for p in watch.seen] == sorted(len(p.token_ids) for p in watch.seen)
    for partial in watch.seen:
        _require_beginning(partial, answer)
    assert watch.seen[-1].token_ids == answer.token_ids


@_check
async def cancelling_ends_the_request_in_the_engine(stand: Stand) -> None:
    watch = _Watch()
    for on_partial in (watch, None):
        waiting = asyncio.ensure_future(stand.engine.generate(_request("cancelled", _prompt(5), _LONG), on_partial))
        await _until(stand.running, lambda n: n > 0, "the request to begin")
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await _until(stand.running, lambda n: n == 0, "the cancelled request to end")


@_check
async def an_aborted_request_ends_as_engine_down(stand: Stand) -> None:
    for engine in (stand.engine, stand.client(partial_rollout=False, on_update="abort")):
        watch = _Watch()
        waiting = asyncio.ensure_future(engine.generate(_request("unwanted", _prompt(5), _LONG), watch))
        await watch.reached(3)
        await engine.abort("unwanted")
        await _raises(EngineDown, waiting, "abort")


@_check
async def a_bad_request_is_told_apart_and_harms_nothing(stand: Stand) -> None:
    await _raises(BadRequest, stand.engine.generate(_request("too-long", _prompt(600), 4)))
    await _raises(BadRequest, stand.engine.generate(_request("unknown-token", (10_000_000,), 4)))
    await _serves(stand, await stand.engine.version())


# -- attachment -----------------------------------------------------------------------------------------------


@_check
async def attaching_again_changes_nothing(stand: Stand) -> None:
    now = await stand.engine.version()
    assert await stand.engine.attach() == now == await stand.engine.attach() == await stand.engine.version()
    info = await stand.engine.info()
    assert info.engine_id and info.build and info.max_model_len == 512


@_check
async def a_paused_engine_is_resumed_by_attaching(stand: Stand) -> None:
    await stand.pause()
    now = await stand.engine.attach()
    assert now is not None
    await _serves(stand, now)


@_check
async def weights_of_a_broken_off_update_are_of_no_version_until_others_are_loaded(stand: Stand) -> None:
    await stand.break_off()
    await _raises(NotAttached, stand.engine.version())
    assert await stand.engine.attach() is None
    version, folder = stand.new_version()
    await stand.engine.load_weights(folder, version)
    _require_version(await stand.engine.attach(), version)
    await _serves(stand, version)


# -- updates --------------------------------------------------------------------------------------------------


@_check
async def loaded_weights_are_read_back_and_sampled_from(stand: Stand) -> None:
    old = await stand.engine.version()
    version, folder = stand.new_version()
    for _ in range(2):  # announced twice
        await stand.engine.load_weights(folder, version)
        _require_version(await stand.engine.version(), version)
        answer = await _serves(stand, version)
        spans = (VersionSpan(old, 0, len(answer.token_ids)),)
        _require_apart(stand.reference(_prompt(7), answer.token_ids, 1.0, spans, None), answer.logprobs)


@_check
async def requests_in_flight_go_on_under_each_new_version(stand: Stand) -> None:
    await _in_flight(stand, stand.engine, kept=False)


@_check
async def kept_kv_is_recorded_token_by_token(stand: Stand) -> None:
    await _in_flight(stand, stand.client(kv_cache="keep"), kept=True)


@_check
async def a_request_admitted_under_one_version_and_begun_under_the_next_is_all_the_next(stand: Stand) -> None:
    """Also its prompt: KV of it that the old weights had cached is not used."""
    for engine in (stand.engine, stand.client(kv_cache="keep")):
        await engine.generate(_request("fills-the-cache", _prompt(_SHARED), 4))
        await stand.pause()
        waiting = asyncio.ensure_future(engine.generate(_request("admitted", _prompt(_SHARED), 40)))
        await _until(stand.running, lambda n: n == 1, "the request to be admitted")
        version, folder = stand.new_version()
        await engine.load_weights(folder, version)
        answer = await waiting
        _require_all(answer, version)  # stamped with what sampled, not with admission
        _require_equal(stand, _prompt(_SHARED), answer)


@_check
async def cached_prefixes_never_serve_another_version(stand: Stand) -> None:
    for engine in (stand.engine, stand.client(kv_cache="keep")):
        watch = _Watch()
        # One stays in flight, so that its blocks stay in use over the update.
        waiting = asyncio.ensure_future(engine.generate(_request("holds", _prompt(_SHARED), 200), watch))
        await watch.reached(2)
        version, folder = stand.new_version()
        await engine.load_weights(folder, version)
        shared = (*_prompt(_SHARED), 5, 6)
        answers = await asyncio.gather(*(engine.generate(_request(f"later-{i}", shared, 20, i)) for i in range(3)))
        for answer in answers:
            _require_all(answer, version)
            _require_equal(stand, shared, answer)
        held = await waiting
        # Its next turn: what it was sent and sampled is a prompt now, all of it to be of the version that reads it.
        turn = (*_prompt(_SHARED), *held.token_ids[:190])
        answer = await engine.generate(_request("next-turn", turn, 20))
        _require_all(answer, version)
        _require_equal(stand, turn, answer)


@_check
async def without_partial_rollout_an_update_waits_for_the_requests_in_flight(stand: Stand) -> None:
    engine = stand.client(partial_rollout=False, on_update="wait")
    old = await engine.version()
    watch = _Watch()
    waiting = asyncio.ensure_future(engine.generate(_request("waited-for", _prompt(5), 60), watch))
    await watch.reached(2)
    version, folder = stand.new_version()
    await engine.load_weights(folder, version)
    answer = await waiting
    _require_all(answer, old)
    _require_equal(stand, _prompt(5), answer)
    await _serves(stand, version)


@_check
async def a_drain_has_a_deadline_and_leaves_the_old_version_serving(stand: Stand) -> None:
    engine = stand.client(partial_rollout=False, on_update="wait", drain_timeout_s=0.05)
    old = await engine.version()
    watch = _Watch()
    waiting = asyncio.ensure_future(engine.generate(_request("slow", _prompt(5), _LONG), watch))
    await watch.reached(2)
    version, folder = stand.new_version()
    stalled = await _raises(EngineStalled, engine.load_weights(folder, version), "requests in flight")
    assert stalled.stage == "drain"
    _require_all(await waiting, old)
    await _serves(stand, old)


@_check
async def without_partial_rollout_an_update_may_end_the_requests_in_flight(stand: Stand) -> None:
    engine = stand.client(partial_rollout=False, on_update="abort")
    watch = _Watch()
    calls = [engine.generate(_request("ended", _prompt(5), _LONG), watch)]
    calls += [engine.generate(_request("ended-too", _prompt(6), _LONG))]
    waiting = [asyncio.ensure_future(call) for call in calls]
    await watch.reached(2)
    await _until(stand.running, lambda n: n == 2, "both requests to begin")
    version, folder = stand.new_version()
    await engine.load_weights(folder, version)
    for ended in waiting:
        await _raises(GenerationAborted, ended, "weight update")
    answer = await engine.generate(_request("ended", _prompt(5), 30))
    _require_all(answer, version)
    _require_equal(stand, _prompt(5), answer)


# -- updates that fail ----------------------------------------------------------------------------------------


@_check
async def damaged_or_misnamed_weights_are_refused_and_the_old_serve_on(stand: Stand) -> None:
    old = await stand.engine.version()
    version, folder = stand.new_version()
    stand.damage(folder)
    await _raises(UpdateFailed, stand.engine.load_weights(folder, version), "sha256")
    await _raises(UpdateFailed, stand.engine.load_weights(folder, version + 1), "expected")
    _require_version(await stand.engine.version(), old)
    await _serves(stand, old)
    stand.damage(folder)
    await stand.engine.load_weights(folder, version)
    await _serves(stand, version)


@_check
async def a_version_never_falls_under_requests_in_flight(stand: Stand) -> None:
    old, old_folder = stand.new_version()
    version, folder = stand.new_version()
    await stand.engine.load_weights(folder, version)
    watch = _Watch()
    waiting = asyncio.ensure_future(stand.engine.generate(_request("newer", _prompt(5), 100), watch))
    await watch.reached(2)
    await _raises(UpdateFailed, stand.engine.load_weights(old_folder, old), "older")
    _require_all(await waiting, version)
    await stand.engine.load_weights(old_folder, old)
    await _serves(stand, old)


@_check
async def an_engine_that_acknowledges_weights_but_keeps_the_old_is_found_out(stand: Stand) -> None:
    await _serves(stand, await stand.engine.version())
    version, folder = stand.new_version()
    stand.ignore_loads(True)
    try:
        for _ in range(2):  # also when it is tried again
            await _raises(UpdateFailed, stand.engine.load_weights(folder, version), "still serves the old")
            await _raises(NotAttached, stand.engine.version())
            await _raises(EngineDown, stand.engine.generate(_request("mislabelled", _prompt(5), 5)))
    finally:
        stand.ignore_loads(False)
    assert await stand.engine.attach() is None
    await stand.engine.load_weights(folder, version)
    await _serves(stand, version)


@_check
async def a_hung_core_is_found_by_every_call(stand: Stand) -> None:
    engine = stand.client(stage_timeout_s=0.3)
    now = await engine.version()
    version, folder = stand.new_version()
    calls: list[Callable[[], Awaitable[object]]] = [
        engine.version,
        engine.attach,
        lambda: engine.generate(_request("hung", _prompt(5), 5)),
        lambda: engine.load_weights(folder, version),
    ]
    stand.hang(True)
    try:
        for call in calls:
            await _raises(EngineStalled, call(), "since")
    finally:
        stand.hang(False)
    await _until(stand.running, lambda n: n == 0, "the engine to go on")
    _require_version(await stand.engine.attach(), now)
    await _serves(stand, now)


# -- how ------------------------------------------------------------------------------------------------------


class _Watch:
    """Collects partials, and waits for one of some length."""

    def __init__(self) -> None:
        self.seen: list[Partial] = []
        self._grown = asyncio.Event()

    def __call__(self, partial: Partial) -> None:
        self.seen.append(partial)
        self._grown.set()

    async def reached(self, tokens: int) -> None:
        async with asyncio.timeout(_WAIT_S):
            while not self.seen or len(self.seen[-1].token_ids) < tokens:
                self._grown.clear()
                await self._grown.wait()


async def _in_flight(stand: Stand, engine: Engine, *, kept: bool) -> None:
    """Two updates under three long requests, compared token by token."""
    first = await engine.version()
    watches = [_Watch() for _ in range(3)]
    waiting = [
        asyncio.ensure_future(engine.generate(_request(f"flight-{i}", _prompt(5 + 40 * i), _LONG, i), watch))
        for i, watch in enumerate(watches)
    ]
    versions = [first]
    for _ in range(2):
        begun = [len(watch.seen[-1].token_ids) if watch.seen else 0 for watch in watches]
        await asyncio.gather(*(watch.reached(n + 5) for watch, n in zip(watches, begun, strict=True)))
        version, folder = stand.new_version()
        await engine.load_weights(folder, version)
        versions.append(version)
    for i, (call, watch) in enumerate(zip(waiting, watches, strict=True)):
        answer, prompt = await call, _prompt(5 + 40 * i)
        assert [span.version for span in answer.version_spans] == versions, "the request must cross both updates"
        for partial in watch.seen:
            _require_beginning(partial, answer)
        if kept:
            assert answer.kv_version_spans is not None
            check_cover(answer.kv_version_spans, len(answer.token_ids))
            sampled, kv = versions_of_spans(answer.version_spans), versions_of_spans(answer.kv_version_spans)
            assert kv == [*sampled[1:], sampled[-1]], "KV of a token is written when the next one is sampled"
            pure = stand.reference(prompt, answer.token_ids, 1.0, answer.version_spans, None)
            _require_apart(pure, answer.logprobs)  # or the engine did not keep what it says it kept
        else:
            assert answer.kv_version_spans is None
        _require_equal(stand, prompt, answer)
        old = stand.reference(prompt, answer.token_ids, 1.0, (VersionSpan(first, 0, len(answer.token_ids)),), None)
        _require_apart(old, answer.logprobs)


async def _serves(stand: Stand, version: int) -> Generation:
    """The engine samples from `version`, and says so."""
    try:
        async with asyncio.timeout(_WAIT_S):
            answer = await stand.engine.generate(_request("serves", _prompt(7), 30))
    except TimeoutError:
        raise AssertionError(f"waited {_WAIT_S} s for a response from version {version}") from None
    _require_all(answer, version)
    _require_equal(stand, _prompt(7), answer)
    return answer


def _request(
    name: str, prompt: tuple[int, ...], tokens: int, seed: int = 0, temperature: float = 1.0
) -> GenerateRequest:
    return GenerateRequest(name, prompt, tokens, temperature, seed, ignore_eos=True)


def _prompt(length: int) -> tuple[int, ...]:
    """Longer ones begin with shorter ones."""
    return tuple(1 + (3 * i + i // 7) % 15 for i in range(length))


def _require_equal(stand: Stand, prompt: tuple[int, ...], answer: Generation, temperature: float = 1.0) -> None:
    wanted = stand.reference(prompt, answer.token_ids, temperature, answer.version_spans, answer.kv_version_spans)
    for i, (want, got) in enumerate(zip(wanted, answer.logprobs, strict=True)):
        assert abs(want - got) < TOLERANCE, (
            f"token {i} of {len(wanted)}: logprob {got}, by the weights stamped on it {want}; "
            f"{answer.version_spans}, KV {answer.kv_version_spans}"
        )


def _require_all(answer: Generation, version: int) -> None:
    """One version made the whole response, and all KV it was sampled from."""
    wanted = (VersionSpan(version, 0, len(answer.token_ids)),)
    assert answer.version_spans == wanted and answer.kv_version_spans is None, (
        f"wanted {wanted}, got {answer.version_spans}, KV {answer.kv_version_spans}"
    )


def _require_version(got: int | None, wanted: int) -> None:
    assert got == wanted, f"the engine says version {got}, it was given {wanted}"


def _require_apart(one: Sequence[float], other: Sequence[float]) -> None:
    assert max(abs(a - b) for a, b in zip(one, other, strict=True)) > APART, "can't be told apart"


def _require_beginning(partial: Partial, answer: Generation) -> None:
    n = len(partial.token_ids)
    check_cover(partial.version_spans, n)
    assert partial.token_ids == answer.token_ids[:n] and partial.logprobs == answer.logprobs[:n]
    assert versions_of_spans(partial.version_spans) == versions_of_spans(answer.version_spans)[:n]
    kv, wanted = partial.kv_version_spans, answer.kv_version_spans
    assert kv is None or (wanted and versions_of_spans(kv)[:-1] == versions_of_spans(wanted)[: n - 1])


async def _raises(kind: type[E], call: Awaitable[object], says: str = "") -> E:
    try:
        async with asyncio.timeout(_WAIT_S):
            result = await call
    except kind as error:
        assert says in str(error), f"{error!r} does not say {says!r}"
        return error
    raise AssertionError(f"expected {kind.__name__}, got {result!r}")


async def _until(look: Callable[[], Awaitable[int]], enough: Callable[[int], bool], what: str) -> None:
    try:
        async with asyncio.timeout(_WAIT_S):
            while not enough(seen := await look()):
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"waited {_WAIT_S} s for {what}, last saw {seen}") from None

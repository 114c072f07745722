"""The in-memory engine that unit tests use passes the suite, and the suite fails engines with known faults."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from roadstead.inference import conformance
from roadstead.inference.conformance import CHECKS, Check
from roadstead.inference.engine import EngineError
from roadstead.staleness import VersionSpan
from tests.support.fake_engine import FakeEngine, table
from tests.support.fake_stand import FakeStand


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_the_fake_is_an_engine(tmp_path: Path, check: Check) -> None:
    stand = FakeStand(tmp_path)
    await stand.engine.attach()
    await check(stand)


class StampsAdmission(FakeEngine):
    def _stamp(self, admitted: int | None) -> int:
        return admitted or 0


class StampsLoads(FakeEngine):
    """How often it was called, not what it was given."""

    def _label(self, version: int) -> int:
        return len(self.server.loads)


class StampsFeedCounter(FakeEngine):
    """What was announced, also when it was not loaded."""

    def _stamp(self, admitted: int | None) -> int:
        return max(self.server.loads, default=0)


class KeepsPrefixCache(FakeEngine):
    def _take(self, weights: str) -> None:
        self.server.weights = weights


class KeepsKvSilently(FakeEngine):
    def _keeps_kv(self) -> bool:
        return True


class RecordsKvATokenLate(FakeEngine):
    def _kv_column(self, spans: tuple[VersionSpan, ...]) -> tuple[VersionSpan, ...]:
        return spans


class ReportsRawLogprobs(FakeEngine):
    def _table(self, kv: str, temperature: float) -> list[float]:
        return table(self.server.weights, kv, 1.0)


class BelievesAcknowledgements(FakeEngine):
    def _require_change(self, digest: object, before: str) -> None:
        pass


class StaysPausedAfterAFailure(FakeEngine):
    def _resume(self) -> None:
        if self.server.label == self.server.loads[-1]:
            super()._resume()


class BlamesUpdatesForEveryAbort(FakeEngine):
    async def abort(self, request_id: str) -> None:
        self._updated.add(request_id)
        await super().abort(request_id)


class SwapsWhileWaiting(FakeEngine):
    """`partial_rollout: false` that is not."""

    async def _pause(self) -> None:
        self.server.paused = True


FAULTS: dict[type[FakeEngine], tuple[Check, str]] = {
    StampsAdmission: (
        conformance.a_request_admitted_under_one_version_and_begun_under_the_next_is_all_the_next,
        "wanted",
    ),
    StampsLoads: (conformance.loaded_weights_are_read_back_and_sampled_from, "the engine says version 1|it was given"),
    StampsFeedCounter: (conformance.damaged_or_misnamed_weights_are_refused_and_the_old_serve_on, "wanted"),
    KeepsPrefixCache: (conformance.cached_prefixes_never_serve_another_version, "by the weights stamped on it"),
    KeepsKvSilently: (conformance.requests_in_flight_go_on_under_each_new_version, "by the weights stamped on it"),
    RecordsKvATokenLate: (conformance.kept_kv_is_recorded_token_by_token, "KV of a token is written when the next"),
    ReportsRawLogprobs: (
        conformance.logprobs_are_those_of_the_sampled_distribution_and_spans_cover_the_response,
        "by the weights stamped on it",
    ),
    BelievesAcknowledgements: (
        conformance.an_engine_that_acknowledges_weights_but_keeps_the_old_is_found_out,
        "expected UpdateFailed",
    ),
    StaysPausedAfterAFailure: (conformance.damaged_or_misnamed_weights_are_refused_and_the_old_serve_on, "waited"),
    BlamesUpdatesForEveryAbort: (conformance.an_aborted_request_ends_as_engine_down, "weight update"),
    SwapsWhileWaiting: (
        conformance.without_partial_rollout_an_update_waits_for_the_requests_in_flight,
        "wanted",
    ),
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
async def test_the_suite_finds_a_faulty_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: type[FakeEngine]
) -> None:
    check, says = FAULTS[fault]
    if fault is StaysPausedAfterAFailure:
        monkeypatch.setattr(conformance, "_WAIT_S", 0.5)
    stand = FakeStand(tmp_path, fault)
    await stand.engine.attach()
    others = asyncio.all_tasks()
    with pytest.raises((AssertionError, EngineError), match=says):
        await check(stand)
    for request in asyncio.all_tasks() - others:  # what the failed check left in flight
        request.cancel()

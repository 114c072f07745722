"""An activity is measured by its name, its outcome and what went wrong, and never changed."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from structlog.testing import capture_logs
from temporalio import activity
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment
from temporalio.worker import ActivityInboundInterceptor, ExecuteActivityInput

from roadstead.activities.persist import BoundExceeded
from roadstead.inference.engine import EngineDown, NotAttached, UpdateFailed
from roadstead.metrics import catalogue
from roadstead.metrics.registry import Metrics
from roadstead.storage.objects import ObjectCorrupt, StoreError
from roadstead.storage.references import StagedGroup
from roadstead.storage.runs import Fenced
from roadstead.training.protocol import TrainerBadBatch, TrainerUnavailable
from roadstead.workers.faults import _KINDS, _TYPES, kind_of
from roadstead.workers.measured import Measured
from roadstead.workflows.messages import DISCARDED, Placement, TrainedStep

STAGED = StagedGroup(
    group_id="g00000001",
    attempt=1,
    digest="d",
    trajectories=4,
    tokens=40,
    oldest_version=0,
    newest_version=0,
    mean_reward=0.5,
)


class Ends(ActivityInboundInterceptor):
    """In the activity's place: returns or raises."""

    def __init__(self, end: Any) -> None:
        self._end = end

    async def execute_activity(self, input: ExecuteActivityInput) -> Any:
        if isinstance(self._end, BaseException):
            raise self._end
        return self._end


async def execute(metrics: Metrics, name: str, end: Any, *, args: tuple[Any, ...] = (), attempt: int = 1) -> Any:
    environment = ActivityEnvironment()
    environment.info = dataclasses.replace(environment.info, activity_type=name, attempt=attempt)
    execution = Measured(metrics).intercept_activity(Ends(end))

    @activity.defn
    async def run() -> Any:
        return await execution.execute_activity(ExecuteActivityInput(fn=run, args=args, executor=None, headers={}))

    return await environment.run(run)


def samples(metrics: Metrics, name: str) -> dict[str, float]:
    """Those that are not 0, by their label values but the activity's."""
    return {
        ",".join(value for label, value in sorted(sample.labels.items()) if label != "activity"): sample.value
        for family in text_string_to_metric_families(metrics.text())
        for sample in family.samples
        if sample.name == name and sample.value
    }


async def test_durations_outcomes_retries_and_faults_of_an_activity() -> None:
    metrics = Metrics("orchestrator")
    assert await execute(metrics, "persist_batch", "the result") == "the result"
    await execute(metrics, "persist_batch", "the result", attempt=3)
    failure = StoreError("s3 is away")
    with pytest.raises(StoreError) as raised:
        await execute(metrics, "persist_batch", failure, attempt=2)
    assert raised.value is failure, "the very exception, whose type decides about retries"
    with pytest.raises(asyncio.CancelledError):
        await execute(metrics, "persist_batch", asyncio.CancelledError())
    outcomes = samples(metrics, "roadstead_activity_seconds_count")
    assert outcomes == {"completed": 2, "failed": 1, "cancelled": 1}
    assert samples(metrics, "roadstead_activity_retries_total") == {"": 2}
    assert samples(metrics, "roadstead_activity_faults_total") == {"store": 1}, "a cancellation is no fault"
    assert samples(metrics, "roadstead_activities_running") == {}


async def test_finished_groups_are_counted_by_what_can_be_learned_from_them() -> None:
    metrics = Metrics("rollout")
    verdicts = [{}, {"trainable": False, "note": "reward constant 0.0"}, {"filtered": "short"}, {"aborted_members": 2}]
    for changes in verdicts:
        await execute(metrics, "rollout_group", STAGED.model_copy(update=changes))
    outcomes = samples(metrics, "roadstead_generated_groups_total")
    assert outcomes == {"trainable": 2, "untrainable": 1, "filtered": 1}
    assert samples(metrics, "roadstead_generated_tokens_total") == {"": 160}
    assert samples(metrics, "roadstead_aborted_trajectories_total") == {"": 2}


async def test_tokens_that_no_slot_takes_are_counted_by_reason() -> None:
    metrics = Metrics("ledger")
    outcomes = Placement.model_fields["outcome"].annotation
    for outcome in outcomes.__args__:  # type: ignore[union-attr]
        await execute(metrics, "occupy_slot", Placement(outcome=outcome), args=(STAGED,))
    reasons = samples(metrics, "roadstead_discarded_tokens_total")
    assert reasons == {"filtered": 40, "surplus": 40, "expired": 40, "late": 40}


async def test_a_steps_phases_are_the_trainers_own_and_few() -> None:
    metrics = Metrics("train")
    seconds = {"read": 0.5, "train": 2.0, "upload": 1.0, "replay": 3.0, "something new": 0.25}
    step = TrainedStep(step=1, weights_digest="w", loss=0.0, grad_norm=1.0, applied=True, seconds=seconds)
    await execute(metrics, "train_step", step)
    found = samples(metrics, "roadstead_train_phase_seconds_sum")
    assert found == {"read": 0.5, "train": 2.0, "upload": 1.0, "replay": 3.0, "other": 0.25}


async def test_a_result_that_can_not_be_measured_is_logged_and_given_back_all_the_same() -> None:
    with capture_logs() as logs:
        assert await execute(Metrics("rollout"), "rollout_group", "no group at all") == "no group at all"
    assert [line["event"] for line in logs] == ["metrics.not_measured"]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (NotAttached("e"), "engine_down"),
        (EngineDown("e"), "engine_down"),
        (UpdateFailed("e"), "engine_refused"),
        (Fenced("a newer attempt"), "fenced"),
        (ObjectCorrupt("sha256"), "bad_data"),
        (StoreError("503"), "store"),
        (TrainerUnavailable("down"), "trainer_down"),
        (TrainerBadBatch("b"), "trainer_refused"),
        (BoundExceeded("b"), "bound_exceeded"),
        (TimeoutError(), "timeout"),
        (ApplicationError("gone", type="RunGone"), "run_gone"),
        (ApplicationError("late", type=DISCARDED), "timeout"),
        (ApplicationError("a user's own"), "other"),
        (ZeroDivisionError(), "other"),
    ],
)
def test_faults_have_few_kinds(error: BaseException, kind: str) -> None:
    assert kind_of(error) == kind


def test_every_kind_is_of_the_catalogue_and_none_is_shadowed_by_its_base() -> None:
    kinds = {kind for _, kind in _KINDS} | set(_TYPES.values()) | {"other"}
    assert kinds == set(catalogue.FAULT_KINDS)
    for place, (earlier, _) in enumerate(_KINDS):
        assert not any(issubclass(later, earlier) for later, _ in _KINDS[place + 1 :]), earlier

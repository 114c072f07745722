"""Evaluations beside a run: the workflows on a real Temporal server, then a whole run on real parts.

What is checked is what the activities were asked for and, of the whole run, the samples on S3.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from temporalio import activity
from temporalio.client import Client, WorkflowFailureError, WorkflowHandle
from temporalio.exceptions import ApplicationError
from temporalio.worker import Replayer, Worker

from roadstead.activities.occupy import OccupySlot
from roadstead.activities.release import ReleaseSlot
from roadstead.activities.reserve import ReserveSlots
from roadstead.activities.run_handle import RunHandle
from roadstead.cli.begin import check_inputs, ensure_search_attributes
from roadstead.staleness import Ledger
from roadstead.storage import batches, evals, steps, weights
from roadstead.workers.orchestrator import runner
from roadstead.workflows.evaluation import Evaluation
from roadstead.workflows.evaluation_messages import EvaluationClose, EvaluationGroupOrder
from roadstead.workflows.messages import (
    EvaluationOrder,
    EvaluationPlan,
    RunPlan,
    RunState,
    RunStatus,
    evaluation_workflow_id,
)
from roadstead.workflows.options import queue
from roadstead.workflows.training_run import TrainingRun
from roadstead.workflows.training_step import TrainingStep
from tests.support import tiny
from tests.support.activities import World
from tests.support.workplace import LIMIT_S as RUN_LIMIT_S
from tests.support.workplace import Workplace, check_run

LIMIT_S = 60
PROMPTS = 3


def nothing(_: int) -> None:
    return None


@dataclass
class Evaluations:
    """The activities of evaluations, in memory."""

    seconds: float = 0.0
    """Of a prompt."""
    opening: Callable[[int], Exception | bool | None] = nothing
    """By version: what opening fails with, or whether there is something to do."""
    failing: Callable[[int], Exception | None] = nothing
    """By prompt."""
    closing: Exception | None = None
    orders: list[EvaluationGroupOrder] = field(default_factory=list)
    finished: list[EvaluationGroupOrder] = field(default_factory=list)
    cancelled: int = 0
    closed: dict[int, EvaluationClose] = field(default_factory=dict)
    started: asyncio.Event = field(default_factory=asyncio.Event)

    @activity.defn
    async def open_evaluation(self, order: EvaluationOrder) -> bool:
        answer = self.opening(order.version)
        if isinstance(answer, Exception):
            raise answer
        return answer is not False

    @activity.defn
    async def evaluate_group(self, order: EvaluationGroupOrder) -> None:
        self.orders.append(order)
        self.started.set()
        if (failure := self.failing(order.first)) is not None:
            raise failure
        try:
            until = time.monotonic() + self.seconds
            while time.monotonic() < until:
                activity.heartbeat()
                await asyncio.sleep(0.05)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        self.finished.append(order)

    @activity.defn
    async def close_evaluation(self, close: EvaluationClose) -> None:
        if self.closing is not None:
            raise self.closing
        assert close.evaluation.version not in self.closed, "a version is closed once"
        self.closed[close.evaluation.version] = close

    def evaluated(self, version: int) -> list[int]:
        """Prompts of a version that were finished."""
        mine = [o for o in self.finished if o.evaluation.version == version]
        return sorted(p for o in mine for p in range(o.first, o.first + o.count))


def plan(every: int = 2, prompts: int = PROMPTS, timeout_s: float = 30.0, **changes: Any) -> RunPlan:
    values: dict[str, Any] = {
        "run_id": f"e-{uuid.uuid4().hex[:8]}",
        "attempt": 1,
        "target_steps": 5,
        "groups_per_batch": 2,
        "max_staleness": 1,
        "slots_per_buffer": 2,
        "max_groups_in_flight": None,
        "group_timeout_s": 30.0,
        "group_attempts": 2,
        "evaluation": EvaluationPlan(every=every, prompts=prompts, timeout_s=timeout_s),
    }
    return RunPlan(**{**values, **changes})


@contextlib.asynccontextmanager
async def running(
    client: Client, state: RunPlan | RunState, evaluations: Evaluations, world: World | None = None
) -> AsyncIterator[WorkflowHandle[Any, RunStatus]]:
    """A run, with all of its roles in this process."""
    state = state if isinstance(state, RunState) else RunState(plan=state)
    run_id, world = state.plan.run_id, world or World()
    handle = RunHandle(client, run_id)
    roles: dict[str, list[Callable[..., Any]]] = {
        "orchestrator": [
            *(world.persist_batch, world.publish_weights, world.close_attempt),
            evaluations.close_evaluation,
        ],
        "ledger": [
            *(ReserveSlots(handle).reserve_slots, OccupySlot(handle).occupy_slot),
            ReleaseSlot(handle).release_slot,
        ],
        "rollout": [world.rollout_group, world.record_dead_letter],
        "evaluation": [evaluations.open_evaluation, evaluations.evaluate_group],
        "train": [world.train_step, world.save_checkpoint],
    }
    await ensure_search_attributes(client)
    async with contextlib.AsyncExitStack() as stack:
        for role, activities in roles.items():
            worker = Worker(
                client,
                task_queue=queue(run_id, role),
                activities=activities,
                workflows=[TrainingRun, TrainingStep, Evaluation] if role == "orchestrator" else [],
                workflow_runner=runner(),
                max_concurrent_activities=8 if role == "ledger" else 64,
            )
            await stack.enter_async_context(worker)
        yield await client.start_workflow(TrainingRun.run, state, id=run_id, task_queue=queue(run_id, "orchestrator"))


async def to_end(client: Client, the_plan: RunPlan, evaluations: Evaluations, world: World | None = None) -> RunStatus:
    async with running(client, the_plan, evaluations, world) as handle:
        return await asyncio.wait_for(handle.result(), LIMIT_S)


async def state_of(client: Client, the_plan: RunPlan, version: int) -> str:
    handle = client.get_workflow_handle(evaluation_workflow_id(the_plan.run_id, version))
    with contextlib.suppress(WorkflowFailureError):
        await asyncio.wait_for(handle.result(), LIMIT_S)
    status = (await handle.describe()).status
    assert status is not None
    return status.name


def no_good() -> ApplicationError:
    return ApplicationError("no good", type="BadRequest", non_retryable=True)


async def test_first_every_kth_and_last_version_are_evaluated_on_every_prompt_once(temporal: Client) -> None:
    """The last one is off the interval, and the run waits for it although its steps are done."""
    the_plan, evaluations = plan(every=2), Evaluations(seconds=0.4)
    status = await to_end(temporal, the_plan, evaluations)
    assert sorted(evaluations.closed) == [0, 2, 4, 5] and status.phase == "finished"
    for version, close in evaluations.closed.items():
        assert evaluations.evaluated(version) == [0, 1, 2]
        assert (close.failures, close.skipped, close.evaluation.attempt) == ({}, None, 1)
        assert close.seconds >= 0.4, "the time of the samples"


async def test_a_drain_finishes_the_evaluation_that_is_open(temporal: Client) -> None:
    the_plan, evaluations = plan(every=1000, target_steps=1000), Evaluations(seconds=2.0)
    async with running(temporal, the_plan, evaluations, World(training_s=0.05)) as handle:
        await asyncio.wait_for(evaluations.started.wait(), LIMIT_S)
        await handle.signal("drain")
        assert not evaluations.closed
        status = await asyncio.wait_for(handle.result(), LIMIT_S)
    assert status.phase == "drained" and evaluations.evaluated(0) == [0, 1, 2]
    assert list(evaluations.closed) == [0] and evaluations.cancelled == 0


async def test_stop_ends_it_without_a_record_so_that_a_resume_begins_it_again(temporal: Client) -> None:
    the_plan, evaluations = plan(every=1000, target_steps=1000), Evaluations(seconds=300.0)
    async with running(temporal, the_plan, evaluations, World(training_s=0.05)) as handle:
        await asyncio.wait_for(evaluations.started.wait(), LIMIT_S)
        await handle.signal("stop", 10.0)
        status = await asyncio.wait_for(handle.result(), 40)
        assert await state_of(temporal, the_plan, 0) == "COMPLETED"
    assert status.phase == "stopped" and evaluations.closed == {} and evaluations.cancelled > 0


async def test_a_run_that_was_lost_in_its_last_evaluation_has_it_made_up(temporal: Client) -> None:
    """All steps are trained: the next attempt has nothing else to do, and admits nobody."""
    the_plan, evaluations = plan(target_steps=5), Evaluations()
    ledger = Ledger(batch_size=2, max_staleness=1, slots_per_buffer=2, version=5, step_target=5)
    state = RunState(plan=the_plan, ledger=ledger.to_dict(), evaluated=4)
    async with running(temporal, state, evaluations) as handle:
        status = await asyncio.wait_for(handle.result(), LIMIT_S)
    assert list(evaluations.closed) == [5] and evaluations.evaluated(5) == [0, 1, 2]
    assert (status.phase, status.admitted) == ("finished", 0)


async def test_a_prompt_that_fails_is_on_record_and_fails_nothing(temporal: Client) -> None:
    evaluations = Evaluations(failing=lambda position: no_good() if position == 1 else None)
    status = await to_end(temporal, plan(target_steps=2), evaluations)
    assert status.phase == "finished" and status.trained == 4
    assert [close.failures for close in evaluations.closed.values()] == [{1: "BadRequest: no good"}] * 2
    assert evaluations.evaluated(0) == evaluations.evaluated(2) == [0, 2]


async def test_a_version_that_no_engine_serves_any_more_is_skipped_with_the_reason(temporal: Client) -> None:
    def passed(version: int) -> Exception | None:
        gone = ApplicationError("it serves 1", type="VersionPassed", non_retryable=True)
        return gone if version == 0 else None

    evaluations = Evaluations(opening=passed)
    assert (await to_end(temporal, plan(target_steps=2), evaluations)).phase == "finished"
    assert {version: close.skipped for version, close in evaluations.closed.items()} == {
        0: "VersionPassed: it serves 1",
        2: None,
    }
    assert evaluations.evaluated(0) == [] and evaluations.evaluated(2) == [0, 1, 2]


async def test_one_that_is_on_record_already_is_not_begun(temporal: Client) -> None:
    evaluations = Evaluations(opening=lambda version: version != 0)
    await to_end(temporal, plan(target_steps=2), evaluations)
    assert list(evaluations.closed) == [2] and evaluations.evaluated(0) == []


async def test_an_evaluation_that_hangs_is_given_up_after_its_time_and_the_run_goes_on(temporal: Client) -> None:
    evaluations = Evaluations(seconds=1e9)
    status = await to_end(temporal, plan(timeout_s=2.0, target_steps=2), evaluations)
    assert status.phase == "finished"
    for close in evaluations.closed.values():
        assert set(close.failures) == {0, 1, 2} and close.skipped is None
        assert all("not finished within evaluation.timeout_s: 2 s" in why for why in close.failures.values())


async def test_one_whose_record_can_t_be_written_fails_alone_and_the_run_is_told(temporal: Client) -> None:
    the_plan = plan(target_steps=2)
    evaluations = Evaluations(closing=ApplicationError("fenced", type="Fenced", non_retryable=True))
    assert (await to_end(temporal, the_plan, evaluations)).phase == "finished"
    assert await state_of(temporal, the_plan, 0) == "FAILED"


async def test_one_that_is_cancelled_from_outside_tells_the_run_and_ends_its_samples(temporal: Client) -> None:
    the_plan, evaluations = plan(every=1000, target_steps=1), Evaluations(seconds=300.0)
    async with running(temporal, the_plan, evaluations) as handle:
        await asyncio.wait_for(evaluations.started.wait(), LIMIT_S)
        await temporal.get_workflow_handle(evaluation_workflow_id(the_plan.run_id, 0)).cancel()
        assert await state_of(temporal, the_plan, 0) == "CANCELED"
        evaluations.seconds = 0.0
        assert (await asyncio.wait_for(handle.result(), LIMIT_S)).phase == "finished"
    assert list(evaluations.closed) == [1] and evaluations.cancelled > 0


async def test_one_whose_run_is_gone_ends_like_any_other(temporal: Client) -> None:
    the_plan, evaluations = plan(target_steps=1), Evaluations()
    async with running(temporal, the_plan, evaluations) as handle:
        await asyncio.wait_for(handle.result(), LIMIT_S)
        order = EvaluationOrder(
            run_id=the_plan.run_id, attempt=1, version=7, prompts=PROMPTS, timeout_s=10.0, group_attempts=1
        )
        await temporal.start_workflow(
            Evaluation.run,
            order,
            id=evaluation_workflow_id(the_plan.run_id, 7),
            task_queue=queue(the_plan.run_id, "orchestrator"),
        )
        assert await state_of(temporal, the_plan, 7) == "COMPLETED"
    assert evaluations.evaluated(7) == [0, 1, 2] and 7 in evaluations.closed


async def test_thousands_of_prompts_are_a_few_hundred_orders(temporal: Client) -> None:
    """Temporal holds 2,000 open activities of a workflow, and ends one at 51,200 events."""
    the_plan, evaluations = plan(every=1000, prompts=3000, target_steps=1), Evaluations()
    await to_end(temporal, the_plan, evaluations)
    for version in (0, 1):
        assert evaluations.evaluated(version) == list(range(3000))
        assert evaluations.closed[version].share == 12
    history = await temporal.get_workflow_handle(evaluation_workflow_id(the_plan.run_id, 0)).fetch_history()
    assert len(history.events) < 2000


async def test_every_history_of_an_evaluation_replays(temporal: Client) -> None:
    the_plan = plan(target_steps=2)
    await to_end(temporal, the_plan, Evaluations(failing=lambda position: no_good() if position else None))
    replayer = Replayer(workflows=[Evaluation], workflow_runner=runner(), data_converter=temporal.data_converter)
    for version in (0, 2):
        handle = temporal.get_workflow_handle(evaluation_workflow_id(the_plan.run_id, version))
        await replayer.replay_workflow(await handle.fetch_history())


# -- a whole run on real parts --------------------------------------------------------------------------------

STEPS, EVERY, SAMPLES = 5, 2, 2
DUE = [0, 2, 4, 5]


@pytest.fixture(scope="module")
def evaluated(workplace: Workplace) -> str:
    output = workplace.run(
        "evaluated",
        evaluation={
            "prompts": str(prompt_file(workplace.folder)),
            "every": EVERY,
            "group_size": SAMPLES,
            "temperature": 0.7,
            "max_tokens": 60,
            "timeout_s": 120.0,
        },
        training__steps=STEPS,
    )
    assert f"{STEPS} of {STEPS}" in output, output
    return "evaluated"


def prompt_file(folder: Path) -> Path:
    file = folder / "evaluation.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{i}+9=", "prompt_id": f"e{i}"}) + "\n" for i in range(6)))
    return file


@pytest.mark.timeout(RUN_LIMIT_S + 60)
def test_every_token_on_record_is_of_exactly_the_version_that_is_evaluated(
    workplace: Workplace, evaluated: str
) -> None:
    """While rollouts and training went on: the one engine was held, and the bound of the batches holds all the same."""
    store, keys = workplace.store(evaluated)
    found = evals.all_of(store, keys)
    assert [summary.version for summary in found] == DUE
    for summary in found:
        assert summary.complete and summary.skipped is None and summary.failures == {}
        assert summary.weights_digest == weights.manifest_of(store, keys, summary.version).digest
        rows = evals.read(store, summary).to_pylist()
        assert Counter(row["prompt_id"] for row in rows) == {f"e{i}": SAMPLES for i in range(6)}
        for row in rows:
            spans = [(span["version"], span["start"], span["end"]) for span in row["version_spans"]]
            assert spans == [(summary.version, 0, len(row["response_token_ids"]))]
            assert row["sampling"]["temperature"] == 0.7 and len(row["response_token_ids"]) == 60
            text = row["response_text"]
            assert row["reward"] == pytest.approx(sum(c.isdigit() for c in text) / max(1, len(text)))
        assert summary.mean_reward == pytest.approx(sum(row["reward"] for row in rows) / len(rows))
    check_run(workplace, evaluated, steps_=STEPS, bound=2)


def test_versions_are_compared_on_the_same_draws(workplace: Workplace, evaluated: str) -> None:
    store, keys = workplace.store(evaluated)
    tables = [evals.read(store, summary) for summary in evals.all_of(store, keys)]
    drawn = [table.select(["position", "member", "prompt_id", "seed", "prompt_token_ids"]) for table in tables]
    assert all(other.equals(drawn[0]) for other in drawn) and len(set(drawn[0]["seed"].to_pylist())) == 6 * SAMPLES
    said = [table["response_token_ids"].to_pylist() for table in tables]
    assert all(other != said[0] for other in said[1:]), "the weights are others, so the samples are"


def test_evaluation_is_in_no_batch_and_in_no_age(workplace: Workplace, evaluated: str) -> None:
    store, keys = workplace.store(evaluated)
    prompts, seeds = set(), set()
    for record in steps.all_of(store, keys):
        commit = batches.find(store, keys, record.step)
        assert commit is not None
        table = batches.read(store, commit)
        prompts |= set(table["prompt_id"].to_pylist())
        seeds |= set(table["seed"].to_pylist())
    summary = evals.find(store, keys, 0)
    assert summary is not None
    rows = evals.read(store, summary)
    assert not prompts & set(rows["prompt_id"].to_pylist()) and not seeds & set(rows["seed"].to_pylist())


def test_the_command_lists_every_version_with_its_numbers(workplace: Workplace, evaluated: str) -> None:
    answer = json.loads(workplace.roadstead("evals", evaluated, "--json").stdout)
    store, keys = workplace.store(evaluated)
    assert answer["not_on_record"] == []
    assert [(e["version"], e["mean_reward"], e["complete"]) for e in answer["evaluations"]] == [
        (summary.version, summary.mean_reward, True) for summary in evals.all_of(store, keys)
    ]
    shown = workplace.roadstead("evals", evaluated).stdout
    assert "digits" in shown and "6 of 6" in shown


def test_evaluation_inputs_are_checked_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    good = str(prompt_file(tmp_path))
    for evaluation, words in [
        ({"prompts": str(tmp_path / "nowhere.jsonl")}, r"evaluation\.prompts: .*nowhere\.jsonl can't be read"),
        ({"prompts": str(tmp_path / "empty.jsonl")}, r"empty\.jsonl: no rows"),
        (
            {"prompts": good, "environment": "nothing:here"},
            r"evaluation\.environment: 'nothing:here' can't be imported",
        ),
        ({"prompts": good, "max_tokens": 4000}, r"evaluation\.max_tokens: 4000 leaves no room"),
    ]:
        with pytest.raises(ValueError, match=words):  # ConfigError and DatasetError are
            check_inputs(tiny.config(tmp_path, "r", evaluation=evaluation), recorded=True)
    check_inputs(tiny.config(tmp_path, "r", evaluation={"prompts": good}), recorded=True)

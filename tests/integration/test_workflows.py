"""The run and step workflows on a real Temporal server, with activities that keep what they were told.

Every property is checked on the batches that came out, not on the counters that made them.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
import uuid
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest
from temporalio.client import Client, WorkflowFailureError, WorkflowHandle
from temporalio.worker import Replayer, Worker

from roadstead.activities.occupy import OccupySlot
from roadstead.activities.release import ReleaseSlot
from roadstead.activities.reserve import ReserveSlots
from roadstead.activities.run_handle import RunHandle
from roadstead.cli.begin import ensure_search_attributes
from roadstead.staleness import Ledger, Slot
from roadstead.storage.batches import BatchCommit, BatchGroup, StoredFile
from roadstead.storage.recovery import Recovered
from roadstead.storage.references import StagedGroup, group_id, position_of
from roadstead.workers.orchestrator import runner
from roadstead.workflows import training_run
from roadstead.workflows.messages import (
    GroupOrder,
    Placement,
    RunPlan,
    RunState,
    RunStatus,
    step_workflow_id,
)
from roadstead.workflows.options import queue
from roadstead.workflows.restore import restore
from roadstead.workflows.training_run import TrainingRun
from roadstead.workflows.training_step import TrainingStep
from tests.support.activities import World

Run = WorkflowHandle[Any, RunStatus]
LIMIT_S = 60


def plan(**changes: Any) -> RunPlan:
    values: dict[str, Any] = {
        "run_id": f"t-{uuid.uuid4().hex[:8]}",
        "attempt": 1,
        "target_steps": 5,
        "groups_per_batch": 4,
        "max_staleness": 2,
        "slots_per_buffer": 4,
        "max_groups_in_flight": None,
        "group_timeout_s": 30.0,
        "group_attempts": 2,
    }
    return RunPlan(**{**values, **changes})


def order_of(name: str) -> GroupOrder:
    return GroupOrder(attempt=1, version=0, reserved_at=0, position=position_of(name))


@contextlib.asynccontextmanager
async def workers(client: Client, run_id: str, world: World) -> AsyncIterator[None]:
    """All roles of a run in this process."""
    handle = RunHandle(client, run_id)
    bridge = [
        ReserveSlots(handle).reserve_slots,
        OccupySlot(handle).occupy_slot,
        ReleaseSlot(handle).release_slot,
    ]
    async with contextlib.AsyncExitStack() as stack:
        for role, activities in {
            "orchestrator": [world.persist_batch, world.publish_weights, world.close_attempt],
            "ledger": bridge,
            "rollout": [world.rollout_group, world.record_dead_letter],
            "train": [world.train_step, world.save_checkpoint],
        }.items():
            await stack.enter_async_context(
                Worker(
                    client,
                    task_queue=queue(run_id, role),
                    activities=activities,
                    workflows=[TrainingRun, TrainingStep] if role == "orchestrator" else [],
                    workflow_runner=runner(),
                    max_concurrent_activities=8 if role == "ledger" else 64,
                )
            )
        yield


async def start(client: Client, state: RunPlan | RunState) -> Run:
    await ensure_search_attributes(client)
    state = state if isinstance(state, RunState) else RunState(plan=state)
    the_plan = state.plan
    return await client.start_workflow(
        TrainingRun.run,
        state,
        id=the_plan.run_id,
        task_queue=queue(the_plan.run_id, "orchestrator"),
    )


async def run_to_end(client: Client, the_plan: RunPlan, world: World) -> RunStatus:
    async with workers(client, the_plan.run_id, world):
        handle = await start(client, the_plan)
        return await asyncio.wait_for(handle.result(), LIMIT_S)


def check_batches(the_plan: RunPlan, world: World) -> None:
    """Full batches in order, every group once, the bound kept by the versions of the admissions."""
    assert sorted(world.batches) == list(range(the_plan.target_steps))
    groups = [entry.group_id for step in sorted(world.batches) for entry in world.batches[step].entries]
    assert len(groups) == len(set(groups)) == the_plan.target_steps * the_plan.groups_per_batch
    for step, order in world.batches.items():
        for slot, entry in enumerate(order.entries):
            assert entry.slot == slot
            assert entry.v_traj <= step <= entry.v_traj + the_plan.max_staleness
            assert entry.v_traj <= world.admitted_under[entry.group_id]
    assert all(world.trained[step] == 1 for step in world.batches)


def long_tail(order: GroupOrder) -> float:
    """Seeded by position: most groups are quick, one in five takes much longer than a step."""
    return random.Random(order.position).choice([0.0, 0.0, 0.05, 0.05, 0.8])


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
async def test_every_batch_is_full_in_order_and_within_the_bound(temporal: Client, max_staleness: int) -> None:
    the_plan, world = plan(max_staleness=max_staleness, target_steps=6), World(generation_s=long_tail, training_s=0.1)
    status = await run_to_end(temporal, the_plan, world)
    check_batches(the_plan, world)
    assert (status.phase, status.version, status.in_flight, status.waiting) == ("finished", 6, 0, 0)
    assert status.admitted == status.trained == 24, "a target known from the start leaves nothing over"


async def test_synchronous_run_admits_nothing_before_the_version_it_trains(temporal: Client) -> None:
    the_plan, world = plan(max_staleness=0), World(generation_s=long_tail)
    await run_to_end(temporal, the_plan, world)
    check_batches(the_plan, world)
    for step, order in world.batches.items():
        assert {world.admitted_under[entry.group_id] for entry in order.entries} == {step}


async def test_continue_as_new_loses_no_group_and_answers_repeats_from_state(temporal: Client) -> None:
    the_plan = plan(target_steps=9, steps_per_execution=2)
    world = World(generation_s=long_tail)
    async with workers(temporal, the_plan.run_id, world):
        handle = await start(temporal, the_plan)
        status = await asyncio.wait_for(handle.result(), LIMIT_S)
    check_batches(the_plan, world)
    assert status.trained == 36
    first = [w async for w in temporal.list_workflows(f'WorkflowId = "{the_plan.run_id}"')]
    assert len(first) >= 4, "it did continue as new"


async def test_a_repeated_occupy_is_answered_and_not_applied_twice(temporal: Client) -> None:
    the_plan = plan(target_steps=3, steps_per_execution=1)
    world = World(training_s=0.2)
    async with workers(temporal, the_plan.run_id, world):
        handle = await start(temporal, the_plan)
        while 0 not in world.batches:
            await asyncio.sleep(0.05)
        entry = world.batches[0].entries[0]
        report = StagedGroup(
            group_id=entry.group_id,
            attempt=1,
            digest=entry.digest,
            trajectories=4,
            tokens=40,
            oldest_version=0,
            newest_version=0,
            mean_reward=0.5,
        )
        for key in ("again-1", "again-2"):
            answer = await handle.execute_update("occupy", report, id=key, result_type=Placement)
            assert answer == Placement(outcome="placed", buffer=0)
        await asyncio.wait_for(handle.result(), LIMIT_S)
    check_batches(the_plan, world)


async def test_an_engine_that_lagged_lowers_the_group_and_never_breaks_the_bound(temporal: Client) -> None:
    def lag(order: GroupOrder) -> int:
        return min(order.version, order.position % 3)

    the_plan, world = plan(target_steps=8, max_staleness=1), World(generation_s=long_tail, lag=lag)
    status = await run_to_end(temporal, the_plan, world)
    check_batches(the_plan, world)
    assert status.admitted == status.trained + status.expired
    terminal = [state for order in world.batches.values() for state in order.cut.terminal.values()]
    assert status.expired == terminal.count("expired") > 0, "lowered out of every buffer is recorded, not dropped"


async def test_groups_that_cannot_be_generated_are_dead_lettered_and_replaced(temporal: Client) -> None:
    the_plan = plan()
    world = World(broken=lambda order: order.position % 4 == 1)
    status = await run_to_end(temporal, the_plan, world)
    check_batches(the_plan, world)
    terminal = [item for order in world.batches.values() for item in order.cut.terminal.items()]
    dead = {group for group, state in terminal if state != "trained"}
    assert status.dead_lettered >= len(dead) > 0
    assert all(int(group[1:]) % 4 == 1 for group in dead)
    assert status.admitted == status.trained + status.dead_lettered
    assert set(world.dead_letters) >= dead
    assert all("the environment is broken" in reason for reason in world.dead_letters.values())


async def test_a_run_has_a_budget_of_dead_letters(temporal: Client) -> None:
    the_plan = plan(target_steps=1000, max_dead_letters=3)
    with pytest.raises(WorkflowFailureError) as failure:
        await run_to_end(temporal, the_plan, World(broken=lambda order: order.position % 4 == 1))
    assert "rollout.max_dead_letters is 3" in str(failure.value.cause)


async def test_half_of_all_groups_filtered_fills_every_batch_with_the_rest(temporal: Client) -> None:
    the_plan = plan(target_steps=10, max_staleness=1)

    def filtered(order: GroupOrder) -> str | None:
        return "zero_variance" if random.Random(order.position).random() < 0.5 else None

    world = World(generation_s=long_tail, filtered=filtered)
    status = await run_to_end(temporal, the_plan, world)
    check_batches(the_plan, world)
    trained = {entry.group_id for order in world.batches.values() for entry in order.entries}
    out = {name for name, times in world.generated.items() if filtered(order_of(name))}
    assert not trained & out
    terminal = {name: state for order in world.batches.values() for name, state in order.cut.terminal.items()}
    for close in world.closed:
        terminal |= close.terminal
    assert {name for name, state in terminal.items() if state == "filtered"} == out, "each is recorded, once"
    assert status.filtered == len(out) > 5 and status.admitted == status.trained + status.filtered


async def test_synchronous_run_with_filters_stays_exact(temporal: Client) -> None:
    the_plan = plan(max_staleness=0, target_steps=5)
    world = World(filtered=lambda order: "length" if order.position % 3 == 0 else None)
    await run_to_end(temporal, the_plan, world)
    check_batches(the_plan, world)
    assert all(entry.v_traj == step for step, order in world.batches.items() for entry in order.entries)


@pytest.mark.parametrize("filtered", [True, False])
async def test_a_run_with_nothing_to_learn_from_stops_and_says_why(temporal: Client, filtered: bool) -> None:
    the_plan = plan(target_steps=1000, empty_batches=3)

    def note(order: GroupOrder) -> str | None:
        return "reward constant 0.0" if order.position >= 9 else None

    world = World(note=note, filtered=lambda order: "zero_variance" if filtered and note(order) else None)
    with pytest.raises(WorkflowFailureError) as failure:
        await run_to_end(temporal, the_plan, world)
    text = str(failure.value.cause)
    assert "in 12 of 12 groups" in text and "reward constant 0.0" in text
    assert "since step" in text and "resume" in text


async def test_one_group_to_learn_from_now_and_then_keeps_a_run_going(temporal: Client) -> None:
    the_plan = plan(target_steps=6, empty_batches=3)
    world = World(note=lambda order: None if order.position % 3 == 0 else "reward constant 1.0")
    status = await run_to_end(temporal, the_plan, world)
    check_batches(the_plan, world)
    assert status.phase == "finished"


async def test_the_stuck_clock_discards_moves_up_and_refills_without_any_event(temporal: Client) -> None:
    """One group never ends, the trainer waits for it, nothing else happens: the clock alone must act."""
    the_plan = plan(target_steps=3, stuck_timeout_s=1.0)
    world = World(generation_s=lambda order: 1e9 if order.position in {1, 6} else 0.0)
    status = await run_to_end(temporal, the_plan, world)
    check_batches(the_plan, world)
    assert world.cancelled == {group_id(1), group_id(6)}, "their generation is ended, not left to run"
    terminal = {name: state for order in world.batches.values() for name, state in order.cut.terminal.items()}
    for close in world.closed:
        terminal |= close.terminal
    assert {name for name, state in terminal.items() if state != "trained"} == {group_id(1), group_id(6)}
    assert terminal[group_id(1)] == terminal[group_id(6)] == "discarded"
    assert status.discarded == 2 and not world.dead_letters


async def test_the_stuck_clock_works_for_a_synchronous_run(temporal: Client) -> None:
    the_plan = plan(target_steps=2, max_staleness=0, stuck_timeout_s=0.5)
    world = World(generation_s=lambda order: 1e9 if order.position == 3 else 0.0)
    await run_to_end(temporal, the_plan, world)
    check_batches(the_plan, world)
    assert all(entry.v_traj == step for step, order in world.batches.items() for entry in order.entries)


async def test_surplus_of_over_sampling_is_ended_in_the_engine(temporal: Client) -> None:
    """A batch is full without its slow groups: their slots are surplus, their generation is of no use."""
    the_plan = plan(target_steps=3, max_staleness=0, slots_per_buffer=6)
    world = World(generation_s=lambda order: 30.0 if order.position % 6 == 0 else 0.0)
    began = time.monotonic()
    status = await run_to_end(temporal, the_plan, world)
    assert time.monotonic() - began < 25
    check_batches(the_plan, world)
    assert status.discarded > 0 and world.cancelled


async def test_a_rollout_that_never_returns_is_tried_again_then_given_up_and_replaced(temporal: Client) -> None:
    the_plan = plan(target_steps=3, group_timeout_s=1.5, group_attempts=2)
    world = World(generation_s=lambda order: 1e9 if order.position == 2 else 0.0)
    status = await run_to_end(temporal, the_plan, world)
    check_batches(the_plan, world)
    terminal = {group: state for order in world.batches.values() for group, state in order.cut.terminal.items()}
    for close in world.closed:
        terminal |= close.terminal
    assert {group for group, state in terminal.items() if state != "trained"} == {group_id(2)}
    assert terminal[group_id(2)] == "dead-lettered" and status.trained == 12


async def test_a_broken_environment_stops_the_run_and_says_why(temporal: Client) -> None:
    with pytest.raises(WorkflowFailureError) as failure:
        await run_to_end(temporal, plan(), World(broken=lambda order: True))
    assert "the environment is broken" in str(failure.value.cause)
    assert "8 groups in a row" in str(failure.value.cause)


async def test_a_step_that_fails_fails_the_run_with_its_reason(temporal: Client) -> None:
    with pytest.raises(WorkflowFailureError) as failure:
        await run_to_end(temporal, plan(), World(failing_step=2))
    assert "step 2" in str(failure.value.cause) and "the trainer says no" in str(failure.value.cause)


async def test_drain_trains_what_is_complete_and_admits_nobody(temporal: Client) -> None:
    the_plan, world = plan(target_steps=1000), World(generation_s=long_tail, training_s=0.05)
    async with workers(temporal, the_plan.run_id, world):
        handle = await start(temporal, the_plan)
        while len(world.batches) < 3:
            await asyncio.sleep(0.05)
        await handle.signal("drain")
        status = await asyncio.wait_for(handle.result(), LIMIT_S)
    assert status.in_flight == 0 and status.waiting < the_plan.groups_per_batch
    assert status.admitted == status.trained + status.waiting
    check_batches(the_plan.model_copy(update={"target_steps": status.version}), world)
    (close,) = world.closed
    assert status.phase == close.how == "drained" and len(close.carried) == status.waiting
    assert world.checkpoints == [status.version], "of the last trained batch"


async def test_pause_admits_nobody_until_unpaused(temporal: Client) -> None:
    the_plan, world = plan(target_steps=4), World(training_s=0.05)
    async with workers(temporal, the_plan.run_id, world):
        handle = await start(temporal, the_plan)
        await handle.signal("pause")
        await asyncio.sleep(1.5)
        before = await handle.query("status", result_type=RunStatus)
        await asyncio.sleep(0.5)
        after = await handle.query("status", result_type=RunStatus)
        assert before.phase == "paused" and before.admitted == after.admitted < 16
        await handle.signal("unpause")
        await asyncio.wait_for(handle.result(), LIMIT_S)
    check_batches(the_plan, world)


async def test_cancelling_the_run_ends_its_steps_and_their_rollouts(temporal: Client) -> None:
    the_plan, world = plan(target_steps=50), World(generation_s=lambda order: 300.0)
    async with workers(temporal, the_plan.run_id, world):
        handle = await start(temporal, the_plan)
        await asyncio.wait_for(world.started.wait(), LIMIT_S)
        await handle.cancel()
        with pytest.raises(WorkflowFailureError):
            await asyncio.wait_for(handle.result(), LIMIT_S)
        open_steps = f'RoadsteadRun = "{the_plan.run_id}" AND ExecutionStatus = "Running"'
        for _ in range(100):
            if not [w async for w in temporal.list_workflows(open_steps)]:
                return
            await asyncio.sleep(0.1)
    pytest.fail("steps are still open 10 s after the run was cancelled")


async def test_cancelling_a_step_fails_the_run_and_says_so(temporal: Client) -> None:
    the_plan, world = plan(target_steps=50), World(generation_s=lambda order: 300.0)
    async with workers(temporal, the_plan.run_id, world):
        handle = await start(temporal, the_plan)
        await asyncio.wait_for(world.started.wait(), LIMIT_S)
        await temporal.get_workflow_handle(step_workflow_id(the_plan.run_id, 0)).cancel()
        with pytest.raises(WorkflowFailureError) as failure:
            await asyncio.wait_for(handle.result(), LIMIT_S)
    assert "step 0: its workflow was cancelled from outside" in str(failure.value.cause)


async def test_stop_publishes_the_step_in_training_and_begins_no_other(temporal: Client) -> None:
    the_plan, world = plan(target_steps=1000), World(generation_s=long_tail, training_s=1.0)
    async with workers(temporal, the_plan.run_id, world):
        handle = await start(temporal, the_plan)
        while len(world.batches) < 3:
            await asyncio.sleep(0.02)
        await handle.signal("stop", 30.0)
        status = await asyncio.wait_for(handle.result(), 15)
    assert status.phase == "stopped" and status.version == 3 == len(world.batches), "not one more"
    check_batches(the_plan.model_copy(update={"target_steps": 3}), world)
    (close,) = world.closed
    assert (close.how, close.version, close.attempt) == ("stopped", 3, 1)
    trained = {entry.group_id for order in world.batches.values() for entry in order.entries}
    assert set(close.carried).isdisjoint(trained) and close.cursor == status.admitted
    assert set(world.generated) >= set(close.carried) | trained


async def test_stop_does_not_wait_past_its_time_for_a_step_that_hangs(temporal: Client) -> None:
    the_plan, world = plan(target_steps=1000), World(training_s=600.0)
    async with workers(temporal, the_plan.run_id, world):
        handle = await start(temporal, the_plan)
        while not world.batches:
            await asyncio.sleep(0.02)
        began = time.monotonic()
        await handle.signal("stop", 2.0)
        status = await asyncio.wait_for(handle.result(), 30)
        assert 1.5 < time.monotonic() - began < 20
    assert (status.phase, status.version) == ("stopped", 0)


def recovered(the_plan: RunPlan, version: int, staged: list[tuple[int, int]], **changes: Any) -> Recovered:
    """staged: (position, oldest version)."""
    groups = tuple(
        StagedGroup(
            group_id=group_id(position),
            attempt=1,
            digest=f"digest-of-{group_id(position)}",
            trajectories=4,
            tokens=40,
            oldest_version=oldest,
            newest_version=oldest,
            mean_reward=0.5,
        )
        for position, oldest in staged
    )
    values = {"attempt": 1, "pending": None, "cursor": version * the_plan.groups_per_batch, "backlog": ()}
    return Recovered(version=version, staged=groups, **{**values, **changes})


@pytest.mark.parametrize("ready", [0, 3, 4, 8, 12])
async def test_a_resumed_run_keeps_staged_groups_and_serves_lost_prompts_again(temporal: Client, ready: int) -> None:
    """ready = 4 is the next batch complete at once: nothing may wait for a finished group to start it."""
    the_plan, world = plan(attempt=2, target_steps=14), World()
    staged = [(40 + i, 10) for i in range(ready)]
    lost = tuple(range(40 + ready, 43 + ready))
    found = recovered(the_plan, 10, staged, cursor=43 + ready, backlog=lost)
    restored = restore(the_plan, found, 4, now=0)
    assert restored.terminal == {} and len(restored.carried) == ready
    async with workers(temporal, the_plan.run_id, world):
        status = await asyncio.wait_for((await start(temporal, restored.state)).result(), LIMIT_S)
    assert status.version == 14 and sorted(world.batches) == [10, 11, 12, 13]
    trained = [entry.group_id for order in world.batches.values() for entry in order.entries]
    assert sorted(trained) == [group_id(position) for position in range(40, 56)], "none skipped, none twice"
    assert {entry.attempt for order in world.batches.values() for entry in order.entries} == ({1, 2} if ready else {2})
    for step, order in world.batches.items():
        assert all(entry.v_traj <= step <= entry.v_traj + the_plan.max_staleness for entry in order.entries)


async def test_a_committed_batch_of_an_earlier_attempt_is_trained_first_and_as_it_is(temporal: Client) -> None:
    the_plan, world = plan(attempt=2, target_steps=12), World()
    commit = BatchCommit(
        run_id=the_plan.run_id,
        attempt=1,
        step=10,
        digest="b",
        data=StoredFile(key="d", bytes=1, sha256="x"),
        stats=StoredFile(key="s", bytes=1, sha256="x"),
        rows=16,
        response_tokens=160,
        max_staleness=1,
        groups=tuple(
            BatchGroup(slot=i, group_id=group_id(40 + i), attempt=1, digest=f"d{i}", v_traj=9) for i in range(4)
        ),
    )
    found = recovered(the_plan, 10, [(44, 10)], pending=commit, cursor=46, backlog=(45,))
    restored = restore(the_plan, found, 4, now=0)
    async with workers(temporal, the_plan.run_id, world):
        await asyncio.wait_for((await start(temporal, restored.state)).result(), LIMIT_S)
    first = world.batches[10]
    assert [(e.group_id, e.digest, e.attempt) for e in first.entries] == [
        (group_id(40 + i), f"d{i}", 1) for i in range(4)
    ]
    assert first.cut.terminal == {group_id(40 + i): "trained" for i in range(4)}
    assert {e.group_id for e in world.batches[11].entries} == {group_id(position) for position in range(44, 48)}


async def test_a_burst_at_resume_fails_the_run_before_anything_is_generated(
    temporal: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The naive counter reset (AReaL #1388): version 40, S = 2, B = 8 opens 344 places instead of 24."""
    granted: dict[Ledger, int] = {}

    def naive(self: Ledger, group: str, version: int | None = None) -> Slot | None:
        """Admission by a counter of accepted groups that starts from zero: (S + version + 1) x B - accepted."""
        accepted = granted.setdefault(self, 0)
        if accepted >= (self.max_staleness + self.version + 1) * self.batch_size:
            return None
        granted[self] += 1
        return Slot(self.version, 0)

    the_plan = plan(attempt=2, target_steps=60, groups_per_batch=8, slots_per_buffer=8)
    state = restore(the_plan, recovered(the_plan, 40, []), 4, now=0).state
    world = World()
    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "reserve", naive)
        async with workers(temporal, the_plan.run_id, world):
            with pytest.raises(WorkflowFailureError) as failure:
                await asyncio.wait_for((await start(temporal, state)).result(), LIMIT_S)
    assert "admits 344 groups at version 40, at most 24" in str(failure.value.cause)
    assert world.generated.total() == 0 and world.batches == {}, "before anything is generated"
    healthy = plan(attempt=2, target_steps=41, groups_per_batch=8, slots_per_buffer=8)
    async with workers(temporal, healthy.run_id, world):
        status = await asyncio.wait_for(
            (await start(temporal, restore(healthy, recovered(healthy, 40, []), 4, now=0).state)).result(), LIMIT_S
        )
    assert (status.version, status.admitted - 320) == (41, 8)


async def test_a_step_terminated_from_outside_is_missed_within_the_look(
    temporal: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_run, "_LOOK", timedelta(seconds=1))
    the_plan, world = plan(target_steps=50), World(generation_s=lambda order: 300.0)
    async with workers(temporal, the_plan.run_id, world):
        handle = await start(temporal, the_plan)
        await asyncio.wait_for(world.started.wait(), LIMIT_S)
        await temporal.get_workflow_handle(step_workflow_id(the_plan.run_id, 0)).terminate("by hand")
        with pytest.raises(WorkflowFailureError) as failure:
            await asyncio.wait_for(handle.result(), 30)
    assert "step 0 is gone: its workflow was terminated from outside" in str(failure.value.cause)
    assert [close.how for close in world.closed] == ["failed"]


async def test_every_history_replays(temporal: Client) -> None:
    """Histories of a run with continue-as-new, failures and lag replay on the current code."""
    the_plan = plan(target_steps=6, steps_per_execution=2)
    await run_to_end(temporal, the_plan, World(generation_s=long_tail, broken=lambda o: o.position % 7 == 3))
    executions = [w async for w in temporal.list_workflows(f'RoadsteadRun = "{the_plan.run_id}"')]
    run_ids = [w async for w in temporal.list_workflows(f'WorkflowId = "{the_plan.run_id}"')]
    replayer = Replayer(
        workflows=[TrainingRun, TrainingStep], workflow_runner=runner(), data_converter=temporal.data_converter
    )
    seen = 0
    for execution in {(w.id, w.run_id) for w in [*executions, *run_ids]}:
        history = await temporal.get_workflow_handle(execution[0], run_id=execution[1]).fetch_history()
        await replayer.replay_workflow(history)
        seen += 1
    assert seen >= 6 + 3, "six steps and three executions of the run"


def test_group_ids_are_positions() -> None:
    assert group_id(42) == "g00000042"

"""One training step as a durable workflow.

Owns: the groups that were admitted under its policy version, until each is delivered or released; and the chain
persist -> train -> publish of the buffer with its number.
Never touches: the ledger, the cursor, the policy version (the run's), token data (S3's).
Invariant: what it trains is what the run announced, once. It closes when its buffer is trained (or the run has
no use for it any more), its version admits nobody any more, and its groups are all accounted for: that may be up to
S steps after its own training.
A crash leaves: its history. Every activity first looks for its own commit marker, so going on from any point
repeats nothing that was committed.
"""

from __future__ import annotations

import asyncio

from temporalio import workflow
from temporalio.common import SearchAttributePair, TypedSearchAttributes
from temporalio.exceptions import ActivityError, ApplicationError, is_cancelled_exception

with workflow.unsafe.imports_passed_through():
    from roadstead.activities.dead_letter import RecordDeadLetter
    from roadstead.activities.occupy import OccupySlot
    from roadstead.activities.persist import PersistBatch
    from roadstead.activities.publish import PublishWeights
    from roadstead.activities.release import ReleaseSlot
    from roadstead.activities.reserve import ReserveSlots
    from roadstead.activities.rollout import RolloutGroup
    from roadstead.activities.train import TrainStep
    from roadstead.storage.references import group_id
    from roadstead.workflows import failures, options, search
    from roadstead.workflows.messages import (
        DISCARDED,
        STEP_WORKFLOW,
        Admission,
        BatchOrder,
        DeadLetterOrder,
        GroupOrder,
        PublishOrder,
        Release,
        StepOrder,
        TrainOrder,
    )


class _Aborted(Exception):
    """The run is ending without this step."""


@workflow.defn(name=STEP_WORKFLOW)
class TrainingStep:
    @workflow.init
    def __init__(self, order: StepOrder) -> None:
        self._plan, self._version = order.plan, order.version
        self._admitted: list[GroupOrder] = []
        self._batch: BatchOrder | None = None
        self._closed = False
        self._aborted = False
        self._deliveries: dict[str, asyncio.Task[None]] = {}
        self._dropped: set[str] = set()

    # -- what the run says --------------------------------------------------------------------------------

    @workflow.signal
    def admit(self, admission: Admission) -> None:
        self._take_in(admission)

    @workflow.signal
    def batch(self, order: BatchOrder) -> None:
        self._batch = order

    @workflow.signal
    def close(self) -> None:
        """The policy moved on: nobody is admitted under this version any more."""
        self._closed = True

    @workflow.signal
    def are_you_there(self) -> None:
        """Nothing to do: a closed workflow can't be signalled, which is the answer."""

    @workflow.signal
    def drop(self, groups: tuple[str, ...]) -> None:
        """The run has discarded these, if they are ours: end their generation."""
        for group in groups:
            if (delivery := self._deliveries.get(group)) is not None:
                self._dropped.add(group)
                delivery.cancel()

    @workflow.signal
    def abort(self) -> None:
        self._aborted = True

    # -- the step -----------------------------------------------------------------------------------------

    @workflow.run
    async def run(self, order: StepOrder) -> None:
        run = workflow.get_external_workflow_handle(self._plan.run_id)
        try:
            async with asyncio.TaskGroup() as tasks:
                watch = tasks.create_task(self._watch_abort())
                training = tasks.create_task(self._train())
                self._take_in(await self._reserve())
                while not (self._closed and not self._admitted):
                    await workflow.wait_condition(lambda: bool(self._admitted) or self._closed or self._aborted)
                    self._go_on()
                    while self._admitted:
                        group = self._admitted.pop(0)
                        self._deliveries[group_id(group.position)] = tasks.create_task(self._deliver(group))
                    self._phase("generating")
                await asyncio.gather(training, *self._deliveries.values())
                watch.cancel()
        except (ExceptionGroup, asyncio.CancelledError) as error:
            # Not in a `finally`: it would also run when an evicted workflow is garbage-collected, in the middle of
            # whatever other workflow runs then, and put its command into that one's history (seen).
            self._phase("closed")
            cause = failures.first(error)
            if not isinstance(cause, _Aborted):
                await run.signal("step_failed", args=[self._version, failures.reason(cause)])
                if is_cancelled_exception(cause):
                    raise asyncio.CancelledError from cause
                raise ApplicationError(f"step {self._version}: {failures.reason(cause)}", type="StepFailed") from cause
        else:
            self._phase("closed")
        await run.signal("step_closed", self._version)

    async def _watch_abort(self) -> None:
        await workflow.wait_condition(lambda: self._aborted)
        raise _Aborted

    def _go_on(self) -> None:
        """Asked after each activity: a cancellation that meets an activity's result in the same turn is lost, because
        the SDK answers with the result (seen: a step that was told to abort waited for ever)."""
        if self._aborted:
            raise _Aborted

    async def _reserve(self) -> Admission:
        return await workflow.execute_activity_method(
            ReserveSlots.reserve_slots, self._version, **options.ledger(self._plan.run_id)
        )

    def _take_in(self, admission: Admission) -> None:
        self._admitted += [
            GroupOrder(
                attempt=self._plan.attempt,
                version=admission.version,
                reserved_at=admission.reserved_at,
                position=position,
            )
            for position in admission.positions
        ]

    async def _deliver(self, group: GroupOrder) -> None:
        """Generate one group and report it; a group that can't be generated gives its slot back."""
        try:
            await self._generate(group)
        except (ActivityError, asyncio.CancelledError) as error:
            if not is_cancelled_exception(error) or group_id(group.position) not in self._dropped:
                raise

    async def _generate(self, group: GroupOrder) -> None:
        plan = self._plan
        try:
            report = await workflow.execute_activity_method(
                RolloutGroup.rollout_group,
                group,
                **options.rollout(plan.run_id, plan.group_timeout_s, plan.group_attempts),
            )
        except ActivityError as error:
            if is_cancelled_exception(error):
                raise
            await self._give_up(group, failures.reason(error))
            return
        self._go_on()
        await workflow.execute_activity_method(OccupySlot.occupy_slot, report, **options.ledger(plan.run_id))

    async def _give_up(self, group: GroupOrder, reason: str) -> None:
        plan, name = self._plan, group_id(group.position)
        discarded = reason.startswith(DISCARDED)
        # Runs that began before there were such records replay without them.
        if not discarded and workflow.patched("dead-letter-record"):
            order = DeadLetterOrder(group=group, attempts=plan.group_attempts, reason=reason)
            try:
                await workflow.execute_activity_method(
                    RecordDeadLetter.record_dead_letter, order, **options.dead_letter(plan.run_id)
                )
            except ActivityError as error:
                if is_cancelled_exception(error):
                    raise
                # Its terminal state comes into the next step record all the same.
                workflow.logger.error(f"{name}: no dead-letter record: {error.cause}")
            self._go_on()
        release = Release(group_id=name, reason=reason, terminal="discarded" if discarded else "dead-lettered")
        await workflow.execute_activity_method(ReleaseSlot.release_slot, release, **options.ledger(plan.run_id))

    async def _train(self) -> None:
        """persist -> train -> publish, in that order; the step record is publish's last act."""
        await workflow.wait_condition(lambda: self._batch is not None or self._closed)
        if self._batch is None:
            return  # drained before this buffer could fill
        run_id, order = self._plan.run_id, self._batch
        self._phase("persisting")
        committed = await workflow.execute_activity_method(PersistBatch.persist_batch, order, **options.store(run_id))
        self._go_on()
        self._phase("training")
        await workflow.execute_activity_method(
            TrainStep.train_step, TrainOrder(step=order.step, digest=committed.digest), **options.train(run_id)
        )
        self._go_on()
        self._phase("publishing")
        summary = await workflow.execute_activity_method(
            PublishWeights.publish_weights,
            PublishOrder(batch=order, committed=committed),
            **options.store(run_id),
        )
        await workflow.get_external_workflow_handle(run_id).signal("step_done", summary)

    def _phase(self, phase: str) -> None:
        workflow.upsert_search_attributes([search.PHASE.value_set(phase)])


def attributes(order: StepOrder) -> TypedSearchAttributes:
    """Search attributes a step starts with."""
    return TypedSearchAttributes(
        [
            SearchAttributePair(search.RUN, order.plan.run_id),
            SearchAttributePair(search.ATTEMPT, order.plan.attempt),
            SearchAttributePair(search.STEP, order.version),
            SearchAttributePair(search.POLICY_VERSION, order.version),
            SearchAttributePair(search.PHASE, "reserving"),
        ]
    )

"""A training run as a durable entity.

Owns: the ledger, the prompt cursor and the policy version; it is their ONLY writer. Opens one TrainingStep a policy
version, and an Evaluation of the versions that are due.
Never touches: token data, engines, the trainer.
Invariant: nothing is admitted that the ledger does not grant, the policy version moves only when a step's weights
are published and its record is written, and every group ends in exactly one terminal state.
A repeated Update is answered from the state and never applied twice: Temporal's own deduplication does not cross
continue-as-new.
A crash leaves: its history, or, when that is lost, the step records.
"""

from __future__ import annotations

import asyncio
import contextlib
from datetime import datetime, timedelta
from typing import Literal

from temporalio import workflow
from temporalio.common import WorkflowIDReusePolicy
from temporalio.exceptions import ActivityError, ApplicationError

with workflow.unsafe.imports_passed_through():
    from roadstead.activities.checkpoint import SaveCheckpoint
    from roadstead.activities.close import CloseAttempt
    from roadstead.staleness import BufferState, GroupState, Ledger, SlotState, TerminalState, UnknownGroup
    from roadstead.storage.references import Cut, Ending, StagedGroup, group_id
    from roadstead.workflows import empty_groups, options, search
    from roadstead.workflows.evaluations import Evaluations
    from roadstead.workflows.messages import (
        EVALUATION_WORKFLOW,
        RUN_WORKFLOW,
        Admission,
        AttemptClose,
        BatchEntry,
        BatchOrder,
        BufferView,
        EvaluationOrder,
        Phase,
        Placement,
        Release,
        RunState,
        RunStatus,
        StepOrder,
        StepSummary,
        evaluation_workflow_id,
        step_workflow_id,
    )
    from roadstead.workflows.stuck_clock import StuckClock
    from roadstead.workflows.training_step import TrainingStep, attributes

# A broken environment or engine fails prompt after prompt without an error anybody sees (AReno #239: 10,729 retries in
# 20 minutes; prime-rl #2459): stop when this many batches' worth failed in a row with not one success.
_DEAD_LETTER_BATCHES = 2
_RECENT = 8
"""Finished steps, and versions' admissions, kept for status; the records of all are on S3."""
_LETTER = {SlotState.OCCUPIED: "O", SlotState.RESERVED: "R", SlotState.EMPTY: "."}
_CLOSE, _CLOSE_STOPPING = timedelta(seconds=60), timedelta(seconds=5)
"""How long an ending run waits for its steps to close; less when it was told to stop by a deadline."""
_LOOK = timedelta(minutes=2)
"""A run that nothing moved for so long asks its steps whether they are still there: nobody tells it when one is
terminated from outside."""


@workflow.defn(name=RUN_WORKFLOW)
class TrainingRun:
    @workflow.init
    def __init__(self, state: RunState) -> None:
        plan = self._plan = state.plan
        self._ledger = (
            Ledger.from_dict(state.ledger)
            if state.ledger
            else Ledger(
                batch_size=plan.groups_per_batch,
                max_staleness=plan.max_staleness,
                slots_per_buffer=plan.slots_per_buffer,
                step_target=plan.target_steps,
            )
        )
        self._cursor = state.cursor
        self._placed = dict(state.placed)
        self._occupied_at = dict(state.occupied_at)
        self._admissions = dict(state.admissions)
        self._open_steps = list(state.open_steps)
        self._terminal = dict(state.terminal)
        self._counts = dict(state.counts)
        self._recent = list(state.recent)
        self._backlog = list(state.backlog)
        self._pending, self._recovered = state.pending, state.recovered
        self._draining, self._paused = state.draining, state.paused
        self._stop_by: datetime | None = None
        self._dead_letters_in_a_row = state.dead_letters_in_a_row
        self._empty = state.empty
        self._evaluations = Evaluations(plan.evaluation, plan.target_steps, state.evaluated, state.open_evaluations)
        self._admitted_under: dict[int, int] = {}
        self._stuck = StuckClock(plan.stuck_timeout_s)
        self._unwanted: list[str] = []
        self._training: int | None = None
        self._done: list[StepSummary] = []
        self._failed: str | None = None
        self._changed = True
        self._steps_here = self._turns = 0

    # -- Updates: from activities -------------------------------------------------------------------------

    @workflow.update
    def reserve(self, version: int) -> Admission:
        """First admission of TrainingStep(version); asked again, the same answer."""
        if version not in self._admissions:
            self._admissions[version] = self._admit(version)
            self._changed = True
        return self._admissions[version]

    @workflow.update
    def occupy(self, report: StagedGroup) -> Placement:
        """A finished group asks for its place."""
        ledger, group = self._ledger, report.group_id
        self._changed = True
        state = self._group_state(group)
        if state is not GroupState.RESERVED:
            place = ledger.where(group)
            return Placement(outcome="placed", buffer=place.buffer) if place else Placement(outcome="late")
        self._note_empty(report)
        self._count("aborted_members", report.aborted_members)
        if report.filtered is not None:
            ledger.discard(group)
            self._end(group, "filtered")
            return Placement(outcome="filtered")
        if ledger.lower(group, report.oldest_version) is None:
            self._end(group, "expired")
            return Placement(outcome="expired")
        slot = ledger.occupy(group)
        if slot is None:
            self._end(group, "discarded")
            return Placement(outcome="surplus")
        self._placed[group] = report
        self._occupied_at[group] = _microseconds()
        self._dead_letters_in_a_row = 0
        self._end_surplus()
        return Placement(outcome="placed", buffer=slot.buffer)

    @workflow.update
    def release(self, release: Release) -> bool:
        """A group that will never finish gives its slot back. False: it had none any more."""
        if self._group_state(release.group_id) is not GroupState.RESERVED:
            return False
        workflow.logger.warning(f"{release.group_id} is {release.terminal}: {release.reason}")
        self._ledger.discard(release.group_id)
        self._end(release.group_id, release.terminal)
        self._changed = True
        if release.terminal != "dead-lettered":
            return True
        self._dead_letters_in_a_row += 1
        if self._dead_letters_in_a_row >= _DEAD_LETTER_BATCHES * self._plan.groups_per_batch:
            self._failed = self._failed or (
                f"{self._dead_letters_in_a_row} groups in a row could not be generated and none could; "
                f"the last one: {release.reason}"
            )
        allowed, total = self._plan.max_dead_letters, self._counts["dead-lettered"]
        if allowed is not None and total > allowed:
            self._failed = self._failed or (
                f"{total} groups of this run could not be generated, rollout.max_dead_letters is {allowed}; "
                f"the last one: {release.reason}"
            )
        return True

    # -- Signals ------------------------------------------------------------------------------------------

    @workflow.signal
    def step_done(self, summary: StepSummary) -> None:
        self._done.append(summary)
        self._changed = True

    @workflow.signal
    def step_failed(self, step: int, reason: str) -> None:
        self._failed = self._failed or f"step {step}: {reason}"
        self._mark_closed(step)

    @workflow.signal
    def step_closed(self, step: int) -> None:
        self._mark_closed(step)

    @workflow.signal
    def evaluation_closed(self, version: int) -> None:
        self._evaluations.end(version)
        self._changed = True

    @workflow.signal
    def drain(self) -> None:
        """Admit nobody any more, finish what is in flight, train every full batch, end."""
        self._draining = self._changed = True

    @workflow.signal
    def stop(self, within_s: float) -> None:
        """Admit nobody, begin no batch, end when the step in training is published, or within_s from now."""
        by = workflow.now() + timedelta(seconds=within_s)
        self._stop_by = by if self._stop_by is None else min(by, self._stop_by)
        self._changed = True

    @workflow.signal
    def pause(self) -> None:
        """Admit nobody until unpaused; what is in flight goes on."""
        self._paused = self._changed = True

    @workflow.signal
    def unpause(self) -> None:
        self._paused, self._changed = False, True

    @workflow.query
    def status(self) -> RunStatus:
        return self._status()

    # -- the loop -----------------------------------------------------------------------------------------

    @workflow.run
    async def run(self, state: RunState) -> RunStatus:
        look = asyncio.create_task(self._look_after_steps())
        try:
            while not self._finished():
                # Cleared before the state is looked at: handlers run at every await below.
                self._changed = False
                self._turns += 1
                await self._open_evaluation()
                await self._open_step()
                self._look_at_the_clock()
                await self._refill()
                await self._announce()
                await self._drop_unwanted()
                await self._wait()
                if workflow.cancellation_reason() is not None:
                    raise asyncio.CancelledError  # the SDK answers a cancelled wait with a result of the same turn
                while self._done and self._failed is None:
                    await self._advance(self._done.pop(0))
                    if self._steps_here >= self._plan.steps_per_execution and not self._finished():
                        await self._continue_as_new()
        except asyncio.CancelledError:
            look.cancel()
            await self._end_attempt("cancelled")
            raise
        look.cancel()
        if self._failed is not None:
            await self._end_attempt("failed")
            raise ApplicationError(self._failed, type="RunFailed", non_retryable=True)
        await self._end_attempt(self._ending())
        await workflow.wait_condition(workflow.all_handlers_finished)
        return self._status()

    async def _wait(self) -> None:
        """Until something changed, or the time to stop, or to give a stuck buffer up, has come."""
        due = min((time for time in (self._stop_by, self._stuck.due) if time is not None), default=None)
        left = None if due is None else max(timedelta(0), due - workflow.now())
        with contextlib.suppress(TimeoutError):
            await workflow.wait_condition(lambda: self._changed, timeout=left)

    def _look_at_the_clock(self) -> None:
        """The STUCK clock: it runs while the trainer waits for a buffer without an Empty slot. On time-out it gives up
        that buffer's unfinished groups, so that finished ones of later buffers move up and others are admitted."""
        ledger, buffer = self._ledger, self._ledger.taken
        idle = self._training is None and self._pending is None and buffer == ledger.version
        stuck = idle and buffer in ledger.buffers and ledger.state(buffer) is BufferState.STUCK
        if not self._stuck.look(workflow.now(), stuck=stuck):
            return
        late = [group for state, group in ledger.slots(buffer) if group and state is SlotState.RESERVED]
        workflow.logger.warning(
            f"buffer {buffer} was stuck for {self._plan.stuck_timeout_s:g} s (rollout.stuck_timeout_s): "
            f"{', '.join(late)} discarded"
        )
        for group in late:
            ledger.discard(group)
            self._end(group, "discarded")
        self._unwanted += late

    async def _look_after_steps(self) -> None:
        """Ask the open steps whether they are there, whenever nothing changed for _LOOK."""
        while True:
            before = self._turns
            await asyncio.sleep(_LOOK.total_seconds())
            if self._turns == before:
                for step in list(self._open_steps):
                    await self._tell_step(step, "are_you_there")
                for version in list(self._evaluations.under_way):
                    await self._tell_evaluation(version, "are_you_there")

    def _finished(self) -> bool:
        ledger = self._ledger
        if self._failed is not None:
            return True
        if ledger.version >= self._plan.target_steps:
            past = self._stop_by is not None and workflow.now() >= self._stop_by
            due = self._stop_by is None and self._evaluations.is_due(ledger.version)
            return past or not (self._evaluations.under_way or due)
        idle = self._training is None and not self._done
        if self._stop_by is not None:
            return idle or workflow.now() >= self._stop_by
        idle = idle and self._pending is None and ledger.in_flight == 0
        ready = ledger.taken in ledger.buffers and ledger.state(ledger.taken) is BufferState.READY
        return self._draining and idle and not ready and not self._evaluations.under_way

    def _ending(self) -> Literal["finished", "drained", "stopped"]:
        """How a run that neither failed nor was cancelled ends."""
        if self._ledger.version >= self._plan.target_steps:
            return "finished"
        return "stopped" if self._stop_by is not None else "drained"

    async def _end_attempt(self, how: Ending) -> None:
        """Close the steps, then put on record what no batch has recorded."""
        for version in list(self._evaluations.under_way):
            await self._tell_evaluation(version, "abort")
        await self._close_steps("close" if how in {"finished", "drained"} else "abort")
        if how == "drained":
            await self._save_checkpoint()
        close = AttemptClose(
            attempt=self._plan.attempt,
            how=how,
            version=self._ledger.version,
            cursor=self._cursor,
            terminal=self._terminal,
            carried=tuple(self._placed),
        )
        try:
            await workflow.execute_activity_method(
                CloseAttempt.close_attempt, close, **options.closing(self._plan.run_id)
            )
        except ActivityError as error:
            # A resume finds the same out from the batches and staged groups; only the reason is lost.
            workflow.logger.error(f"the end of attempt {close.attempt} ({how}) is not on record: {error.cause}")

    async def _save_checkpoint(self) -> None:
        """A drain ends wherever it ends: the interval knows nothing of it, the target has its own checkpoint."""
        try:
            await workflow.execute_activity_method(
                SaveCheckpoint.save_checkpoint, self._ledger.version, **options.checkpoint(self._plan.run_id)
            )
        except ActivityError as error:
            workflow.logger.error(f"no checkpoint of version {self._ledger.version}: {error.cause}; a resume replays")

    async def _open_evaluation(self) -> None:
        version, plan, evaluation = self._ledger.version, self._plan, self._plan.evaluation
        if evaluation is None or self._stop_by is not None or not self._evaluations.is_due(version):
            return
        self._evaluations.begin(version)
        order = EvaluationOrder(
            run_id=plan.run_id,
            attempt=plan.attempt,
            version=version,
            prompts=evaluation.prompts,
            timeout_s=evaluation.timeout_s,
            group_attempts=plan.group_attempts,
        )
        await workflow.start_child_workflow(
            EVALUATION_WORKFLOW,
            order,
            id=evaluation_workflow_id(plan.run_id, version),
            task_queue=options.queue(plan.run_id, "orchestrator"),
            # As a step, it outlives this execution, and may have been begun by an earlier attempt.
            parent_close_policy=workflow.ParentClosePolicy.ABANDON,
            id_reuse_policy=WorkflowIDReusePolicy.ALLOW_DUPLICATE,
        )

    async def _open_step(self) -> None:
        version = self._ledger.version
        if version in self._open_steps or version in self._admissions or version >= self._plan.target_steps:
            return
        self._open_steps.append(version)
        order = StepOrder(plan=self._plan, version=version)
        await workflow.start_child_workflow(
            TrainingStep.run,
            order,
            id=step_workflow_id(self._plan.run_id, version),
            task_queue=options.queue(self._plan.run_id, "orchestrator"),
            # A step outlives this execution: only ABANDON survives the parent's continue-as-new (measured).
            parent_close_policy=workflow.ParentClosePolicy.ABANDON,
            # An earlier attempt's step may have closed under this id; `resume` has seen to it that none is open.
            id_reuse_policy=WorkflowIDReusePolicy.ALLOW_DUPLICATE,
            search_attributes=attributes(order),
        )
        workflow.upsert_search_attributes([search.POLICY_VERSION.value_set(version)])

    async def _refill(self) -> None:
        """Admit up to capacity at once, under the current version, once its step has its first admission."""
        version = self._ledger.version
        if version in self._admissions and (admission := self._admit(version)).positions:
            await self._tell_step(version, "admit", admission)

    async def _announce(self) -> None:
        """Hand the current buffer to its step when it is READY and the trainer is free."""
        ledger = self._ledger
        if self._training is not None or ledger.version not in self._open_steps or self._stop_by is not None:
            return
        order = self._pending or self._take()
        if order is not None:
            self._pending = None
            self._training = order.step
            await self._tell_step(order.step, "batch", order)

    def _take(self) -> BatchOrder | None:
        ledger, entries = self._ledger, []
        ages = {group: ledger.version_of(group) for group in self._placed}
        groups = ledger.take()
        if groups is None:
            return None
        self._end_surplus()
        learnable = False
        for slot, group in enumerate(groups):
            report = self._placed.pop(group)
            learnable = learnable or report.trainable
            entries.append(
                BatchEntry(
                    slot=slot,
                    group_id=group,
                    attempt=report.attempt,
                    digest=report.digest,
                    v_traj=ages[group],
                    occupied_at=self._occupied_at.pop(group),
                )
            )
            self._end(group, "trained")
        self._count("empty_batches", not learnable)
        terminal, self._terminal = self._terminal, {}
        return BatchOrder(
            step=ledger.version,
            attempt=self._plan.attempt,
            max_staleness=self._plan.max_staleness,
            entries=tuple(entries),
            cut=Cut(cursor=self._cursor, backlog=tuple(self._backlog), ledger=ledger.to_dict(), terminal=terminal),
        )

    async def _advance(self, summary: StepSummary) -> None:
        """A step is published: the policy version and the window move."""
        if summary.step != self._training:
            return  # a repeated signal
        self._training = None
        self._ledger.publish(summary.step + 1)
        self._steps_here += 1
        self._recent = [*self._recent, summary][-_RECENT:]
        self._count("max_staleness", max(0, summary.max_staleness - self._counts.get("max_staleness", 0)))
        self._admissions = {v: a for v, a in self._admissions.items() if v in self._open_steps}
        await self._tell_step(summary.step, "close")
        self._changed = True

    async def _continue_as_new(self) -> None:
        await self._drop_unwanted()
        await workflow.wait_condition(workflow.all_handlers_finished)
        if self._done or self._stop_by is not None:
            return  # a step finished meanwhile and its signal must not be lost, or the end is near anyway
        workflow.continue_as_new(
            RunState(
                plan=self._plan,
                ledger=self._ledger.to_dict(),
                cursor=self._cursor,
                placed=self._placed,
                occupied_at=self._occupied_at,
                admissions=self._admissions,
                open_steps=tuple(self._open_steps),
                terminal=self._terminal,
                counts=self._counts,
                recent=tuple(self._recent),
                draining=self._draining,
                paused=self._paused,
                dead_letters_in_a_row=self._dead_letters_in_a_row,
                empty=self._empty,
                evaluated=self._evaluations.looked_at,
                open_evaluations=tuple(self._evaluations.under_way),
                backlog=tuple(self._backlog),
            )
        )

    async def _close_steps(self, how: str) -> None:
        """Tell every open step to end and wait for them, in a bounded time."""
        for step in list(self._open_steps):
            await self._tell_step(step, how)
        limit = _CLOSE if self._stop_by is None else _CLOSE_STOPPING
        try:
            await workflow.wait_condition(lambda: not self._open_steps, timeout=limit)
        except TimeoutError:
            workflow.logger.error(f"steps {self._open_steps} did not close within {limit}; they end on their own")

    # -- helpers ------------------------------------------------------------------------------------------

    def _admit(self, version: int) -> Admission:
        positions: list[int] = []
        ledger, limit = self._ledger, self._plan.max_groups_in_flight
        shut = self._draining or self._paused or self._stop_by is not None or self._failed
        while version == ledger.version and not shut and (limit is None or ledger.in_flight < limit):
            position = self._backlog[0] if self._backlog else self._cursor
            if ledger.reserve(group_id(position)) is None:
                break
            positions.append(position)
            if self._backlog:
                self._backlog.pop(0)
            else:
                self._cursor += 1
        if self._recovered and positions:
            self._recovered = False
            if not self._proved(positions):
                return Admission(version=version, reserved_at=_microseconds(), positions=())
        self._count("admitted", len(positions))
        if positions:
            counted = {**self._admitted_under, version: self._admitted_under.get(version, 0) + len(positions)}
            self._admitted_under = dict(list(counted.items())[-_RECENT:])
        return Admission(version=version, reserved_at=_microseconds(), positions=tuple(positions))

    def _proved(self, positions: list[int]) -> bool:
        """The first admission after a resume, counted without the ledger: what admission counters reset by a resume
        let through (AReaL #1388: 344 groups instead of 24 at version 40, S = 2, B = 8) fails the run here."""
        plan = self._plan
        training = plan.groups_per_batch if self._training is not None or self._pending is not None else 0
        allowed = (plan.max_staleness + 1) * plan.slots_per_buffer - len(self._placed) - training
        if len(positions) <= allowed:
            return True
        self._failed = (
            f"resume: the ledger admits {len(positions)} groups at version {self._ledger.version}, at most {allowed} "
            f"keep max_staleness {plan.max_staleness}; nothing was generated. This is a bug: keep the run's records"
        )
        return False

    async def _tell_step(self, step: int, signal: str, *arguments: object) -> None:
        handle = workflow.get_external_workflow_handle(step_workflow_id(self._plan.run_id, step))
        try:
            await handle.signal(signal, args=list(arguments))
        except ApplicationError as error:
            if error.type != "ExternalWorkflowExecutionNotFound":
                raise
            # It closed (failed, cancelled, terminated) under us. A step that was only to end may have.
            if signal not in {"close", "abort"} and step in self._open_steps:
                self._failed = self._failed or f"step {step} is gone: its workflow was terminated from outside"
            self._mark_closed(step)

    async def _tell_evaluation(self, version: int, signal: str) -> None:
        name = evaluation_workflow_id(self._plan.run_id, version)
        try:
            await workflow.get_external_workflow_handle(name).signal(signal)
        except ApplicationError as error:
            if error.type != "ExternalWorkflowExecutionNotFound":
                raise
            self.evaluation_closed(version)

    async def _drop_unwanted(self) -> None:
        """Nobody waits for these groups any more: their steps end their generation, in the engine too."""
        unwanted, self._unwanted = tuple(self._unwanted), []
        # Runs that began before their steps knew `drop` replay without it: there such groups are answered "late".
        if not unwanted or not workflow.patched("drop-unwanted"):
            return
        for step in list(self._open_steps):
            await self._tell_step(step, "drop", unwanted)

    def _note_empty(self, report: StagedGroup) -> None:
        self._empty = empty_groups.count(self._empty, report, self._ledger.version)
        reason = empty_groups.verdict(self._empty, self._plan.groups_per_batch, self._plan.empty_batches)
        self._failed = self._failed or reason

    def _group_state(self, group: str) -> GroupState:
        try:
            return self._ledger.group_state(group)
        except UnknownGroup as error:
            # Anything but an ApplicationError in a handler would wedge the workflow task for ever.
            raise ApplicationError(str(error), type="UnknownGroup", non_retryable=True) from error

    def _end_surplus(self) -> None:
        """Over-sampled groups that no buffer can use any more."""
        for group in self._ledger.collect_surplus():
            self._end(group, "discarded")
            self._unwanted.append(group)

    def _end(self, group: str, terminal: TerminalState) -> None:
        self._terminal[group] = terminal
        self._count(terminal, 1)

    def _count(self, name: str, by: int) -> None:
        self._counts[name] = self._counts.get(name, 0) + by

    def _mark_closed(self, step: int) -> None:
        if step in self._open_steps:
            self._open_steps.remove(step)
        self._changed = True

    def _phase(self) -> Phase:
        if self._failed is not None:
            return "failed"
        if self._finished():
            return self._ending()
        if self._stop_by is not None:
            return "stopping"
        return "draining" if self._draining else "paused" if self._paused else "running"

    def _status(self) -> RunStatus:
        ledger, counts = self._ledger, self._counts
        return RunStatus(
            run_id=self._plan.run_id,
            attempt=self._plan.attempt,
            phase=self._phase(),
            version=ledger.version,
            target_steps=self._plan.target_steps,
            training=self._training,
            in_flight=ledger.in_flight,
            waiting=len(self._placed),
            admitted=counts.get("admitted", 0),
            trained=counts.get("trained", 0),
            filtered=counts.get("filtered", 0),
            discarded=counts.get("discarded", 0),
            expired=counts.get("expired", 0),
            dead_lettered=counts.get("dead-lettered", 0),
            aborted_members=counts.get("aborted_members", 0),
            empty_batches=counts.get("empty_batches", 0),
            empty_groups=self._empty.count,
            evaluating=tuple(self._evaluations.under_way),
            # A moment, not a duration: between two workflow tasks the workflow's clock stands still.
            stuck_since=None if self._stuck.since is None else _microseconds(self._stuck.since),
            admissions=tuple(self._admitted_under.items()),
            capacity=(self._plan.max_staleness + 1) * self._plan.slots_per_buffer,
            max_staleness=counts.get("max_staleness", 0),
            window=tuple(
                BufferView(
                    buffer=buffer,
                    state=ledger.state(buffer).value,
                    slots="".join(_LETTER[state] for state, _ in ledger.slots(buffer)),
                )
                for buffer in ledger.buffers
            ),
            recent=tuple(self._recent),
        )


def _microseconds(moment: datetime | None = None) -> int:
    """UTC, since the epoch. moment: now, by default."""
    return int((moment or workflow.now()).timestamp() * 1_000_000)

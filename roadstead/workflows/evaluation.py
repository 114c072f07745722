"""The evaluation of one policy version as a durable workflow, beside the run and its steps.

Owns: the orders of one evaluation, and the word to the run that it is over. Never touches: the ledger, steps, samples
(S3's), the versions that engines serve.
Invariant: however it ends, the run is told, once its last act is done; it never fails the run. It ends within a bounded
time: timeout_s for an engine to serve the version, timeout_s for the samples, then the summary. Aborted, or cancelled
from outside, it leaves no summary, so that a later attempt can begin it again.
A crash leaves: its history. Every activity first looks for its own object, so going on from any point generates nothing
twice.
"""

from __future__ import annotations

import asyncio

from temporalio import workflow
from temporalio.exceptions import (
    ActivityError,
    ApplicationError,
    TimeoutError,
    TimeoutType,
    is_cancelled_exception,
)

with workflow.unsafe.imports_passed_through():
    from roadstead.activities.close_evaluation import CloseEvaluation
    from roadstead.activities.evaluate import Evaluate
    from roadstead.workflows import failures, options, search
    from roadstead.workflows.evaluation_messages import EvaluationClose, EvaluationGroupOrder
    from roadstead.workflows.messages import EVALUATION_WORKFLOW, EvaluationOrder

# An order is a prompt, up to so many prompts; beyond, each gets several. Temporal holds 2,000 open activities a
# workflow and ends one at 51,200 events: 10,000 prompts must not come near either.
_ORDERS = 256
_REASON_CHARS = 400
"""All orders' reasons travel in one message, of which Temporal takes 2 MiB."""


class _Aborted(Exception):
    """The run is ending without this evaluation."""


@workflow.defn(name=EVALUATION_WORKFLOW)
class Evaluation:
    @workflow.init
    def __init__(self, order: EvaluationOrder) -> None:
        self._order = order
        self._aborted = False

    @workflow.signal
    def abort(self) -> None:
        self._aborted = True

    @workflow.signal
    def are_you_there(self) -> None:
        """Nothing to do: a closed workflow can't be signalled, which is the answer."""

    @workflow.run
    async def run(self, order: EvaluationOrder) -> None:
        workflow.upsert_search_attributes(
            [
                search.RUN.value_set(order.run_id),
                search.ATTEMPT.value_set(order.attempt),
                search.POLICY_VERSION.value_set(order.version),
            ]
        )
        try:
            async with asyncio.TaskGroup() as tasks:
                watch = tasks.create_task(self._watch_abort())
                await self._evaluate()
                watch.cancel()
        except (ExceptionGroup, asyncio.CancelledError) as error:
            # Not in a `finally`, for the reason that TrainingStep gives.
            await self._tell_run()
            cause = failures.first(error)
            if isinstance(cause, _Aborted):
                return
            if is_cancelled_exception(cause):
                raise asyncio.CancelledError from cause
            reason = f"evaluation of version {order.version}: {failures.reason(cause)}"
            raise ApplicationError(reason, type="EvaluationFailed", non_retryable=True) from cause
        await self._tell_run()

    async def _evaluate(self) -> None:
        order = self._order
        self._phase("waiting")
        failed: dict[int, str] = {}
        skipped, began = None, workflow.now()
        share = max(1, -(-order.prompts // _ORDERS))
        try:
            begin = await workflow.execute_activity_method(
                Evaluate.open_evaluation, order, **options.opening(order.run_id, order.timeout_s)
            )
            if not begin:
                return  # it is on record from an earlier execution
        except ActivityError as error:
            skipped = self._why(error)
        self._go_on()
        if skipped is None:
            self._phase("evaluating")
            began = workflow.now()
            firsts = range(0, order.prompts, share)
            told = await asyncio.gather(*(self._prompts(first, share) for first in firsts))
            failed = {first: why for first, why in zip(firsts, told, strict=True) if why is not None}
            self._go_on()
        self._phase("closing")
        close = EvaluationClose(
            evaluation=order,
            failures=failed,
            share=share,
            skipped=skipped,
            seconds=(workflow.now() - began).total_seconds(),
        )
        await workflow.execute_activity_method(CloseEvaluation.close_evaluation, close, **options.store(order.run_id))

    async def _prompts(self, first: int, share: int) -> str | None:
        """Have some prompts evaluated; why they were not, if so."""
        order = self._order
        group = EvaluationGroupOrder(evaluation=order, first=first, count=min(share, order.prompts - first))
        try:
            await workflow.execute_activity_method(
                Evaluate.evaluate_group,
                group,
                **options.evaluating(order.run_id, order.timeout_s, order.group_attempts),
            )
        except ActivityError as error:
            return self._why(error)
        return None

    def _why(self, error: ActivityError) -> str:
        """In words. Raises a cancellation on."""
        if is_cancelled_exception(error):
            raise error
        out_of_time = {TimeoutType.SCHEDULE_TO_CLOSE, TimeoutType.START_TO_CLOSE, TimeoutType.SCHEDULE_TO_START}
        if isinstance(error.cause, TimeoutError) and error.cause.type in out_of_time:
            last = f"; before that: {failures.reason(error.cause.cause)}" if error.cause.cause else ""
            return f"not finished within evaluation.timeout_s: {self._order.timeout_s:g} s{last}"[:_REASON_CHARS]
        return failures.reason(error)[:_REASON_CHARS]

    async def _watch_abort(self) -> None:
        await workflow.wait_condition(lambda: self._aborted)
        raise _Aborted

    def _go_on(self) -> None:
        """Asked after activities: a cancellation that meets their results in the same turn is lost (TrainingStep)."""
        if self._aborted:
            raise _Aborted

    async def _tell_run(self) -> None:
        self._phase("closed")
        run = workflow.get_external_workflow_handle(self._order.run_id)
        try:
            await run.signal("evaluation_closed", self._order.version)
        except ApplicationError as error:
            if error.type != "ExternalWorkflowExecutionNotFound":
                raise
            # The run has ended and asks nobody any more.

    def _phase(self, phase: str) -> None:
        workflow.upsert_search_attributes([search.PHASE.value_set(phase)])

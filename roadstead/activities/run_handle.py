"""The bridge from an activity to the run's Updates.

Owns: how an Update is sent and what a missing run means. Never touches: the ledger itself.
Invariant: Updates are keyed by business id, so that a retry within one execution joins the first; across
continue-as-new the run answers a repeat from its state.
"""

from __future__ import annotations

from typing import Any, TypeVar

from temporalio.client import Client, WorkflowUpdateFailedError
from temporalio.exceptions import ApplicationError
from temporalio.service import RPCError, RPCStatusCode

T = TypeVar("T")


class RunHandle:
    def __init__(self, client: Client, run_id: str) -> None:
        self._handle = client.get_workflow_handle(run_id)
        self._run_id = run_id

    async def update(self, name: str, argument: Any, key: str, result: type[T]) -> T:
        """Send one Update and wait for its answer.

        Raises ApplicationError: type RunGone (final) when the run is not running, or the run's own refusal.
        """
        try:
            answer: T = await self._handle.execute_update(name, argument, id=key, result_type=result)
        except RPCError as error:
            if error.status == RPCStatusCode.NOT_FOUND:
                raise ApplicationError(
                    f"run {self._run_id!r} is not running; nobody can take {key}", type="RunGone", non_retryable=True
                ) from error
            raise
        except WorkflowUpdateFailedError as error:
            if isinstance(error.cause, ApplicationError):
                raise error.cause from error
            raise
        return answer

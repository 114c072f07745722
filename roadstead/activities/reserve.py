"""reserve_slots: asks the run which groups a step may start with."""

from __future__ import annotations

from temporalio import activity

from roadstead.activities.run_handle import RunHandle
from roadstead.workflows.messages import Admission


class ReserveSlots:
    def __init__(self, run: RunHandle) -> None:
        self._run = run

    @activity.defn
    async def reserve_slots(self, version: int) -> Admission:
        return await self._run.update("reserve", version, f"reserve-{version}", Admission)

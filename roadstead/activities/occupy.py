"""occupy_slot: reports a finished, staged group; the ledger places it."""

from __future__ import annotations

from temporalio import activity

from roadstead.activities.run_handle import RunHandle
from roadstead.storage.references import StagedGroup
from roadstead.workflows.messages import Placement


class OccupySlot:
    def __init__(self, run: RunHandle) -> None:
        self._run = run

    @activity.defn
    async def occupy_slot(self, report: StagedGroup) -> Placement:
        placement = await self._run.update("occupy", report, f"occupy-{report.group_id}", Placement)
        if placement.outcome not in {"placed", "filtered"}:  # filters are there to be used
            activity.logger.warning(f"{report.group_id} was not placed: {placement.outcome}")
        return placement

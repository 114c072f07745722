"""release_slot: gives back the slot of a group that will never finish."""

from __future__ import annotations

from temporalio import activity

from roadstead.activities.run_handle import RunHandle
from roadstead.workflows.messages import Release


class ReleaseSlot:
    def __init__(self, run: RunHandle) -> None:
        self._run = run

    @activity.defn
    async def release_slot(self, release: Release) -> bool:
        return await self._run.update("release", release, f"release-{release.group_id}", bool)

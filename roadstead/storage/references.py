"""References to stored objects that travel through workflows: small, and free of heavy imports."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class StagedGroup(BaseModel):
    """A finished group on S3: what the ledger needs to place it, and what proves it."""

    model_config = ConfigDict(frozen=True)

    group_id: str
    attempt: int
    digest: str
    """Canonical digest of the staged table."""
    trajectories: int
    tokens: int
    """Response tokens, all members."""
    oldest_version: int
    newest_version: int
    mean_reward: float | None

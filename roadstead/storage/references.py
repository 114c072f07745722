"""What the log and the workflows both speak of: small, and free of heavy imports."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from roadstead.staleness import TerminalState

Ending = Literal["finished", "drained", "stopped", "failed", "cancelled"]
"""How an attempt ends in order."""


def group_id(position: int) -> str:
    """A group is named by the cursor position of its prompt: unique over a run, the same after any resume."""
    return f"g{position:08d}"


def position_of(group: str) -> int:
    return int(group.removeprefix("g"))


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
    filtered: str | None = None
    """Why a filter keeps it out of training; it is recorded all the same."""
    trainable: bool = True
    """False: no member has an advantage, so there is nothing to learn from it."""
    note: str | None = None
    """Why it is not trainable, in words: "reward constant 0.0", "no reward: <the reason>"."""
    aborted_members: int = 0
    """Members that were started beyond the group, to be the first to finish, and were not."""


class Cut(BaseModel):
    """The run at the moment when a batch was taken: what a later attempt starts from when Temporal has forgotten it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    cursor: int
    """Prompts drawn from the dataset so far."""
    backlog: tuple[int, ...] = ()
    """Positions below the cursor that wait to be admitted (again)."""
    ledger: dict[str, Any]
    """Ledger after the take: the groups that it holds are the only ones below the cursor without a terminal state,
    but for the backlog."""
    terminal: dict[str, TerminalState]
    """Groups that reached their terminal state since the previous cut; the batch's own are "trained"."""

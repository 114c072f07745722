"""What a run came to, from S3 alone.

Invariant: every number is read from step records and batch commits; none from a counter of a live process.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from roadstead.storage import batches, runs, steps
from roadstead.storage.keys import RunKeys
from roadstead.storage.objects import ObjectStore

WINDOW = 5
"""Steps averaged at each end of a run."""


@dataclass(frozen=True)
class Summary:
    run_id: str
    location: str
    steps: int
    target_steps: int
    admitted: int
    """Prompts drawn when the last recorded batch was taken."""
    trained_groups: int
    other_terminal: dict[str, int]
    """Groups by terminal state other than trained."""
    trained_trajectories: int
    response_tokens: int
    reward_first: float | None
    """Mean reward of the first WINDOW steps."""
    reward_last: float | None
    max_staleness: int | None
    """Largest staleness of any trained row."""
    staleness_bound: int
    skipped_updates: int
    """Steps whose gradient was not finite."""

    @property
    def left(self) -> int:
        """Admitted groups that reached no terminal state."""
        return self.admitted - self.trained_groups - sum(self.other_terminal.values())

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "left": self.left}


def summarize(store: ObjectStore, keys: RunKeys) -> Summary:
    """Raises ObjectMissing when there is no such run, ObjectCorrupt when a record can't be read."""
    config = runs.current_config(store, keys)
    records = steps.all_of(store, keys)
    commits = [batches.find(store, keys, record.step) for record in records]
    terminal: dict[str, int] = {}
    for record in records:
        for state in record.terminal.values():
            terminal[state] = terminal.get(state, 0) + 1
    rewards = [record.mean_reward for record in records if record.mean_reward is not None]
    return Summary(
        run_id=keys.run_id,
        location=store.url(keys.root),
        steps=len(records),
        target_steps=int(config["training"]["steps"]),
        admitted=records[-1].cursor if records else 0,
        trained_groups=terminal.pop("trained", 0),
        other_terminal=terminal,
        trained_trajectories=sum(commit.rows for commit in commits if commit),
        response_tokens=sum(commit.response_tokens for commit in commits if commit),
        reward_first=_mean(rewards[:WINDOW]),
        reward_last=_mean(rewards[-WINDOW:]),
        max_staleness=max((commit.max_staleness for commit in commits if commit), default=None),
        staleness_bound=int(config["staleness"]["max_staleness"]),
        skipped_updates=sum(record.metrics.not_finite for record in records),
    )


def summary_table(summary: Summary) -> Table:
    table = Table(title=f"run {summary.run_id}", show_header=False, title_justify="left")
    table.add_column()
    table.add_column(overflow="fold")
    others = ", ".join(f"{count} {state}" for state, count in sorted(summary.other_terminal.items()))
    table.add_row("steps", f"{summary.steps} of {summary.target_steps}")
    table.add_row("trained trajectories", f"{summary.trained_trajectories} ({summary.response_tokens} tokens)")
    table.add_row(
        f"reward, first {WINDOW} -> last {WINDOW} steps",
        f"{_number(summary.reward_first)} -> {_number(summary.reward_last)}",
    )
    table.add_row("staleness", f"max {summary.max_staleness}, bound {summary.staleness_bound}")
    table.add_row(
        "groups",
        f"{summary.admitted} admitted = {summary.trained_groups} trained + {others or '0 filtered or dropped'}"
        f" + {summary.left} left",
    )
    if summary.skipped_updates:
        table.add_row("skipped updates", f"{summary.skipped_updates} (gradient not finite)")
    table.add_row("data", summary.location)
    return table


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"

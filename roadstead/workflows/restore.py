"""The state of a run rebuilt from what S3 holds of it.

Owns: the new attempt's ledger, its backlog, and the verdict on every staged group. Never touches: S3, Temporal, clocks.
Invariant: what is rebuilt keeps the bound by the ledger's own rules: staged groups are admitted under their oldest
version and placed like any others, the oldest first. A group without a legal place ends here, with its reason.
"""

from __future__ import annotations

from dataclasses import dataclass

from roadstead.staleness import Ledger, TerminalState
from roadstead.storage.batches import BatchCommit
from roadstead.storage.objects import ObjectCorrupt
from roadstead.storage.recovery import Recovered
from roadstead.storage.references import Cut, StagedGroup, position_of
from roadstead.workflows.messages import BatchEntry, BatchOrder, RunPlan, RunState


@dataclass(frozen=True)
class Restored:
    state: RunState
    carried: tuple[StagedGroup, ...]
    """Staged groups that keep a place."""
    terminal: dict[str, TerminalState]
    """Staged groups that have none: filtered, expired, or discarded because bound, target or group size changed."""


def restore(plan: RunPlan, found: Recovered, group_size: int, now: int) -> Restored:
    """The input of the new attempt's workflow. now: UTC microseconds, stamped on groups that are placed again.

    Raises ObjectCorrupt when the committed batch contradicts the log's version.
    """
    ledger = Ledger(
        batch_size=plan.groups_per_batch,
        max_staleness=plan.max_staleness,
        slots_per_buffer=plan.slots_per_buffer,
        version=found.version,
        step_target=plan.target_steps,
    )
    if found.pending is not None:
        _take_again(ledger, found.pending)
    terminal: dict[str, TerminalState] = {}
    placed: dict[str, StagedGroup] = {}
    # Earliest deadline first: a young group never takes the only place that an old one has.
    for group in sorted(found.staged, key=lambda g: (g.oldest_version, position_of(g.group_id))):
        if group.filtered is not None:
            terminal[group.group_id] = "filtered"
        elif group.oldest_version + plan.max_staleness < ledger.taken:
            terminal[group.group_id] = "expired"
        elif group.trajectories != group_size or not _place(ledger, group):
            terminal[group.group_id] = "discarded"
        else:
            placed[group.group_id] = group
    order = None if found.pending is None else _order(plan, found, found.pending, ledger)
    held = order is not None
    state = RunState(
        plan=plan,
        ledger=ledger.to_dict(),
        cursor=found.cursor,
        backlog=found.backlog,
        placed=placed,
        occupied_at=dict.fromkeys(placed, now),
        counts={
            "admitted": found.cursor - len(found.backlog),
            "trained": (found.version + held) * plan.groups_per_batch,
        },
        evaluated=found.version - 1,
        pending=order,
        recovered=True,
    )
    return Restored(state=state, carried=tuple(placed.values()), terminal=terminal)


def _place(ledger: Ledger, group: StagedGroup) -> bool:
    return ledger.reserve(group.group_id, group.oldest_version) is not None and (
        ledger.occupy(group.group_id) is not None
    )


def _take_again(ledger: Ledger, commit: BatchCommit) -> None:
    """The committed batch is trained as it is, whatever the bound has become since: it was legal when committed."""
    bound = ledger.max_staleness
    ledger.set_max_staleness(max(bound, commit.max_staleness, *(commit.step - g.v_traj for g in commit.groups)))
    for group in commit.groups:
        ledger.reserve(group.group_id, group.v_traj)
        ledger.occupy(group.group_id)
    taken = ledger.take()
    if taken is None or set(taken) != {group.group_id for group in commit.groups}:
        raise ObjectCorrupt(
            f"step {commit.step}: its committed batch has {len(commit.groups)} groups where the run's "
            f"groups_per_batch is {ledger.batch_size}; resume with the groups_per_batch of that batch, "
            "drain, then change it"
        )
    ledger.set_max_staleness(bound)


def _order(plan: RunPlan, found: Recovered, commit: BatchCommit, ledger: Ledger) -> BatchOrder:
    entries = tuple(
        BatchEntry(
            slot=group.slot,
            group_id=group.group_id,
            attempt=group.attempt,
            digest=group.digest,
            v_traj=group.v_traj,
            # Only the commit is read from here on; its rows have the time at which each group was placed.
            occupied_at=0,
        )
        for group in commit.groups
    )
    return BatchOrder(
        step=commit.step,
        attempt=plan.attempt,
        max_staleness=max(plan.max_staleness, commit.max_staleness),
        entries=entries,
        cut=commit.cut
        or Cut(
            cursor=found.cursor,
            backlog=found.backlog,
            ledger=ledger.to_dict(),
            terminal={group.group_id: "trained" for group in commit.groups},
        ),
    )

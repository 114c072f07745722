"""What workflows, activities and clients say to each other.

Owns: every payload that crosses Temporal. Never touches: anything else.
Invariant: payloads are references and counts. Token data travels as S3 keys and digests; the largest message, a
batch order, grows by about 150 bytes a group.
Times are UTC microseconds since the epoch.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from roadstead.staleness import TerminalState
from roadstead.storage.references import Cut, Ending, StagedGroup

RUN_WORKFLOW = "TrainingRun"
STEP_WORKFLOW = "TrainingStep"
EVALUATION_WORKFLOW = "Evaluation"
DISCARDED = "GroupDiscarded"
"""Error type of a rollout whose group is given up without a retry, as `rollout.on_timeout: discard` asks."""


class Message(BaseModel):
    model_config = ConfigDict(frozen=True)


def step_workflow_id(run_id: str, step: int) -> str:
    return f"{run_id}/step/{step}"


def evaluation_workflow_id(run_id: str, version: int) -> str:
    return f"{run_id}/eval/{version}"


class EvaluationPlan(Message):
    every: int
    """Versions between evaluations."""
    prompts: int
    timeout_s: float


class RunPlan(Message):
    """The part of a run's configuration that its workflows decide by."""

    run_id: str
    attempt: int
    target_steps: int
    groups_per_batch: int
    max_staleness: int
    slots_per_buffer: int
    max_groups_in_flight: int | None
    group_timeout_s: float
    group_attempts: int
    stuck_timeout_s: float | None = None
    max_dead_letters: int | None = None
    empty_batches: int = 3
    evaluation: EvaluationPlan | None = None
    steps_per_execution: int = 50
    """Continue-as-new after so many steps: half of where Temporal suggests it at 16 groups a step (measured)."""


class Admission(Message):
    """Groups admitted under one policy version, by cursor position."""

    version: int
    reserved_at: int
    positions: tuple[int, ...]


class GroupOrder(Message):
    """One group to generate."""

    attempt: int
    version: int
    """Policy version of the admission; no token may be older."""
    reserved_at: int
    position: int


class Placement(Message):
    """The ledger's answer to a finished group."""

    outcome: Literal["placed", "filtered", "surplus", "expired", "late"]
    """filtered: a filter keeps it out of training; surplus: no buffer can use it any more; expired: too old for every
    open buffer; late: it was dropped before."""
    buffer: int | None = None


class Release(Message):
    """A group that will never finish."""

    group_id: str
    reason: str
    terminal: Literal["dead-lettered", "discarded"] = "dead-lettered"


class DeadLetterOrder(Message):
    """What is put on record of a group that could not be generated."""

    group: GroupOrder
    attempts: int
    reason: str


class BatchEntry(Message):
    slot: int
    group_id: str
    attempt: int
    digest: str
    v_traj: int
    occupied_at: int


class BatchOrder(Message):
    """Exactly what buffer `step` is; decided once, in the run's deterministic state."""

    step: int
    attempt: int
    max_staleness: int
    entries: tuple[BatchEntry, ...]
    cut: Cut


class CommittedBatch(Message):
    """What persist_batch made of an order."""

    step: int
    digest: str
    rows: int
    response_tokens: int
    max_staleness: int
    mean_reward: float | None


class TrainOrder(Message):
    step: int
    digest: str


class TrainedStep(Message):
    step: int
    weights_digest: str
    loss: float
    grad_norm: float | None
    applied: bool
    seconds: dict[str, float]


class PublishOrder(Message):
    batch: BatchOrder
    committed: CommittedBatch


class StepSummary(Message):
    """A finished step, for status and progress."""

    step: int
    rows: int
    response_tokens: int
    max_staleness: int
    mean_reward: float | None
    loss: float
    grad_norm: float | None
    applied: bool
    weights_digest: str


class EvaluationOrder(Message):
    """Evaluate one policy version on all evaluation prompts, 0 to `prompts` - 1."""

    run_id: str
    attempt: int
    version: int
    prompts: int
    timeout_s: float
    group_attempts: int


class AttemptClose(Message):
    """What is on record nowhere else when an attempt ends in order."""

    attempt: int
    how: Ending
    version: int
    cursor: int
    terminal: dict[str, TerminalState]
    carried: tuple[str, ...]


class EmptyGroups(Message):
    """Finished groups in a row that hold nothing to learn from."""

    count: int = 0
    since_version: int = 0
    """Policy version when the first of them came."""
    notes: dict[str, int] = {}
    """How often each reason was given."""


class StepOrder(Message):
    plan: RunPlan
    version: int


class RunState(Message):
    """Input of a run, and what it carries through continue-as-new: a few KB."""

    plan: RunPlan
    ledger: dict[str, Any] | None = None
    cursor: int = 0
    placed: dict[str, StagedGroup] = {}
    """Groups in Occupied slots."""
    occupied_at: dict[str, int] = {}
    admissions: dict[int, Admission] = {}
    """First admission of each open step: a repeated reserve is answered with it."""
    open_steps: tuple[int, ...] = ()
    terminal: dict[str, TerminalState] = {}
    counts: dict[str, int] = {}
    recent: tuple[StepSummary, ...] = ()
    draining: bool = False
    paused: bool = False
    dead_letters_in_a_row: int = 0
    empty: EmptyGroups = EmptyGroups()
    evaluated: int = -1
    """Newest version that was looked at for an evaluation."""
    open_evaluations: tuple[int, ...] = ()
    backlog: tuple[int, ...] = ()
    """Positions below the cursor that are admitted before any new one: their groups were lost unfinished."""
    pending: BatchOrder | None = None
    """A batch that an earlier attempt committed and did not finish; the first to be trained."""
    recovered: bool = False
    """The state was rebuilt from S3 and nothing was admitted on it yet: the first admission is checked."""


class BufferView(Message):
    buffer: int
    state: str
    slots: str
    """One letter a slot: O occupied, R reserved, '.' empty."""


Phase = Literal["running", "paused", "draining", "stopping", "finished", "drained", "stopped", "failed"]


class RunStatus(Message):
    run_id: str
    attempt: int
    phase: Phase
    version: int
    target_steps: int
    training: int | None
    in_flight: int
    waiting: int
    """Occupied groups that no step has taken yet."""
    admitted: int
    trained: int
    filtered: int
    discarded: int
    expired: int
    dead_lettered: int
    aborted_members: int = 0
    """Started beyond their group by `rollout.extra_members`, and not among the first to finish."""
    empty_batches: int = 0
    """Trained batches without an advantage in them."""
    empty_groups: int = 0
    """Finished groups in a row that hold nothing to learn from."""
    evaluating: tuple[int, ...] = ()
    """Versions whose evaluation is under way."""
    stuck_since: int | None = None
    """When the trainer began to wait for a buffer that no group can be admitted to; None when it does not."""
    admissions: tuple[tuple[int, int], ...] = ()
    """(policy version, groups admitted under it), the last few versions."""
    capacity: int = 0
    """(S + 1) x slots of a buffer: what may be in the system at once."""
    max_staleness: int
    window: tuple[BufferView, ...]
    recent: tuple[StepSummary, ...]

"""Every metric of Roadstead, declared once.

Owns: names, kinds, units, help texts, labels and buckets. Never touches: values, sockets.
Invariant: low cardinality. No label has a step, a group, a prompt or a text of somebody's in it; where the values of a
label are known they stand here, and all such series of a counter or histogram exist from the beginning (an
`increase()` misses a series' first event). A gauge appears with its first value. `run` and `role`, and `engine` of an
engine's own metrics, are labels of the scrape target, not of a metric.
A crash leaves: nothing, it is a table.

Names: `roadstead_<what>_<unit>`, base units, then `_total` for counters, as Prometheus has it. A number without a unit
(reward, loss, a version) has none in its name. Numbers that belong to one training step carry the label `attempt`: a
resume that goes back some steps begins series of its own and overwrites nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]
Role = Literal["orchestrator", "ledger", "rollout", "train", "every"]
"""Worker process that serves the metric; `every`: all of them."""

PREFIX = "roadstead_"
UNITS = frozenset(
    {"", "seconds", "groups", "slots", "buffers", "trajectories", "tokens", "steps", "versions", "batches"}
    | {"ratio", "nats", "prompts"}
)
LABELS = frozenset({"activity", "attempt", "engine", "kind", "operation", "outcome", "phase", "queue", "reason"}) | {
    *("stage", "state", "source")
}

AS_THEY_COME: tuple[str, ...] = ()
"""Values of a label that are known only at run time; few all the same."""
_ATTEMPT: Mapping[str, tuple[str, ...]] = {"attempt": AS_THEY_COME}
_ENGINE: Mapping[str, tuple[str, ...]] = {"engine": AS_THEY_COME}

FAST_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Seconds: calls of a store or an engine."""
SLOW_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 7200.0)
"""Seconds: from an Update of milliseconds to the step of a large model."""
AGES = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 12.0, 16.0, 24.0, 32.0)
"""Versions; exact for every bound that is in use, and the batch gauges are exact for all."""

FAULT_KINDS = (
    *("engine_down", "engine_stalled", "engine_refused", "environment", "store", "conflict", "fenced", "trainer_down"),
    *("trainer_refused", "bad_data", "bound_exceeded", "run_gone", "timeout", "other"),
)
"""What can go wrong in an activity, by what a person has to look at; workers/faults.py sorts exceptions into them."""


@dataclass(frozen=True)
class Metric:
    name: str
    kind: Kind
    unit: str
    role: Role
    help: str
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)
    """Label to the values it can have, AS_THEY_COME where they are not known before."""
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets, in `unit`."""

    @property
    def of_a_step(self) -> bool:
        """Its value belongs to one training step, the one that `roadstead_step` names."""
        return "attempt" in self.labels


# -- the run: orchestrator worker, from the run's status -----------------------------------------------------

RUN_PHASE = Metric(
    *("roadstead_run_phase", "gauge", "", "orchestrator"),
    "1 for the phase that the run is in, 0 for the others.",
    {"phase": ("running", "paused", "draining", "stopping", "finished", "drained", "stopped", "failed")},
)
STATUS_TIMESTAMP = Metric(
    *("roadstead_status_timestamp_seconds", "gauge", "seconds", "orchestrator"),
    "Unix time at which the run last answered what its state is; one that stands still is a run that does not answer.",
)
ATTEMPT = Metric("roadstead_attempt", "gauge", "", "orchestrator", "Attempt that the run is in; 1 is its first start.")
POLICY_VERSION = Metric(
    "roadstead_policy_version", "gauge", "", "orchestrator", "Policy version of the run, the steps that are published."
)
TARGET_STEPS = Metric("roadstead_target_steps", "gauge", "steps", "orchestrator", "Steps that the run is to train.")
QUEUE = Metric(
    *("roadstead_queue_groups", "gauge", "groups", "orchestrator"),
    "Depth of the dispatcher's queues. in: admitted groups that are not finished. out: finished groups that no step "
    "has taken; empty means that generation is the bottleneck, growing that the trainer is.",
    {"queue": ("in", "out")},
)
WINDOW_SLOTS = Metric(
    *("roadstead_window_slots", "gauge", "slots", "orchestrator"),
    "Slots of the open buffers by state.",
    {"state": ("empty", "reserved", "occupied")},
)
WINDOW_BUFFERS = Metric(
    *("roadstead_window_buffers", "gauge", "buffers", "orchestrator"),
    "Open buffers by state. pending: has empty slots. stuck: none is empty, and it waits for groups in flight. ready: "
    "full, waits for the trainer. training: taken.",
    {"state": ("pending", "stuck", "ready", "training")},
)
WINDOW_GROUPS = Metric(
    *("roadstead_window_groups", "gauge", "groups", "orchestrator"),
    "Groups in the system: in flight, finished and waiting, or in the batch that is being trained; near "
    "roadstead_admission_bound_groups in a steady run.",
)
ADMISSION_BOUND = Metric(
    *("roadstead_admission_bound_groups", "gauge", "groups", "orchestrator"),
    "(S + 1) x slots of a buffer, which is (S + 1) x B without over-sampling: the most groups that may be in the "
    "system, and the most that one step can admit.",
)
STALENESS_BOUND = Metric(
    *("roadstead_staleness_bound_versions", "gauge", "versions", "orchestrator"),
    "S, staleness.max_staleness: no trajectory is trained that is older.",
)
GROUPS_ADMITTED = Metric("roadstead_admitted_groups_total", "counter", "groups", "orchestrator", "Groups admitted.")
GROUPS_ENDED = Metric(
    *("roadstead_ended_groups_total", "counter", "groups", "orchestrator"),
    "Groups by the terminal state that they ended in.",
    {"state": ("trained", "filtered", "discarded", "expired", "dead-lettered")},
)
EMPTY_BATCHES = Metric(
    *("roadstead_empty_batches_total", "counter", "batches", "orchestrator"),
    "Trained batches without an advantage in them.",
)
EMPTY_GROUPS = Metric(
    *("roadstead_empty_groups", "gauge", "groups", "orchestrator"),
    "Finished groups in a row that hold nothing to learn from; filters.empty_batches batches' worth end the run.",
)
STUCK_NOW = Metric(
    *("roadstead_stuck_now_seconds", "gauge", "seconds", "orchestrator"),
    "How long the trainer has waited for a buffer that no group can be admitted to; 0 when it does not.",
)
STUCK = Metric(
    *("roadstead_stuck_seconds_total", "counter", "seconds", "orchestrator"),
    "Time in which an idle trainer waited for a STUCK buffer: its every slot is taken and some group is not finished.",
)
PARKED = Metric(
    *("roadstead_parked_seconds_total", "counter", "seconds", "orchestrator"),
    "Time in which a full batch waited for the trainer to finish an earlier one; growing means that generation runs "
    "ahead of what the bound permits.",
)
GENERATION_IDLE = Metric(
    *("roadstead_generation_idle_seconds_total", "counter", "seconds", "orchestrator"),
    "Time in which a running run had no group in flight: the bound admits none before the next version.",
)

# -- the steps: orchestrator worker, from the records and batches on S3 --------------------------------------

STEP = Metric(
    *("roadstead_step", "gauge", "", "orchestrator"),
    "Number of the last recorded step: the one that all metrics with the label `attempt` are about.",
    _ATTEMPT,
)
STEP_ADMISSIONS = Metric(
    *("roadstead_step_admissions_groups", "gauge", "groups", "orchestrator"),
    "Groups admitted under the last policy version that is over: (S + 1) x B under the first, B in a steady run. Zero "
    "means that the gate is closed, more than roadstead_admission_bound_groups that the counters are wrong.",
    _ATTEMPT,
)
BATCH_AGE_MAX = Metric(
    *("roadstead_batch_age_max_versions", "gauge", "versions", "orchestrator"),
    "Oldest trajectory of the step's batch: its step minus the version of the trajectory's oldest trained token. "
    "Exact, from the batch as it was trained.",
    _ATTEMPT,
)
BATCH_AGE_P99 = Metric(
    *("roadstead_batch_age_p99_versions", "gauge", "versions", "orchestrator"),
    "Age that 99 % of the batch's trajectories do not exceed (nearest rank). Exact.",
    _ATTEMPT,
)
BATCH_AGE_MEAN = Metric(
    *("roadstead_batch_age_mean_versions", "gauge", "versions", "orchestrator"),
    "Mean age of the batch's trajectories. Exact.",
    _ATTEMPT,
)
TRAINED_AGE = Metric(
    *("roadstead_trained_age_versions", "histogram", "versions", "orchestrator"),
    "Trained trajectories by age. Quantiles of it interpolate between whole versions: the batch gauges are exact.",
    buckets=AGES,
)
OVER_BOUND = Metric(
    *("roadstead_over_bound_trajectories_total", "counter", "trajectories", "orchestrator"),
    "Trained trajectories older than S. Anything but 0 is a bug.",
)
BATCH_TRAINABLE = Metric(
    *("roadstead_batch_trainable_ratio", "gauge", "ratio", "orchestrator"),
    "Trainable share after filtering: trajectories of the step's batch with a reward and an advantage other than 0, "
    "of those in the batch and those filtered since the batch before.",
    _ATTEMPT,
)
BATCH_TRAJECTORIES = Metric(
    "roadstead_batch_trajectories", "gauge", "trajectories", "orchestrator", "Rows of the step's batch.", _ATTEMPT
)
BATCH_TOKENS = Metric(
    *("roadstead_batch_response_tokens", "gauge", "tokens", "orchestrator"),
    "Response tokens of the step's batch, those of environments included.",
    _ATTEMPT,
)
TOKENS_TRAINED = Metric(
    *("roadstead_trained_tokens_total", "counter", "tokens", "orchestrator"),
    "Response tokens of trained batches, those of environments included.",
)
EVALUATION_VERSION = Metric(
    *("roadstead_evaluation_version", "gauge", "", "orchestrator"),
    "Policy version of the newest evaluation on record; the other evaluation metrics are of it.",
)
EVALUATION_REWARD_MEAN = Metric(
    *("roadstead_evaluation_reward_mean", "gauge", "", "orchestrator"),
    "Mean reward of the evaluation's samples. To be compared with others only when no prompt is missing.",
)
EVALUATION_MISSING = Metric(
    *("roadstead_evaluation_missing_prompts", "gauge", "prompts", "orchestrator"),
    "Prompts of the evaluation without samples: they failed, or it was skipped.",
)
EVALUATION_SECONDS = Metric(
    *("roadstead_evaluation_seconds", "gauge", "seconds", "orchestrator"),
    "How long the evaluation took, from the moment when an engine served its version.",
)
BATCH_REWARD_MEAN = Metric(
    "roadstead_batch_reward_mean", "gauge", "", "orchestrator", "Mean reward of the step's batch.", _ATTEMPT
)
BATCH_REWARD_STDDEV = Metric(
    *("roadstead_batch_reward_stddev", "gauge", "", "orchestrator"),
    "Standard deviation of the step's rewards over the whole batch.",
    _ATTEMPT,
)
BATCH_ADVANTAGE_MEAN = Metric(
    *("roadstead_batch_advantage_mean", "gauge", "", "orchestrator"),
    "Mean advantage of the step's batch; 0 by construction but for groups with failed rewards.",
    _ATTEMPT,
)
BATCH_ADVANTAGE_STDDEV = Metric(
    *("roadstead_batch_advantage_stddev", "gauge", "", "orchestrator"),
    "Standard deviation of the step's advantages; 0 means that there was nothing to learn.",
    _ATTEMPT,
)
TRAIN_LOSS = Metric("roadstead_train_loss", "gauge", "", "orchestrator", "Loss of the step.", _ATTEMPT)
TRAIN_GRAD_NORM = Metric(
    *("roadstead_train_grad_norm", "gauge", "", "orchestrator"),
    "Norm of the step's gradient before clipping, the largest of its mini-batches; NaN when one was not finite.",
    _ATTEMPT,
)
TRAIN_LEARNING_RATE = Metric(
    "roadstead_train_learning_rate", "gauge", "", "orchestrator", "Learning rate of the step.", _ATTEMPT
)
TRAIN_RATIO_MEAN = Metric(
    *("roadstead_train_importance_mean_ratio", "gauge", "ratio", "orchestrator"),
    "Mean importance weight of the step, exp(trainer - behaviour logprob), before truncation; of tokens, or of "
    "trajectories, by training.importance_level.",
    _ATTEMPT,
)
TRAIN_RATIO_MAX = Metric(
    *("roadstead_train_importance_max_ratio", "gauge", "ratio", "orchestrator"),
    "Largest importance weight of the step, before truncation.",
    _ATTEMPT,
)
TRAIN_CAPPED = Metric(
    *("roadstead_train_capped_tokens_ratio", "gauge", "ratio", "orchestrator"),
    "Share of the step's loss tokens whose importance weight was truncated at training.importance_cap.",
    _ATTEMPT,
)
TRAIN_CLIPPED = Metric(
    *("roadstead_train_clipped_tokens_ratio", "gauge", "ratio", "orchestrator"),
    "Share of the step's loss tokens whose ratio to the proximal policy was clipped; 0 with one mini-batch.",
    _ATTEMPT,
)
TRAIN_KL_BEHAVIOR = Metric(
    *("roadstead_train_kl_behavior_nats", "gauge", "nats", "orchestrator"),
    "KL divergence of the policy that generated the step's tokens from the one that was trained (k1 estimate).",
    _ATTEMPT,
)
TRAIN_KL_REFERENCE = Metric(
    *("roadstead_train_kl_reference_nats", "gauge", "nats", "orchestrator"),
    "KL divergence of the trained policy from the reference, version 0; NaN without training.kl_coefficient.",
    _ATTEMPT,
)
TRAIN_ENTROPY = Metric(
    *("roadstead_train_entropy_nats", "gauge", "nats", "orchestrator"),
    "Mean entropy of the policy over the step's loss tokens.",
    _ATTEMPT,
)
STEPS_SKIPPED = Metric(
    *("roadstead_skipped_steps_total", "counter", "steps", "orchestrator"),
    "Steps that did not move the weights: no gradient was finite, or nothing had one.",
)
STEPS_CLIPPED = Metric(
    *("roadstead_clipped_steps_total", "counter", "steps", "orchestrator"),
    "Steps whose gradient was scaled down to training.max_grad_norm.",
)
STORE_SECONDS = Metric(
    *("roadstead_batch_store_seconds", "histogram", "seconds", "orchestrator"),
    "Calls of the store while a batch is persisted. read: a finished group, or the commit. write: a file of the batch, "
    "or its commit. verify: what was just written, read back. The whole is roadstead_activity_seconds of "
    "persist_batch.",
    {"operation": ("read", "write", "verify")},
    FAST_S,
)
WATCH_ERRORS = Metric(
    *("roadstead_watch_errors_total", "counter", "", "orchestrator"),
    "Looks at the run or its records that failed: the metrics from there are old.",
    {"source": ("run", "records")},
)

# -- generation: rollout and ledger workers ------------------------------------------------------------------

ENGINE_UP = Metric(
    "roadstead_engine_up", "gauge", "", "rollout", "1 while the engine is given work, 0 while it is ejected.", _ENGINE
)
ENGINE_VERSION = Metric(
    *("roadstead_engine_version", "gauge", "", "rollout"),
    "Policy version that the engine reported last; NaN while it is unknown.",
    _ENGINE,
)
ENGINE_IN_FLIGHT = Metric(
    "roadstead_engine_in_flight_groups", "gauge", "groups", "rollout", "Groups that the engine generates.", _ENGINE
)
FLEET_WAITING = Metric(
    *("roadstead_fleet_waiting_groups", "gauge", "groups", "rollout"),
    "Groups that no engine can take now: none is healthy and at their version.",
)
RELOAD_STAGE_SECONDS = Metric(
    *("roadstead_weights_stage_seconds", "histogram", "seconds", "rollout"),
    "The weight watcher's stages, from the look at the store to the engine's own word.",
    {**_ENGINE, "stage": ("attach", "poll", "download", "load", "read back", "clean up")},
    FAST_S,
)
RELOAD_SECONDS = Metric(
    *("roadstead_weights_reload_seconds", "histogram", "seconds", "rollout"),
    "From the poll that saw a new version to the engine that serves it. Bounded, and well under a step; a growing one "
    "stalls the version and the gate.",
    _ENGINE,
    SLOW_S,
)
RELOAD_TIMESTAMP = Metric(
    *("roadstead_weights_reload_timestamp_seconds", "gauge", "seconds", "rollout"),
    "Unix time at which the engine last got new weights; 0 before the first.",
    _ENGINE,
)
GROUPS_GENERATED = Metric(
    *("roadstead_generated_groups_total", "counter", "groups", "rollout"),
    "Finished groups by what can be learned from them. filtered: a filter keeps them out. untrainable: no member has "
    "an advantage.",
    {"outcome": ("trainable", "untrainable", "filtered")},
)
TOKENS_GENERATED = Metric(
    *("roadstead_generated_tokens_total", "counter", "tokens", "rollout"),
    "Response tokens of finished groups, those of environments included.",
)
TRAJECTORIES_ABORTED = Metric(
    *("roadstead_aborted_trajectories_total", "counter", "trajectories", "rollout"),
    "Members that were started beyond a group's size (rollout.extra_members) and were not among the first to finish.",
)
TOKENS_DISCARDED = Metric(
    *("roadstead_discarded_tokens_total", "counter", "tokens", "ledger"),
    "Response tokens of finished groups that were not given a slot. surplus: no buffer could use them. expired: too "
    "old for every open buffer. late: their group was dropped before.",
    {"reason": ("filtered", "surplus", "expired", "late")},
)

# -- training: train worker ----------------------------------------------------------------------------------

TRAINER_UP = Metric("roadstead_trainer_up", "gauge", "", "train", "1 while the trainer answers and has a version.")
TRAINER_VERSION = Metric(
    *("roadstead_trainer_version", "gauge", "", "train"), "Policy version that the trainer holds; NaN while it boots."
)
TRAINER_INCARNATION = Metric(
    *("roadstead_trainer_incarnation", "gauge", "", "train"), "Restarts of the process group under its launcher."
)
TRAINER_BOOT = Metric(
    *("roadstead_trainer_boot_seconds", "gauge", "seconds", "train"), "From the trainer's start to its being ready."
)
TRAINER_PHASE = Metric(
    *("roadstead_trainer_phase_seconds_total", "counter", "seconds", "train"),
    "Where the trainer's time goes. idle: it waits for a batch. read: loads and verifies it. replay: catches up with "
    "committed steps after a restart. down: nobody answers. Looked at about once a second.",
    {"phase": ("idle", "boot", "read", "train", "upload", "checkpoint", "replay", "down", "other")},
)
TRAINER_SINCE = Metric(
    *("roadstead_trainer_phase_age_seconds", "gauge", "seconds", "train"), "How long the trainer has been in its phase."
)
STEP_PHASE_SECONDS = Metric(
    *("roadstead_train_phase_seconds", "histogram", "seconds", "train"),
    "Seconds of one step by phase, as the trainer measured them. read: load and verify the batch.",
    {"phase": ("read", "train", "upload", "checkpoint", "replay", "other")},
    SLOW_S,
)

# -- every worker --------------------------------------------------------------------------------------------

ACTIVITY_SECONDS = Metric(
    *("roadstead_activity_seconds", "histogram", "seconds", "every"),
    "Executions of an activity: persist_batch writes and verifies a batch, publish_weights publishes, ...",
    {"activity": AS_THEY_COME, "outcome": ("completed", "failed", "cancelled")},
    SLOW_S,
)
ACTIVITIES_RUNNING = Metric(
    *("roadstead_activities_running", "gauge", "", "every"),
    "Activities that this process is executing.",
    {"activity": AS_THEY_COME},
)
ACTIVITY_RETRIES = Metric(
    *("roadstead_activity_retries_total", "counter", "", "every"),
    "Executions that were not an activity's first.",
    {"activity": AS_THEY_COME},
)
ACTIVITY_FAULTS = Metric(
    *("roadstead_activity_faults_total", "counter", "", "every"),
    "Failed executions by what went wrong.",
    {"activity": AS_THEY_COME, "kind": FAULT_KINDS},
)
PULSE = Metric(
    *("roadstead_pulse_timestamp_seconds", "gauge", "seconds", "every"),
    "Unix time at which the process's event loop last ran; one that stands still is a hung worker.",
)

CATALOGUE: tuple[Metric, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
BY_NAME: Mapping[str, Metric] = {metric.name: metric for metric in CATALOGUE}

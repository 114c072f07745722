"""The dashboard of training: where the trainer's time goes, and what the optimizer sees."""

from __future__ import annotations

from roadstead.dashboards.grafana.board import Board
from roadstead.dashboards.grafana.panels import NATS, PLAIN, SHARE, Query, graph, number
from roadstead.dashboards.grafana.queries import RUN, by, mean, rate
from roadstead.metrics import catalogue as c
from roadstead.metrics.catalogue import Metric


def of_step(metric: Metric, name: str) -> Query:
    """The last recorded step's number: one series an attempt."""
    return Query(by("max", RUN(metric), "attempt"), f"{name} (attempt {{{{attempt}}}})")


UP = number(
    "Trainer",
    PLAIN,
    "1 while the trainer answers and has a version. Healthy: 1. 0 for minutes: it boots or keeps dying, see its log.",
    Query(by("min", RUN(c.TRAINER_UP), "run"), "up"),
)
RESTARTS = number(
    "Restarts",
    PLAIN,
    "Restarts of the process group under its launcher. Healthy: 0.",
    Query(by("max", RUN(c.TRAINER_INCARNATION), "run"), "restarts"),
    steps=(1.0, 3.0),
)
BOOT = number(
    "Boot",
    "s",
    "From the trainer's start to its being ready, replay of steps included.",
    Query(by("max", RUN(c.TRAINER_BOOT), "run"), "boot"),
)
SINCE = number(
    "In its phase since",
    "s",
    "How long the trainer has been doing what it does now. Healthy: below the length of a step.",
    Query(by("max", RUN(c.TRAINER_SINCE), "run"), "phase"),
)
LAG = number(
    "Version held",
    PLAIN,
    "Policy version that the trainer holds; the run's own, or one ahead while it is being published.",
    Query(by("max", RUN(c.TRAINER_VERSION), "run"), "version"),
)
SKIPPED = number(
    "Steps not applied",
    PLAIN,
    "Steps that did not move the weights: the gradient was not finite, or nothing had one. Healthy: 0. Otherwise "
    "`roadstead audit RUN`.",
    Query(by("sum", RUN(c.STEPS_SKIPPED), "run"), "steps"),
    steps=(1.0, 5.0),
)
PHASES = graph(
    "Where the trainer's time goes",
    SHARE,
    "Share of time. Healthy: mostly train. idle: it waits for a batch, generation is the bottleneck. down: nobody "
    "answers.",
    Query(by("sum", rate(RUN(c.TRAINER_PHASE)), "phase"), "{{phase}}"),
    stacked=True,
)
STEP_SECONDS = graph(
    "Seconds a step",
    "s",
    "Mean of each phase, as the trainer measures it. Healthy: steady. It grows with response length; upload grows with "
    "a slow store.",
    Query(mean(c.STEP_PHASE_SECONDS, "phase"), "{{phase}}"),
    stacked=True,
)
LOSS = graph(
    "Loss",
    PLAIN,
    "Healthy: near 0 and noisy; with group-relative advantages it is no measure of progress. A drift or a jump: look "
    "at the importance weights.",
    of_step(c.TRAIN_LOSS, "loss"),
)
GRAD_NORM = graph(
    "Gradient norm, before clipping",
    PLAIN,
    "Healthy: of one order of magnitude. A spike: one batch is unlike the others, `roadstead batch show RUN STEP`. A "
    "gap: the norm was not finite.",
    of_step(c.TRAIN_GRAD_NORM, "norm"),
)
IMPORTANCE = graph(
    "Importance weights",
    PLAIN,
    "exp(trainer - behaviour logprob) before truncation. Healthy: mean near 1, a maximum of a few. A mean that leaves "
    "1 while ages stay the same: engine and trainer disagree about the same weights.",
    of_step(c.TRAIN_RATIO_MEAN, "mean"),
    of_step(c.TRAIN_RATIO_MAX, "max"),
)
CAPPED = graph(
    "Tokens truncated or clipped",
    SHARE,
    "capped: importance weight cut at training.importance_cap. clipped: ratio to the proximal policy clipped, 0 with "
    "one mini-batch. Healthy: a few percent. Much more: the data are too old for the learning rate.",
    of_step(c.TRAIN_CAPPED, "capped"),
    of_step(c.TRAIN_CLIPPED, "clipped"),
)
KL = graph(
    "KL to the policy that generated",
    NATS,
    "k1 estimate over loss tokens. Healthy: small, and growing with age only.",
    of_step(c.TRAIN_KL_BEHAVIOR, "behaviour"),
)
KL_REFERENCE = graph(
    "KL to the reference, version 0",
    NATS,
    "How far the policy has gone. Healthy: slowly growing. Empty without training.kl_coefficient.",
    of_step(c.TRAIN_KL_REFERENCE, "reference"),
)
ENTROPY = graph(
    "Entropy",
    NATS,
    "Mean over loss tokens. Healthy: slowly falling. Near 0: the policy has collapsed to one answer and explores no "
    "more.",
    of_step(c.TRAIN_ENTROPY, "entropy"),
)
RATE = graph(
    "Learning rate",
    PLAIN,
    "As applied in the step.",
    of_step(c.TRAIN_LEARNING_RATE, "rate"),
)
CLIPPED_STEPS = graph(
    "Steps with a clipped gradient",
    SHARE,
    "Share of steps whose gradient was scaled down to training.max_grad_norm. Healthy: some. All of them: the learning "
    "rate acts like a smaller one.",
    Query(
        f"{by('sum', rate(RUN(c.STEPS_CLIPPED), '10m'), 'run')} / "
        f"({by('max', f'deriv({RUN(c.POLICY_VERSION)}[10m])', 'run')} > 0)",
        "clipped",
    ),
)

BOARD = Board(
    "roadstead-trainer",
    "Roadstead: trainer",
    "Whether the optimizer works, on what, and where its time goes.",
    (
        ("The trainer", (UP, RESTARTS, BOOT, SINCE, LAG, SKIPPED, PHASES, STEP_SECONDS)),
        ("The optimizer", (LOSS, GRAD_NORM, IMPORTANCE, CAPPED, KL, KL_REFERENCE, ENTROPY, RATE, CLIPPED_STEPS)),
    ),
)

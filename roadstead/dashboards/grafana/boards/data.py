"""The dashboard of the data: what is in the batches, what was kept out, and how they are stored."""

from __future__ import annotations

from roadstead.dashboards.grafana.board import Board
from roadstead.dashboards.grafana.boards.trainer import of_step
from roadstead.dashboards.grafana.panels import COUNT, GROUPS, PER_SECOND, PLAIN, SHARE, Query, graph, number
from roadstead.dashboards.grafana.queries import RUN, by, mean, quantile, rate
from roadstead.metrics import catalogue as c

REWARD = graph(
    "Reward of the batch",
    PLAIN,
    "Healthy: the mean rises, the deviation is not 0. A sudden jump up is a reward that is being gamed more often than "
    "a policy that got better: read some rows.",
    of_step(c.BATCH_REWARD_MEAN, "mean"),
    of_step(c.BATCH_REWARD_STDDEV, "deviation"),
)
ADVANTAGE = graph(
    "Advantage of the batch",
    PLAIN,
    "Healthy: mean 0 by construction, a deviation that is not 0. Deviation 0: there was nothing to learn.",
    of_step(c.BATCH_ADVANTAGE_MEAN, "mean"),
    of_step(c.BATCH_ADVANTAGE_STDDEV, "deviation"),
)
TRAINABLE = graph(
    "Trainable share after filtering",
    SHARE,
    "Trajectories with a reward and an advantage other than 0, of those in the batch and those filtered. Healthy: a "
    "stable fraction. Trending to zero: the environment or the reward is broken, or everything is solved.",
    of_step(c.BATCH_TRAINABLE, "trainable"),
)
OUTCOMES = graph(
    "Finished groups by outcome",
    PER_SECOND,
    "Healthy: mostly trainable. untrainable: every member got the same reward. filtered: a filter kept it out.",
    Query(by("sum", rate(RUN(c.GROUPS_GENERATED)), "outcome"), "{{outcome}}"),
    stacked=True,
)
EMPTY = graph(
    "Groups in a row with nothing to learn from",
    GROUPS,
    "Healthy: 0, or a few. filters.empty_batches batches' worth in a row end the run.",
    Query(by("max", RUN(c.EMPTY_GROUPS), "run"), "in a row"),
)
EMPTY_BATCHES = number(
    "Empty batches",
    PLAIN,
    "Trained batches without an advantage in them. Healthy: 0.",
    Query(by("max", RUN(c.EMPTY_BATCHES), "run"), "batches"),
    steps=(1.0, 3.0),
    width=6,
)
STEP = number(
    "Last recorded step",
    PLAIN,
    "The step that the numbers of a batch on this page belong to. `roadstead batch show RUN STEP` shows its rows.",
    Query(by("max", RUN(c.STEP), "run"), "step"),
    width=6,
)
ROWS = graph(
    "Trajectories of the batch",
    COUNT,
    "Healthy: constant.",
    of_step(c.BATCH_TRAJECTORIES, "rows"),
    width=6,
)
TOKENS = graph(
    "Response tokens of the batch",
    COUNT,
    "Healthy: steady. Growing to the limit: responses are no longer ended. Shrinking: the reward pays for short ones.",
    of_step(c.BATCH_TOKENS, "tokens"),
    width=6,
)
EVALUATED = graph(
    "Reward of the evaluation",
    PLAIN,
    "Mean reward on the evaluation prompts, of the newest version on record. Healthy: rises with the batch's reward. "
    "The batch's rises and this does not: the policy learns the training prompts, or the reward's weakness.",
    Query(by("max", RUN(c.EVALUATION_REWARD_MEAN), "run"), "evaluation"),
)
EVALUATION = number(
    "Evaluated version",
    PLAIN,
    "The version that the numbers of an evaluation on this page are of. Healthy: rises by evaluation.every.",
    Query(by("max", RUN(c.EVALUATION_VERSION), "run"), "version"),
    width=6,
)
EVALUATION_MISSING = number(
    "Prompts without samples",
    PLAIN,
    "Of the last evaluation. Healthy: 0. Its mean reward is not to be compared else; `roadstead evals RUN` says why.",
    Query(by("max", RUN(c.EVALUATION_MISSING), "run"), "prompts"),
    steps=(1.0, 2.0),
    width=6,
)
EVALUATION_TIME = graph(
    "Evaluation: time",
    "s",
    "Healthy: well under evaluation.every steps: an engine holds its version for so long.",
    Query(by("max", RUN(c.EVALUATION_SECONDS), "run"), "seconds"),
    width=6,
)
PERSIST = graph(
    "Persisting a batch",
    "s",
    "Mean time from ready to committed, and of publishing weights. Healthy: well under a step.",
    Query(mean(c.ACTIVITY_SECONDS, "activity", role="orchestrator", outcome="completed"), "{{activity}}"),
)
STORE = graph(
    "Calls of the store",
    "s",
    "p95 of the calls while a batch is persisted. Healthy: well under a second. Growing: the store or the way there.",
    Query(quantile(0.95, c.STORE_SECONDS, "operation"), "{{operation}}"),
)

BOARD = Board(
    "roadstead-data",
    "Roadstead: data health",
    "What the run learns from. When a run diverges the question is which data did it.",
    (
        ("The batch", (EMPTY_BATCHES, STEP, REWARD, ADVANTAGE, ROWS, TOKENS)),
        ("What can be learned", (TRAINABLE, OUTCOMES, EMPTY)),
        ("Evaluation", (EVALUATION, EVALUATION_MISSING, EVALUATION_TIME, EVALUATED)),
        ("Storage", (PERSIST, STORE)),
    ),
)

"""The dashboard of generation: engines, their weights, and what comes out of them."""

from __future__ import annotations

from roadstead.dashboards.grafana.board import Board
from roadstead.dashboards.grafana.panels import COUNT, PER_SECOND, PLAIN, SHARE, TOKENS_PER_SECOND, Query, graph
from roadstead.dashboards.grafana.queries import (
    RUN,
    VLLM_CACHE,
    VLLM_LATENCY,
    VLLM_PREEMPTIONS,
    VLLM_RUNNING,
    VLLM_TOKENS,
    VLLM_WAITING,
    by,
    mean,
    quantile,
    rate,
)
from roadstead.metrics import catalogue as c

UP = graph(
    "Engines that are given work",
    PLAIN,
    "1 while the engine is given work. Healthy: 1. 0: it is down, stalled or refused; its log is in the run's folder.",
    Query(by("max", RUN(c.ENGINE_UP), "engine"), "{{engine}}"),
    width=8,
)
VERSIONS = graph(
    "Versions: run and engines",
    PLAIN,
    "Healthy: every engine follows the run within a fraction of a step. An engine that stays behind stalls the gate: "
    "its groups age while they are generated.",
    Query(by("max", RUN(c.POLICY_VERSION), "run"), "run"),
    Query(by("max", RUN(c.ENGINE_VERSION), "engine"), "{{engine}}"),
    width=8,
)
REQUESTS = graph(
    "Requests",
    COUNT,
    "In flight by engine, and waiting for any engine. Healthy: in flight near the engine's capacity, few waiting.",
    Query(by("max", RUN(c.ENGINE_IN_FLIGHT), "engine"), "in flight, {{engine}}"),
    Query(by("max", RUN(c.FLEET_WAITING), "run"), "waiting for an engine"),
    width=8,
)
RELOAD = graph(
    "From poll to reload",
    "s",
    "From the poll that saw a new version to the engine that serves it. Healthy: bounded, well under a step, "
    "whose seconds are on the trainer's dashboard. A growing one stalls the version and the gate.",
    Query(mean(c.RELOAD_SECONDS, "engine"), "mean, {{engine}}"),
    Query(quantile(0.95, c.RELOAD_SECONDS, "engine"), "p95, {{engine}}"),
)
STAGES = graph(
    "Stages of a reload",
    "s",
    "Mean time of each stage. download: the store is slow. load: the engine is busy or its disk is slow. Healthy: each "
    "steady.",
    Query(mean(c.RELOAD_STAGE_SECONDS, "stage"), "{{stage}}"),
)
SINCE_RELOAD = graph(
    "Time since the last reload",
    "s",
    "Healthy: a saw-tooth of one step's length. A line that keeps rising while the run's version moves: the weight "
    "watcher stalls.",
    Query(f"time() - ({by('max', RUN(c.RELOAD_TIMESTAMP), 'engine')} > 0)", "{{engine}}"),
)
TOKENS = graph(
    "Response tokens",
    TOKENS_PER_SECOND,
    "Generated, trained, and thrown away. Healthy: trained follows generated, thrown away is near 0.",
    Query(by("sum", rate(RUN(c.TOKENS_GENERATED)), "run"), "generated"),
    Query(by("sum", rate(RUN(c.TOKENS_TRAINED)), "run"), "trained"),
    Query(by("sum", rate(RUN(c.TOKENS_DISCARDED)), "reason"), "thrown away: {{reason}}"),
)
ROLLOUTS = graph(
    "Seconds a group",
    "s",
    "How long it takes to generate a group. Healthy: p95 within a few times the median. A wide gap is the completion-"
    "time spread that makes batches wait and data old.",
    Query(quantile(0.5, c.ACTIVITY_SECONDS, role="rollout", outcome="completed"), "median"),
    Query(quantile(0.95, c.ACTIVITY_SECONDS, role="rollout", outcome="completed"), "p95"),
)
ABORTED = graph(
    "Members aborted",
    PER_SECOND,
    "Members begun beyond a group's size (rollout.extra_members) that were not among the first to finish. 0 without; "
    "otherwise the price of not waiting for the slowest.",
    Query(by("sum", rate(RUN(c.TRAJECTORIES_ABORTED)), "run"), "aborted"),
)
INSIDE = graph(
    "vLLM: requests",
    COUNT,
    "As vLLM counts them. Waiting: its batch or its KV cache is full. Healthy: few waiting.",
    Query(by("max", RUN(VLLM_RUNNING), "engine"), "running, {{engine}}"),
    Query(by("max", RUN(VLLM_WAITING), "engine"), "waiting, {{engine}}"),
)
CACHE = graph(
    "vLLM: KV cache in use",
    SHARE,
    "Healthy: below 1. At 1 requests are put back and computed again: see preemptions.",
    Query(by("max", RUN(VLLM_CACHE), "engine"), "{{engine}}"),
)
OUTPUT = graph(
    "vLLM: tokens generated",
    TOKENS_PER_SECOND,
    "What the engine itself puts out, evaluations and aborted requests included. Healthy: steady but for the pauses at "
    "new weights.",
    Query(by("sum", rate(RUN(VLLM_TOKENS)), "engine"), "{{engine}}"),
)
LATENCY = graph(
    "vLLM: seconds a request",
    "s",
    "Mean time of a request in the running batch. Healthy: steady; it grows with response length and batch size.",
    Query(mean(VLLM_LATENCY, "engine"), "{{engine}}"),
)
PREEMPTIONS = graph(
    "vLLM: preemptions",
    PER_SECOND,
    "Requests that were put back because the KV cache was full. Healthy: 0. Otherwise lower engine.max_num_seqs or "
    "give the cache more memory.",
    Query(by("sum", rate(RUN(VLLM_PREEMPTIONS)), "engine"), "{{engine}}"),
)

BOARD = Board(
    "roadstead-engines",
    "Roadstead: engines",
    "Whether generation keeps up, and with which weights.",
    (
        ("The fleet", (UP, VERSIONS, REQUESTS)),
        ("Weights", (RELOAD, STAGES, SINCE_RELOAD)),
        ("Output", (TOKENS, ROLLOUTS, ABORTED)),
        ("Inside vLLM", (INSIDE, CACHE, OUTPUT, LATENCY, PREEMPTIONS)),
    ),
)

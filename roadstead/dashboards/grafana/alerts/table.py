"""One alert for each way in which a pipeline of generation and training degrades.

What a regression of each signal means: the dispatcher's out queue (empty, growing), admissions per step (zero, a
spike), the gap of observed ages, poll to reload, the trainable share, the time parked.
"""

from __future__ import annotations

from roadstead.dashboards.grafana.alerts.base import (
    BATCH,
    GOES_ON,
    OUT,
    RUNNING,
    SECONDS_A_STEP,
    WINDOW,
    Alert,
    of_run,
    share,
)
from roadstead.dashboards.grafana.boards import data, engines, staleness
from roadstead.dashboards.grafana.queries import EVERY, by, mean
from roadstead.metrics import catalogue as c

ALERTS: tuple[Alert, ...] = (
    Alert(
        "RoadsteadGenerationIsTheBottleneck",
        "info",
        f"({by('max', f'quantile_over_time(0.9, {OUT}[{WINDOW}])', 'run')} < {BATCH}) and on (run) ({RUNNING})",
        "15m",
        ("run",),
        "{{ $labels.run }}: generation is the bottleneck, the dispatcher's out queue hardly ever holds a batch",
        "The trainer takes every batch as soon as it is full. Add engines (engine.replicas or engine.urls), or shorten "
        "responses; raising staleness.max_staleness does not help, the data would only be older.",
        staleness.BOARD,
        staleness.QUEUE,
    ),
    Alert(
        "RoadsteadTrainerIsTheBottleneck",
        "info",
        f"{by('min', f'min_over_time({OUT}[{WINDOW}])', 'run')} >= {BATCH}",
        "15m",
        ("run",),
        "{{ $labels.run }}: the trainer is the bottleneck, a full batch has waited for it at every moment",
        "Finished groups pile up to the bound. Give the trainer more ranks or a larger training.micro_batch_tokens, or "
        "take engines away; a larger staleness.max_staleness only makes the data older.",
        staleness.BOARD,
        staleness.QUEUE,
    ),
    Alert(
        "RoadsteadNoAdmissions",
        "warning",
        f"({of_run(c.STEP_ADMISSIONS)} == 0) and on (run) ({RUNNING}) and on (run) {GOES_ON}",
        "2m",
        ("run",),
        "{{ $labels.run }}: the last step admitted no group, the gate is closed",
        "What is in flight will be trained and then nothing is left. Look for a STUCK buffer (slow groups, see "
        "rollout.stuck_timeout_s), for engines that stay behind the run's version, and for rollout workers that are "
        "gone: `roadstead status {{ $labels.run }}`.",
        staleness.BOARD,
        staleness.ADMISSIONS,
    ),
    Alert(
        "RoadsteadAdmissionSpike",
        "critical",
        f"{of_run(c.STEP_ADMISSIONS)} > {of_run(c.ADMISSION_BOUND)}",
        "0s",
        ("run",),
        "{{ $labels.run }}: a step admitted more groups than the bound allows, the counters are wrong",
        "This can't happen while the ledger is right. Stop the run (`roadstead stop {{ $labels.run }}`), check its "
        "accounts with `roadstead audit {{ $labels.run }}` and report it with the audit's output.",
        staleness.BOARD,
        staleness.ADMISSIONS,
    ),
    Alert(
        "RoadsteadAgesSpread",
        "info",
        f"(avg_over_time(({of_run(c.BATCH_AGE_MAX)} - {of_run(c.BATCH_AGE_MEAN)})[{WINDOW}:1m]) "
        f"> 0.5 * {of_run(c.STALENESS_BOUND)}) and on (run) ({of_run(c.STALENESS_BOUND)} >= 2)",
        "15m",
        ("run",),
        "{{ $labels.run }}: the oldest rows of a batch are much older than its mean, completion times spread widely",
        "Not an error of configuration: some groups take far longer than others. Limit rollout.max_tokens, set "
        "rollout.group_timeout_s with on_timeout: truncate, or over-sample with rollout.extra_members.",
        staleness.BOARD,
        staleness.AGES,
    ),
    Alert(
        "RoadsteadWeightReloadSlow",
        "warning",
        f"{mean(c.RELOAD_SECONDS, 'run', scope=EVERY, window=WINDOW)} > 0.5 * {by('min', SECONDS_A_STEP, 'run')}",
        "5m",
        ("run",),
        "{{ $labels.run }}: new weights take more than half a step to reach the engines",
        "The version stalls, and the gate with it. See which stage grew: download is the store or the network, load is "
        "the engine; with partial_rollout: false it is the wait for turns in flight.",
        engines.BOARD,
        engines.RELOAD,
    ),
    Alert(
        "RoadsteadFewTrainable",
        "warning",
        f"{by('max', f'avg_over_time({EVERY(c.BATCH_TRAINABLE)}[{WINDOW}])', 'run')} < 0.1",
        "10m",
        ("run",),
        "{{ $labels.run }}: fewer than a tenth of the trajectories can be trained on",
        "Trending to zero is a broken environment or reward, or prompts that are all solved or all hopeless. Read some "
        "rows (`roadstead batch show {{ $labels.run }} STEP`), check rewards that time out, change the prompts.",
        data.BOARD,
        data.TRAINABLE,
    ),
    Alert(
        "RoadsteadParkedGrowing",
        "info",
        f"{share(c.PARKED)} > 0.5",
        "15m",
        ("run",),
        "{{ $labels.run }}: full batches wait for the trainer more than half of the time",
        "Generation runs ahead of what the bound permits; the engines could be fewer. The data are older than they "
        "need to be: lower staleness.max_groups_in_flight or staleness.max_staleness, or speed the trainer up.",
        staleness.BOARD,
        staleness.WAITING,
    ),
)

"""Alerts for what stops a run quietly: it holds its machines, raises no error and learns nothing."""

from __future__ import annotations

from roadstead.dashboards.grafana.alerts.base import (
    BATCH,
    BEHIND,
    GOES_ON,
    RUNNING,
    WINDOW,
    Alert,
    happened,
    of_run,
    share,
)
from roadstead.dashboards.grafana.boards import data, engines, faults, staleness, trainer
from roadstead.dashboards.grafana.queries import EVERY, by
from roadstead.metrics import catalogue as c

ALERTS: tuple[Alert, ...] = (
    Alert(
        "RoadsteadWatcherStalled",
        "critical",
        f"({BEHIND} >= 1) and on (run, engine) "
        f"(time() - {by('max', EVERY(c.RELOAD_TIMESTAMP), 'run', 'engine')} > 300)",
        "2m",
        ("run", "engine"),
        "{{ $labels.run }}: engine {{ $labels.engine }} has not taken newer weights for 5 minutes",
        "The run's version moves on without it: its groups age while they are generated and the gate will close. Look "
        "at the stages of its last reload, the rollout worker's log and the engine's log; `roadstead status "
        "{{ $labels.run }}` shows the versions. Killing the engine's process is safe: it is started again.",
        engines.BOARD,
        engines.VERSIONS,
    ),
    Alert(
        "RoadsteadGateClosed",
        "critical",
        f"({share(c.GENERATION_IDLE)} > 0.95) and on (run) ({RUNNING}) and on (run) {GOES_ON}",
        "5m",
        ("run",),
        "{{ $labels.run }}: nothing was being generated in the last 15 minutes, the bound lets nothing in",
        "A quiet halt. Either the version does not advance (trainer down or hung: see its dashboard) or a batch is "
        "STUCK on slots that nobody fills. `roadstead status {{ $labels.run }}` says what is waited for, and how long.",
        staleness.BOARD,
        staleness.WAITING,
    ),
    Alert(
        "RoadsteadEmptyBatches",
        "critical",
        f"({happened(c.EMPTY_BATCHES)}) or ({of_run(c.EMPTY_GROUPS)} >= {BATCH})",
        "0s",
        ("run",),
        "{{ $labels.run }}: a batch's worth of groups holds nothing to learn from",
        "Every reward of a group is the same: the environment or the reward is broken, or the prompts are all solved "
        "or all hopeless. filters.empty_batches such batches in a row end the run. Read some rows: `roadstead batch "
        "show {{ $labels.run }} STEP`.",
        data.BOARD,
        data.EMPTY,
    ),
    Alert(
        "RoadsteadBoundReached",
        "info",
        f"(avg_over_time(({of_run(c.BATCH_AGE_MEAN)} - {of_run(c.STALENESS_BOUND)})[{WINDOW}:1m]) >= -0.1) "
        f"and on (run) ({of_run(c.STALENESS_BOUND)} > 0)",
        "10m",
        ("run",),
        "{{ $labels.run }}: almost every trajectory is as old as the bound allows",
        "Generation waits on the bound all the time: all of the staleness that was allowed is used up by waiting. "
        "Speed the trainer up, or lower staleness.max_groups_in_flight, which gives younger data at the same pace.",
        staleness.BOARD,
        staleness.AGES,
    ),
    Alert(
        "RoadsteadBoundExceeded",
        "critical",
        happened(c.OVER_BOUND),
        "0s",
        ("run",),
        "{{ $labels.run }}: trajectories older than staleness.max_staleness were trained",
        "This can't happen while the ledger is right. Stop the run, `roadstead audit {{ $labels.run }}` names the "
        "rows; report it with the audit's output.",
        staleness.BOARD,
        staleness.OVER_BOUND,
    ),
    Alert(
        "RoadsteadTrainerIdle",
        "warning",
        f"({share(c.TRAINER_PHASE, phase='idle')} > 0.5) and on (run) ({RUNNING})",
        "10m",
        ("run",),
        "{{ $labels.run }}: the trainer waits for data more than half of the time",
        "Generation is too slow for it, or stands. If the engines are busy, add some; if they are not, the gate is "
        "closed or rollout workers are gone.",
        trainer.BOARD,
        trainer.PHASES,
    ),
    Alert(
        "RoadsteadStoreErrors",
        "warning",
        f"({happened(c.ACTIVITY_FAULTS, kind='store')}) or ({happened(c.WATCH_ERRORS, source='records')})",
        "0s",
        ("run",),
        "{{ $labels.run }}: the store refuses or does not answer",
        "Activities try again and nothing is lost, but batches and weights are late. Look at the S3 server, its disk "
        "and the credentials; `roadstead status {{ $labels.run }}` fails with the store's own words.",
        faults.BOARD,
        faults.KINDS,
    ),
)

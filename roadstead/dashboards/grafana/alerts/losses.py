"""Alerts for work that was lost."""

from __future__ import annotations

from roadstead.dashboards.grafana.alerts.base import Alert, happened
from roadstead.dashboards.grafana.boards import faults, trainer
from roadstead.metrics import catalogue as c

ALERTS: tuple[Alert, ...] = (
    Alert(
        "RoadsteadStepNotApplied",
        "critical",
        happened(c.STEPS_SKIPPED),
        "0s",
        ("run",),
        "{{ $labels.run }}: a step did not move the weights",
        "Its gradient is not finite, or nothing in its batch had one (then RoadsteadEmptyBatches fires too). "
        "`roadstead audit {{ $labels.run }}` names the step and its rows, `roadstead bisect` the smallest set of "
        "them that does it. If it repeats, lower training.learning_rate or fix the reward.",
        trainer.BOARD,
        trainer.SKIPPED,
    ),
    Alert(
        "RoadsteadGroupsLost",
        "warning",
        happened(c.GROUPS_ENDED, "state", state="~expired|dead-lettered"),
        "0s",
        ("run", "state"),
        "{{ $labels.run }}: groups end as {{ $labels.state }}",
        "dead-lettered: they failed in every attempt, their errors are with the run's dead letters. expired: they were "
        "too old for every open batch, which only a resume or a slow engine can bring about.",
        faults.BOARD,
        faults.LOST,
    ),
    Alert(
        "RoadsteadTwoWriters",
        "critical",
        happened(c.ACTIVITY_FAULTS, "kind", kind="~conflict|fenced"),
        "0s",
        ("run", "kind"),
        "{{ $labels.run }}: two attempts of the run write at once ({{ $labels.kind }})",
        "A newer attempt began while an older one's processes still ran. Only the newer one commits; end the older "
        "one's host, and find out who resumed a run that was alive.",
        faults.BOARD,
        faults.KINDS,
    ),
)

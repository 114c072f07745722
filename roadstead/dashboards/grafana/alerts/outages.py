"""Alerts for what does not answer."""

from __future__ import annotations

from roadstead.dashboards.grafana.alerts.base import Alert, of_run
from roadstead.dashboards.grafana.boards import engines, faults, staleness, trainer
from roadstead.dashboards.grafana.queries import EVERY, by
from roadstead.metrics import catalogue as c

ALERTS: tuple[Alert, ...] = (
    Alert(
        "RoadsteadProcessDown",
        "critical",
        'min by (run, role) (up{job="roadstead"}) == 0',
        "1m",
        ("run", "role"),
        "{{ $labels.run }}: the {{ $labels.role }} worker's metrics can't be read, it is dead or hangs",
        "On its machine the run's host starts it again; if the host is gone too, `roadstead resume {{ $labels.run }}` "
        "goes on from the last recorded step. After a run that was killed and is not resumed, remove its folder of "
        "target files.",
        faults.BOARD,
        faults.PROCESSES,
    ),
    Alert(
        "RoadsteadWorkerHangs",
        "warning",
        f"time() - {by('max', EVERY(c.PULSE), 'run', 'role')} > 60",
        "0s",
        ("run", "role"),
        "{{ $labels.run }}: the {{ $labels.role }} worker's event loop has stood still for a minute",
        "It answers no task. Its host replaces it; if that does not happen, look at the machine (swap, disk, GPU "
        "driver) and at the worker's log.",
        faults.BOARD,
        faults.PULSE,
    ),
    Alert(
        "RoadsteadRunSilent",
        "critical",
        f"time() - {of_run(c.STATUS_TIMESTAMP)} > 120",
        "1m",
        ("run",),
        "{{ $labels.run }}: the run has not said what its state is for two minutes",
        "Its workflow can't be queried: Temporal is down or overloaded, or no orchestrator worker polls. Nothing is "
        "lost; all other numbers about the run are old until it answers.",
        faults.BOARD,
        faults.SILENT,
    ),
    Alert(
        "RoadsteadEngineDown",
        "critical",
        f"{by('max', EVERY(c.ENGINE_UP), 'run', 'engine')} == 0",
        "2m",
        ("run", "engine"),
        "{{ $labels.run }}: engine {{ $labels.engine }} is given no work",
        "It is down, stalled or refuses. Its groups are generated again by the others, if there are any. See its log "
        "in the run's logs folder; an out-of-memory at start wants a smaller engine.max_num_seqs.",
        engines.BOARD,
        engines.UP,
    ),
    Alert(
        "RoadsteadTrainerDown",
        "critical",
        f"{by('min', EVERY(c.TRAINER_UP), 'run')} == 0",
        "10m",
        ("run",),
        "{{ $labels.run }}: the trainer has been away for 10 minutes",
        "Booting and replaying steps takes minutes, not this long. See the trainer's log; a rank that keeps dying is "
        "out of memory or sees a broken GPU. Lower training.micro_batch_tokens, then resume.",
        trainer.BOARD,
        trainer.UP,
    ),
    Alert(
        "RoadsteadStuck",
        "warning",
        f"{of_run(c.STUCK_NOW)} > 300",
        "0s",
        ("run",),
        "{{ $labels.run }}: the trainer has waited 5 minutes for a batch that nothing can be admitted to",
        "Every slot of it is taken and some group is not finished. Set rollout.stuck_timeout_s with on_timeout: "
        "discard or truncate so that slow groups give way, and look at the engine that has them.",
        staleness.BOARD,
        staleness.STUCK_NOW,
    ),
)

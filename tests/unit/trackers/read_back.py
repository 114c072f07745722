"""What a tracker holds, read by its own library (W&B: from the file that `wandb sync` would upload)."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

Held = dict[str, list[tuple[int, float]]]
"""By metric: (step, value) in the order of the steps."""


def held(kind: str, folder: Path) -> Held:
    found = {"tensorboard": tensorboard_of, "mlflow": _mlflow, "wandb": _wandb}[kind](folder)
    return {name: sorted(values) for name, values in found.items()}


def doubled(held_: Held) -> list[tuple[str, int]]:
    """Metrics and steps that are there more than once."""
    return [
        (name, step)
        for name, values in held_.items()
        for step, times in Counter(step for step, _ in values).items()
        if times > 1
    ]


def tensorboard_of(folder: Path) -> Held:
    """Of the only run in `folder`; nothing when there is none yet."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    runs = list(folder.iterdir()) if folder.exists() else []
    if not runs:
        return {}
    (run,) = runs
    events = EventAccumulator(str(run), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def _mlflow(folder: Path) -> Held:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"file://{folder}")
    experiment = client.get_experiment_by_name("roadstead")
    (run,) = client.search_runs([experiment.experiment_id])
    return {
        name: [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, name)]
        for name in run.data.metrics
    }


def _wandb(folder: Path) -> Held:
    from roadstead.trackers.wandb_files import points

    (run,) = {path.stem.removeprefix("run-") for path in folder.glob("wandb/offline-run-*/run-*.wandb")}
    found: Held = {}
    for point in points(folder, run):
        for name, value in point.items():
            if "/" in name:
                found.setdefault(name, []).append((point["step"], float(value)))
    return found

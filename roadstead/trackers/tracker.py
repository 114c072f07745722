"""What Roadstead asks of a tracker.

Owns: the protocol, the name of a run in a tracker, the check that a tracker's library is installed.
Never touches: the libraries; each implementation imports its own when it is opened, so that nobody pays for the
others.
Invariant: implementations keep no position of their own: `logged` reads what the tracker holds.
A crash leaves: nothing, it is pure.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from roadstead.config import ConfigError, TrackerSection
from roadstead.storage.keys import RunKeys
from roadstead.storage.objects import ObjectStore

_DISTRIBUTIONS = {"wandb": "wandb", "mlflow": "mlflow-skinny", "tensorboard": "tensorboard"}
"""What to install for a kind; a kind is named as the module that it imports."""


class Tracker(Protocol):
    """One run in one tracker. Used by one thread; every method may block and may raise what its library raises."""

    def open(self, run: str, config: Mapping[str, Any]) -> None:
        """Begin the tracker's run of that name, or go on with it. config: nested, as run.json has it."""
        ...

    def logged(self, name: str) -> set[int]:
        """The steps at which the metric `name` is there already, whoever sent it."""
        ...

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add one point. `values` in their order: a tracker that can't add all at once adds the last one last."""
        ...

    def close(self) -> None:
        """Send what is buffered and end. Called once after `open`, whether or not it raised."""
        ...


def make_tracker(section: TrackerSection, folder: Path) -> Tracker:
    """folder: this machine's folder of the run, for what is written locally and not placed by `section.folder`."""
    if section.kind == "tensorboard":
        from roadstead.trackers.tensorboard_tracker import TensorBoardTracker

        return TensorBoardTracker(Path(section.folder) if section.folder else folder / "tensorboard")
    if section.kind == "mlflow":
        from roadstead.trackers.mlflow_tracker import MlflowTracker

        return MlflowTracker(section.project, section.url)
    from roadstead.trackers.wandb_tracker import WandbTracker

    place = Path(section.folder) if section.folder else folder / "wandb"
    return WandbTracker(section.project, place, section.url, offline=section.offline)


def run_name(store: ObjectStore, keys: RunKeys) -> str:
    """The run's id in every tracker: its name, and eight digits of run.json's digest. Raises ObjectMissing.

    The digits tell it from another run of the same name, on another bucket or on this one after a clean-up: going on
    with that one's points would pass over this one's.
    """
    return f"{keys.run_id}-{hashlib.sha256(store.get(keys.run)).hexdigest()[:8]}"


def check_installed(sections: Sequence[TrackerSection]) -> None:
    """Raises ConfigError for a tracker whose library is missing, with the command that installs it."""
    for i, section in enumerate(sections):
        if importlib.util.find_spec(section.kind) is None:
            raise ConfigError(
                f"trackers.{i}.kind: {section.kind}, but its library is not installed; "
                f"`pip install {_DISTRIBUTIONS[section.kind]}` (or `pip install 'roadstead[trackers]'`), or leave the "
                "tracker out"
            )


def flat(config: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Nested mappings to dotted keys, as the configuration's errors name them; lists stay whole."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{path}.{key}" if path else str(key)
        if isinstance(value, Mapping):
            found |= flat(value, name)
        else:
            found[name] = value
    return found

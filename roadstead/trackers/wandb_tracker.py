"""Weights & Biases: one run under an id of ours, online or in a folder for `wandb sync`.

Owns: the W&B run of that id. Never touches: this process's output, which W&B would otherwise record.
Invariant: a point is never refused for its step. W&B drops points whose own step counter goes back, so that counter
only counts points, and `step` is a metric that the charts are drawn against.
A crash leaves: online, points that W&B's own process still sends; offline, a folder whose file ends at a whole point.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from roadstead.trackers.wandb_files import points

_STEP = "step"
_GROUPS = ("train/*", "data/*", "eval/*")
_INIT_S = 60.0
"""For the server's answer when a run begins; the follower tries again."""
_in_use: list[WandbTracker] = []
_lock = threading.Lock()
"""W&B has one process of its own for all runs of this one. What `finish` said is written and the run's id is free again
only when that process has ended, so the last one to close ends it."""


class WandbTracker:
    def __init__(self, project: str, folder: Path, url: str | None, *, offline: bool) -> None:
        self._project, self._folder, self._url, self._offline = project, folder, url, offline
        self._run: Any = None
        self._points = 0
        """Offline: points of the run so far, over all of its folders, which are synced one after the other."""

    def open(self, run: str, config: Mapping[str, Any]) -> None:
        import wandb

        with _lock:
            _in_use.append(self)
        self._folder.mkdir(parents=True, exist_ok=True)
        if self._url is not None:
            wandb.setup(settings=wandb.Settings(base_url=self._url))
        self._points = sum(1 for _ in points(self._folder, run))
        while any(self._folder.glob(f"wandb/*run-{time.strftime('%Y%m%d_%H%M%S')}-{run}")):
            time.sleep(0.1)  # W&B names folders by the second, and what a second run writes into one is lost
        self._run = wandb.init(
            id=run,
            name=run,
            project=self._project,
            dir=str(self._folder),
            # None: as WANDB_MODE says.
            mode="offline" if self._offline else None,
            resume=None if self._offline else "allow",
            reinit="create_new",  # beside another tracker's run in this process
            settings=wandb.Settings(
                console="off",
                silent=True,
                disable_git=True,
                save_code=False,
                disable_job_creation=True,
                init_timeout=_INIT_S,
                x_disable_stats=True,
            ),
        )
        self._run.config.update(dict(config), allow_val_change=True)
        self._run.define_metric(_STEP, hidden=True)
        for name in _GROUPS:
            self._run.define_metric(name, step_metric=_STEP)

    def logged(self, name: str) -> set[int]:
        import wandb

        if self._run.offline:
            return {int(point[_STEP]) for point in points(self._folder, self._run.id) if name in point}
        if not self._run.resumed:
            return set()
        api = wandb.Api(overrides={"base_url": self._url} if self._url else None)
        run = api.run(f"{self._run.entity}/{self._run.project}/{self._run.id}")
        return {int(point[_STEP]) for point in run.scan_history(keys=[_STEP, name], use_cache=False)}

    def log(self, step: int, values: Mapping[str, float]) -> None:
        point = {_STEP: step, **values}
        if self._run.offline:
            self._run.log(point, step=self._points, commit=True)
            self._points += 1
        else:
            self._run.log(point)

    def close(self) -> None:
        import wandb

        try:
            if self._run is not None:
                self._run.finish()
        finally:
            self._run = None
            with _lock:
                _in_use.remove(self)
                if not _in_use:
                    wandb.teardown()

"""A run's records in a store, and a follower in a process of its own that can be killed.

As a program: `python -m tests.unit.trackers.records KIND FOLDER STEPS KILL_AFTER` follows a run of STEPS steps into a
tracker that writes under FOLDER, and kills itself right after point KILL_AFTER.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from roadstead.config import TrackerSection
from roadstead.storage import evals, runs, steps
from roadstead.storage.evals import EvaluationSettings, EvaluationSummary
from roadstead.storage.keys import RunKeys
from roadstead.storage.runs import RunRecord
from roadstead.storage.steps import StepRecord
from roadstead.storage.train_rows import TrainMetrics
from roadstead.trackers.follow import Follower
from roadstead.trackers.tracker import Tracker, make_tracker
from tests.support.memory_store import MemoryStore

KEYS = RunKeys("runs", "r")
CONFIG: dict[str, Any] = {"name": "r", "training": {"steps": 20, "learning_rate": 1e-3}, "engine": {"urls": []}}


def run_store(steps_: int = 0, **changes: Any) -> MemoryStore:
    store = MemoryStore()
    runs.create(
        store,
        KEYS,
        RunRecord(
            run_id="r",
            config=CONFIG,
            versions={},
            model_digest="m",
            dataset_digest="d",
            dataset_rows=8,
            created_at="2026-11-30T00:00:00+00:00",
        ).model_copy(update=changes),
    )
    for step in range(steps_):
        add_step(store, step)
    return store


def add_step(store: MemoryStore, step: int, attempt: int = 1, mean_reward: float | None = 0.5) -> None:
    steps.write(
        store,
        KEYS,
        StepRecord(
            run_id="r",
            attempt=attempt,
            step=step,
            batch_digest=f"b{step}",
            weights_in=f"w{step}",
            weights_out=f"w{step + 1}",
            rows=16,
            response_tokens=100 + step,
            max_staleness=1,
            mean_reward=mean_reward,
            terminal={f"g{2 * step:08d}": "trained", f"g{2 * step + 1:08d}": "dead-lettered"},
            ledger={},
            cursor=2 * step + 2,
            metrics=TrainMetrics(
                loss=1 / (step + 1),
                grad_norm=None if step == 3 else 0.25,
                grad_clipped=False,
                applied=True,
                learning_rate=1e-3,
                loss_tokens=90,
                importance_mean=1.0,
                importance_max=1.5,
                capped_share=0.0,
                kl_to_behavior=0.001,
            ),
        ),
    )


def add_evaluation(store: MemoryStore, version: int, mean_reward: float | None = 0.75) -> None:
    settings = EvaluationSettings(
        dataset="d",
        prompts=4,
        seed=0,
        environment="e",
        rewards=(),
        chat_template=False,
        group_size=1,
        temperature=1.0,
        max_tokens=8,
        max_turns=1,
    )
    evals.close(
        store,
        KEYS,
        EvaluationSummary(
            run_id="r",
            attempt=1,
            version=version,
            weights_digest=f"w{version}",
            settings=settings,
            evaluated=4,
            samples=4,
            mean_reward=mean_reward,
            unscored=1,
            components={"correct": 0.75, "odd (name)": 1.0},
            errors={"reward: late": 1},
            mean_tokens=3.5,
            finish_reasons={"stop": 4},
            failures={},
            skipped=None,
            seconds=2.5,
            digest=None,
            data=None,
            closed_at="2026-11-30T00:00:00+00:00",
        ),
    )


def tracker(kind: str, folder: Path) -> Tracker:
    url = f"file://{folder}" if kind == "mlflow" else None
    section = TrackerSection.model_validate({"kind": kind, "folder": str(folder), "url": url, "offline": True})
    return make_tracker(section, folder)


def follow_once(made: Tracker, store: MemoryStore) -> None:
    """All that is on record, and close."""
    stop = threading.Event()
    stop.set()
    Follower("test", made, store, KEYS).run(stop)


class _Killed:
    """Ends the process the hard way right after so many points: nothing is closed, nothing flushed by us."""

    def __init__(self, inner: Tracker, after: int) -> None:
        self._inner, self._left = inner, after

    def open(self, run: str, config: Mapping[str, Any]) -> None:
        self._inner.open(run, config)

    def logged(self, name: str) -> set[int]:
        return self._inner.logged(name)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._inner.log(step, values)
        self._left -= 1
        if self._left == 0:
            time.sleep(0.3)  # a tracker that writes beside this process has a part of it by then
            os.killpg(os.getpgid(0), signal.SIGKILL)

    def close(self) -> None:
        self._inner.close()


if __name__ == "__main__":
    kind_, folder_, steps_, kill_after = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    follow_once(_Killed(tracker(kind_, folder_), kill_after), run_store(steps_))

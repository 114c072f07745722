"""Every tracker, its real library writing locally: what was on record is what it holds, once."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from roadstead.config import ConfigError, TrackerSection
from roadstead.trackers import tracker as tracker_module
from roadstead.trackers.tracker import check_installed, run_name
from tests.unit.trackers.read_back import doubled, held
from tests.unit.trackers.records import KEYS, add_evaluation, add_step, follow_once, run_store, tracker

KINDS = ("tensorboard", "mlflow", "wandb")


@pytest.mark.parametrize("kind", KINDS)
def test_steps_and_evaluations_arrive_under_their_names_with_their_values(kind: str, tmp_path: Path) -> None:
    store = run_store(5)
    add_evaluation(store, 0, mean_reward=None)
    add_evaluation(store, 4)
    follow_once(tracker(kind, tmp_path), store)
    found = held(kind, tmp_path)
    assert found["train/loss"] == [(step, pytest.approx(1 / (step + 1))) for step in range(5)]
    assert found["train/grad_norm"] == [(step, 0.25) for step in (0, 1, 2, 4)], "null is no number"
    assert found["train/applied"] == [(step, 1.0) for step in range(5)]
    assert found["data/mean_reward"] == [(step, 0.5) for step in range(5)]
    assert found["data/response_tokens"] == [(step, 100.0 + step) for step in range(5)]
    assert found["data/groups/dead-lettered"] == [(step, 1.0) for step in range(5)]
    assert found["eval/mean_reward"] == [(4, 0.75)] and found["eval/unscored"] == [(0, 1.0), (4, 1.0)]
    assert found["eval/components/correct"] == [(0, 0.75), (4, 0.75)]
    assert found["eval/prompts"] == [(0, 4.0), (4, 4.0)] and found["eval/finish_reasons/stop"][0] == (0, 4.0)
    assert not doubled(found)


@pytest.mark.parametrize("kind", KINDS)
def test_a_follower_killed_in_the_middle_is_continued_without_a_loss_or_a_double(kind: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.unit.trackers.records", kind, str(tmp_path), "12", "5"]
    # A session of its own, killed whole: W&B's own process goes with it, as it does when a supervisor ends a worker.
    killed = subprocess.run(command, timeout=120, start_new_session=True, stdout=subprocess.DEVNULL)
    assert killed.returncode == -signal.SIGKILL
    follow_once(tracker(kind, tmp_path), run_store(12))
    found = held(kind, tmp_path)
    assert [step for step, _ in found["train/loss"]] == list(range(12))
    assert not doubled(found)


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_goes_on_in_the_same_place_and_a_late_evaluation_is_added(kind: str, tmp_path: Path) -> None:
    store = run_store(3)
    add_evaluation(store, 2)
    follow_once(tracker(kind, tmp_path), store)
    add_step(store, 3, attempt=2)
    add_evaluation(store, 0)  # closed after that of version 2
    follow_once(tracker(kind, tmp_path), store)
    found = held(kind, tmp_path)
    assert found["train/attempt"] == [(0, 1.0), (1, 1.0), (2, 1.0), (3, 2.0)]
    assert [step for step, _ in found["eval/mean_reward"]] == [0, 2]
    assert not doubled(found)


def test_a_point_of_which_mlflow_has_a_part_is_completed(tmp_path: Path) -> None:
    store = run_store(2)
    first = tracker("mlflow", tmp_path)
    follow_once(first, store)
    add_step(store, 2)
    first.open(run_name(store, KEYS), {})
    first.log(2, {"train/loss": 1 / 3, "data/rows": 16.0})  # as far as it came
    follow_once(tracker("mlflow", tmp_path), store)
    found = held("mlflow", tmp_path)
    assert [step for step, _ in found["train/loss"]] == [step for step, _ in found["train/attempt"]] == [0, 1, 2]
    assert not doubled(found)


def test_mlflow_has_the_configuration_of_the_first_opening_and_takes_odd_names(tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient

    store = run_store(1)
    add_evaluation(store, 0)
    follow_once(tracker("mlflow", tmp_path), store)
    made = tracker("mlflow", tmp_path)
    made.open(run_name(store, KEYS), {"training": {"learning_rate": 5.0}, "seed": 3})
    client = MlflowClient(tracking_uri=f"file://{tmp_path}")
    (run,) = client.search_runs([client.get_experiment_by_name("roadstead").experiment_id])
    assert run.data.params["training.learning_rate"] == "0.001" and run.data.params["seed"] == "3"
    assert run.data.metrics["eval/components/odd _name_"] == 1.0


def test_w_and_b_counts_points_so_that_its_own_step_never_goes_back(tmp_path: Path) -> None:
    from roadstead.trackers.wandb_files import points

    store = run_store(3)
    follow_once(tracker("wandb", tmp_path), store)
    add_evaluation(store, 0)
    add_step(store, 3)
    follow_once(tracker("wandb", tmp_path), store)
    found = list(points(tmp_path, run_name(store, KEYS)))
    assert [point["step"] for point in found] == [0, 1, 2, 3, 0]
    assert [point["_step"] for point in found] == [0, 1, 2, 3, 4]


def test_a_torn_file_of_w_and_b_is_read_up_to_its_last_whole_point(tmp_path: Path) -> None:
    from roadstead.trackers.wandb_files import points

    store = run_store(200)  # more than one block of the file
    follow_once(tracker("wandb", tmp_path), store)
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    whole, run = file.read_bytes(), run_name(store, KEYS)
    assert len(whole) > 2 * 32768
    assert [point["step"] for point in points(tmp_path, run)] == list(range(200))
    for cut in (0, 3, 7, 9, 32768, 32770, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:cut])
        read = [point["step"] for point in points(tmp_path, run)]
        assert read == list(range(len(read)))


def test_another_run_of_the_same_name_is_another_run(tmp_path: Path) -> None:
    first, second = run_store(2), run_store(3, created_at="2026-12-01T00:00:00+00:00")
    assert run_name(first, KEYS) != run_name(second, KEYS)
    follow_once(tracker("tensorboard", tmp_path), first)
    follow_once(tracker("tensorboard", tmp_path), second)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_tracker_whose_library_is_missing_is_refused_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    sections = [TrackerSection(kind="tensorboard"), TrackerSection(kind="mlflow")]
    check_installed(sections)
    monkeypatch.setattr(tracker_module.importlib.util, "find_spec", lambda name: None if name == "mlflow" else object())
    with pytest.raises(ConfigError, match=r"trackers\.1\.kind: mlflow.*pip install mlflow-skinny"):
        check_installed(sections)

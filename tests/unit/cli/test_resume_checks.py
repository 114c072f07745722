"""What a resume may change, judged on what S3 holds."""

from __future__ import annotations

from typing import Any

import pytest

from roadstead.cli.begin import check_resume, component_versions, recorded_config
from roadstead.config import ConfigError, RunConfig
from roadstead.environments.prompts import DatasetError
from roadstead.storage import runs
from roadstead.storage.keys import RunKeys
from roadstead.storage.runs import RunRecord
from tests.support.memory_store import MemoryStore
from tests.unit.storage.test_recovery import config

KEYS = RunKeys("runs", "r")


def recorded(values: dict[str, Any], versions: dict[str, str] | None = None) -> MemoryStore:
    store = MemoryStore()
    record = RunRecord(
        run_id="r",
        config=values,
        versions=component_versions() if versions is None else versions,
        model_digest="m",
        dataset_digest="d",
        dataset_rows=4,
        created_at="2026-01-01T00:00:00+00:00",
    )
    runs.create(store, KEYS, record)
    return store


def with_training(base: RunConfig, **changes: Any) -> RunConfig:
    return base.model_copy(update={"training": base.training.model_copy(update=changes)})


def test_a_run_of_an_older_release_lacks_new_keys_and_goes_on() -> None:
    values = recorded_config(config())
    del values["rollout"]["max_turns"], values["data"]["rewards"]
    assert check_resume(config(), "d", (), recorded(values), KEYS) == []


def test_a_free_key_changes_and_one_of_the_experiment_must_be_allowed_by_name() -> None:
    store = recorded_config(config())
    assert check_resume(config(steps_=9), "d", (), recorded(store), KEYS) == ["training.steps"]
    faster = with_training(config(), learning_rate=1.0)
    with pytest.raises(ConfigError, match=r"--allow training\.learning_rate"):
        check_resume(faster, "d", (), recorded(store), KEYS)
    allowed = check_resume(faster, "d", ("training.learning_rate",), recorded(store), KEYS)
    assert allowed == ["training.learning_rate"]


@pytest.mark.parametrize("change", [{"ranks": 2}, {"zero_stage": 3}])
def test_what_checkpoints_are_sharded_by_never_changes(change: dict[str, int]) -> None:
    (key,) = change
    with pytest.raises(ConfigError, match=f"training.{key}.*can't change"):
        check_resume(
            with_training(config(), **change), "d", (f"training.{key}",), recorded(recorded_config(config())), KEYS
        )


def test_other_prompts_and_other_versions_are_refused() -> None:
    values = recorded_config(config())
    with pytest.raises(DatasetError, match="the same file"):
        check_resume(config(), "other", (), recorded(values), KEYS)
    old = recorded(values, {"vllm": "0.1"})
    with pytest.raises(ConfigError, match="--allow versions"):
        check_resume(config(), "d", (), old, KEYS)
    assert check_resume(config(), "d", ("versions",), old, KEYS) == []


def test_an_allowance_for_what_did_not_change_is_a_mistake_and_named() -> None:
    with pytest.raises(ConfigError, match=r"--allow rollout\.group_size"):
        check_resume(config(), "d", ("rollout.group_size",), recorded(recorded_config(config())), KEYS)

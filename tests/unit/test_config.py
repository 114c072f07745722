"""A configuration is runnable or refused, with the key, the value and the remedy."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from roadstead.config import ConfigError, load, parse

GOOD: dict[str, Any] = {
    "name": "a-run",
    "model": {"path": "model"},
    "data": {"prompts": "prompts.jsonl"},
    "training": {"steps": 10},
}


def changed(path: str, value: Any) -> dict[str, Any]:
    values = copy.deepcopy(GOOD)
    *sections, key = path.split(".")
    target = values
    for section in sections:
        target = target.setdefault(section, {})
    target[key] = value
    return values


def test_the_smallest_configuration_has_sane_defaults() -> None:
    config = parse(GOOD, "test")
    assert config.slots_per_buffer == config.staleness.groups_per_batch == 8
    assert config.staleness.max_staleness == 2
    assert config.temporal.address is None and config.storage.endpoint_url is None


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("rollout.group_size", 1, ["rollout.group_size", "1", "nothing to be compared with", ">= 2"]),
        ("rollout.top_p", 0.9, ["rollout.top_p", "0.9", "use 1.0"]),
        ("filters", {"min_tokens": 9, "max_tokens": 3}, ["filters.min_tokens", "9", "filters.max_tokens"]),
        ("training.mask_older_than", 2, ["training.mask_older_than", "2", "max_staleness"]),
        ("training.minibatches", 99, ["training.minibatches", "99", "groups_per_batch"]),
        ("engine", {"urls": ["http://h:1"], "replicas": 2}, ["engine.replicas", "engine.urls"]),
        ("staleness.slots_per_buffer", 4, ["staleness.slots_per_buffer", "4", "groups_per_batch: 8"]),
        ("staleness.max_staleness", -1, ["staleness.max_staleness", "-1", "greater than or equal to 0"]),
        ("staleness.max_stalenes", 2, ["staleness.max_stalenes", "unknown key", "max_staleness"]),
        ("stalenes", {}, ["stalenes", "unknown key", "staleness"]),
        ("rollout.max_tokens", 512, ["rollout.max_tokens", "512", "engine.max_model_len"]),
        ("rollout.temperature", 0, ["rollout.temperature", "0"]),
        ("training.zero_stage", 0, ["training.zero_stage", "0", "1, 2 or 3"]),
        ("training.steps", 0, ["training.steps", "0"]),
        ("training.learning_rate", "fast", ["training.learning_rate", "fast"]),
        ("name", "A Run!", ["name", "A Run!", "a-z"]),
        ("model.dtype", "float16", ["model.dtype", "float16", "bfloat16"]),
        ("engine.device", "tpu", ["engine.device", "tpu", "cuda"]),
    ],
)
def test_an_impossible_value_is_named_with_its_remedy(path: str, value: Any, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        parse(changed(path, value), "my.yaml")
    for word in ["my.yaml", *words]:
        assert word in str(error.value)


def test_every_error_is_told_at_once() -> None:
    values = changed("training.steps", 0)
    values["rollout"] = {"group_sise": 4}
    with pytest.raises(ConfigError) as error:
        parse(values, "test")
    assert "training.steps" in str(error.value) and "rollout.group_sise" in str(error.value)


def test_a_missing_key_is_named() -> None:
    with pytest.raises(ConfigError, match=r"training\.steps: missing"):
        parse({**GOOD, "training": {}}, "test")


def test_paths_are_taken_from_the_folder_of_the_yaml(tmp_path: Path) -> None:
    file = tmp_path / "sub" / "run.yaml"
    file.parent.mkdir()
    file.write_text(yaml.safe_dump(GOOD))
    config = load(file)
    assert config.model.path == str(file.parent / "model")
    assert load_again(config.dump(), tmp_path) == config


def load_again(text: str, folder: Path) -> Any:
    (folder / "again.yaml").write_text(text)
    return load(folder / "again.yaml")


@pytest.mark.parametrize("text", ["- a\n- b\n", "name: [", ""])
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"bad\.yaml"):
        load(tmp_path / "bad.yaml")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml.*No such file"):
        load(tmp_path / "none.yaml")

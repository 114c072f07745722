"""What a run is refused for before anything is started: trajectories nobody asked for, a tracker without a library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from roadstead.cli.begin import check_inputs
from roadstead.config import ConfigError, RunConfig, parse
from roadstead.environments.prompts import DatasetError
from roadstead.trackers import tracker

GROUP = [{"response_token_ids": [5], "behavior_logprobs": [-1.0], "reward": float(i)} for i in range(2)]


def config(folder: Path, **sections: Any) -> RunConfig:
    prompts = folder / "prompts.jsonl"
    rows = [{"prompt": "1+1="}, {"prompt": "2+2=", "prompt_id": "taught", "trajectories": GROUP}]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {
        "name": "r",
        "model": {"path": "m"},
        "data": {"prompts": str(prompts), **sections.pop("data", {})},
        "rollout": {"group_size": 2},
        "training": {"steps": 1},
        **sections,
    }
    return parse(values, "test")


def test_trajectories_in_the_prompts_must_be_asked_for(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"row 1 \(prompt_id 'taught'\).*data\.train_on_external is false"):
        check_inputs(config(tmp_path), recorded=True)
    assert check_inputs(config(tmp_path, data={"train_on_external": True}), recorded=True).dataset_rows == 2


def test_a_tracker_needs_its_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = config(tmp_path, data={"train_on_external": True}, trackers=[{"kind": "wandb"}])
    check_inputs(asked, recorded=True)
    monkeypatch.setattr(tracker.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"trackers\.0\.kind: wandb.*pip install wandb"):
        check_inputs(asked, recorded=True)

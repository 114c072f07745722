"""A run's own log trained by another run: nothing is generated, everything is marked, nothing has an age."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from roadstead.storage import batches, steps
from roadstead.storage.audit import audit, verify
from tests.support.workplace import LIMIT_S, Workplace
from tests.unit.trackers.read_back import tensorboard_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * LIMIT_S)]
STEPS = 3


def test_a_log_is_replayed_into_another_run(workplace: Workplace, tmp_path: Path) -> None:
    workplace.run("source", training__steps=STEPS)
    prompts, replayed = workplace.folder / "prompts.jsonl", tmp_path / "replayed.jsonl"
    workplace.roadstead("batch", "replayable", "source", "0:", "-o", str(replayed), "--prompts", str(prompts))
    lines = [json.loads(line) for line in replayed.read_text().splitlines()]
    assert len(lines) == STEPS * 4

    data = {"prompts": str(replayed), "environment": "tests.support.tiny:DigitsEnvironment"}
    refused = workplace.start("refused", data=data)
    output, _ = refused.communicate(timeout=LIMIT_S)
    assert refused.returncode != 0 and "data.train_on_external is false" in output

    workplace.run(
        "replayed",
        data={**data, "train_on_external": True},
        training__steps=STEPS,
        trackers=[{"kind": "tensorboard", "folder": str(tmp_path / "tb")}],
    )
    trained = {}
    for step in range(STEPS):
        store, keys = workplace.store("source")
        commit = batches.find(store, keys, step)
        assert commit is not None
        trained |= {(f"source/{r['group_id']}", r["member"]): r for r in batches.read(store, commit).to_pylist()}
    store, keys = workplace.store("replayed")
    seen = set()
    for record in steps.all_of(store, keys):
        commit = batches.find(store, keys, record.step)
        assert commit is not None and commit.max_staleness == record.max_staleness == 0
        for row in batches.read(store, commit).to_pylist():
            source = trained[row["prompt_id"], row["member"]]
            for name in ("prompt_token_ids", "response_token_ids", "behavior_logprobs", "loss_mask", "reward"):
                assert row[name] == source[name]
            assert not row["from_live_policy"] and row["engine_id"] == "external"
            seen.add((row["prompt_id"], row["member"]))
    assert seen == set(trained), "the same prompts, in another order"
    assert verify(store, keys).problems == ()
    assert [f for f in audit(store, keys).findings if f.severity == "critical"] == []
    assert [step for step, _ in tensorboard_of(tmp_path / "tb")["train/loss"]] == list(range(STEPS))

"""Evaluations on S3: what is refused, what is adopted, what a summary counts, what a crash leaves."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pyarrow as pa
import pytest

from roadstead.config import parse
from roadstead.storage import batches, evals
from roadstead.storage.evals import EvaluationSettings, EvaluationSummary
from roadstead.storage.keys import RunKeys
from roadstead.storage.objects import ObjectCorrupt
from roadstead.storage.schema import SchemaError
from tests.support.memory_store import Crash, MemoryStore
from tests.support.rows import NOW, group_rows

KEYS = RunKeys("runs", "r")
VERSION = 4


def config(**evaluation: Any) -> Any:
    return parse(
        {
            "name": "r",
            "seed": 7,
            "model": {"path": "m"},
            "data": {"prompts": "p.jsonl", "environment": "a:train"},
            "training": {"steps": 1},
            "evaluation": {"prompts": "e.jsonl", **evaluation},
        },
        "test",
    )


def settings(prompts: int = 3, **evaluation: Any) -> EvaluationSettings:
    made = config(**{"group_size": 2, **evaluation})
    return evals.settings_of(made, made.evaluation, "fingerprint", prompts)


def samples(position: int, version: int = VERSION, **changes: Any) -> list[dict[str, Any]]:
    rows = group_rows(f"g{position:08d}", seed=position, version=version)
    kept = [{name: row[name] for name in row if name in evals.EVAL_SCHEMA.names} for row in rows]
    return [{**row, "version": version, "position": position, **changes} for row in kept]


def table(position: int, **changes: Any) -> pa.Table:
    return evals.table_from_rows(samples(position, **changes))


def summary(tables: list[pa.Table], **changes: Any) -> EvaluationSummary:
    return EvaluationSummary(
        **{
            "run_id": "r",
            "attempt": 1,
            "version": VERSION,
            "weights_digest": "w",
            "settings": settings(),
            **evals.numbers(tables),
            "failures": {},
            "skipped": None,
            "seconds": 1.5,
            "digest": None,
            "data": None,
            "closed_at": "2026-11-30T00:00:00+00:00",
            **changes,
        }
    )


def test_the_schema_has_what_describes_a_sample_and_nothing_that_describes_training() -> None:
    names = set(evals.EVAL_SCHEMA.names)
    assert {"response_token_ids", "behavior_logprobs", "version_spans", "reward", "seed", "prompt_text"} <= names
    assert not names & {"advantage", "staleness", "slot", "step", "group_id", "v_traj", "occupied_at", "reserved_at"}


@pytest.mark.parametrize(
    ("spans", "words"),
    [
        ([(VERSION, 0, 2), (VERSION + 1, 2, 4)], "expected version 4 on every token"),
        ([(VERSION - 1, 0, 4)], "expected version 4 on every token"),
        ([(VERSION, 0, 3)], "expected version 4 on every token"),
    ],
)
def test_a_token_of_another_version_refuses_the_table(spans: list[tuple[int, int, int]], words: str) -> None:
    column = [{"version": v, "start": a, "end": b} for v, a, b in spans]
    with pytest.raises(SchemaError, match=words):
        table(0, version_spans=column)
    whole = [{"version": VERSION, "start": 0, "end": 4}]
    with pytest.raises(SchemaError, match="kv_version_spans"):
        table(0, version_spans=whole, kv_version_spans=column)


def test_lists_of_unequal_length_and_missing_values_refuse_the_table() -> None:
    with pytest.raises(SchemaError, match=r"prompt 0 member 0.*differ in length"):
        table(0, behavior_logprobs=[-0.5])
    with pytest.raises(SchemaError, match="finish_reason: null"):
        table(0, finish_reason=None)
    with pytest.raises(SchemaError, match="one version"):
        evals.check(pa.concat_tables([table(0), table(1, version=5)]))


def test_staged_prompts_come_back_and_the_first_one_stays() -> None:
    store = MemoryStore()
    evals.stage(store, KEYS, settings(), table(1))
    evals.stage(store, KEYS, settings(), table(1, reward=0.25))
    assert evals.is_staged(store, KEYS, settings(), VERSION, 1)
    assert not evals.is_staged(store, KEYS, settings(), VERSION, 2)
    found = evals.staged(store, KEYS, settings(), VERSION)
    assert list(found) == [1] and found[1].equals(table(1))
    assert evals.staged(store, KEYS, settings(), VERSION + 1) == {}


def test_samples_made_under_other_settings_are_not_mixed_in() -> None:
    store = MemoryStore()
    evals.stage(store, KEYS, settings(), table(0))
    assert evals.staged(store, KEYS, settings(temperature=0.5), VERSION) == {}
    assert not evals.is_staged(store, KEYS, settings(prompts=4), VERSION, 0)


@pytest.mark.parametrize(
    "change", [{"temperature": 0.5}, {"group_size": 3}, {"max_tokens": 9}, {"environment": "b:other"}]
)
def test_every_setting_that_changes_samples_changes_the_digest(change: dict[str, Any]) -> None:
    assert settings(**change).digest != settings().digest
    assert settings().digest == settings().digest


def test_settings_fall_back_to_the_run_s_own() -> None:
    mine = settings()
    assert (mine.environment, mine.max_tokens, mine.seed) == ("a:train", config().rollout.max_tokens, 7)
    assert settings(every=3).digest == mine.digest, "how often is not how"


def test_a_summary_counts_what_is_there() -> None:
    rows = samples(0)
    rows[0] |= {"reward": 1.0, "reward_components": [("correct", 1.0), ("format", 0.5)], "finish_reason": "length"}
    rows[1] |= {"reward": None, "reward_components": [("correct", None), ("error: judge: OSError: full", None)]}
    counted = evals.numbers([evals.table_from_rows(rows), table(1, reward=0.0, reward_components=[("correct", 0.0)])])
    assert counted == {
        "evaluated": 2,
        "samples": 4,
        "mean_reward": pytest.approx(1 / 3),
        "unscored": 1,
        "components": {"correct": pytest.approx(1 / 3), "format": 0.5},
        "errors": {"judge: OSError: full": 1},
        "mean_tokens": 4.0,
        "finish_reasons": {"length": 1, "stop": 3},
    }
    nothing = evals.numbers([])
    assert (nothing["samples"], nothing["mean_reward"], nothing["mean_tokens"]) == (0, None, None)


def test_reasons_without_number_are_counted_together() -> None:
    reasons = Counter({f"line {i}": 1 for i in range(50)} | {"the usual": 9})
    told = evals.most_common(reasons)
    assert told["the usual"] == 9 and len(told) == 21 and sum(told.values()) == 59


def test_what_is_read_is_what_was_written_and_damage_is_noticed() -> None:
    store, tables = MemoryStore(), [table(0), table(1), table(2)]
    digest, data = evals.put_data(store, KEYS, pa.concat_tables(tables))
    closed = evals.close(store, KEYS, summary(tables, digest=digest, data=data))
    assert closed.complete and evals.is_closed(store, KEYS, VERSION)
    back = evals.read(store, closed)
    assert back.num_rows == 6 and back["response_token_ids"].to_pylist() == [
        row["response_token_ids"] for position in range(3) for row in samples(position)
    ]
    store.objects[data.key] = store.objects[data.key][:-20]
    with pytest.raises(ObjectCorrupt):
        evals.read(store, closed)
    assert evals.read(store, summary([])).num_rows == 0


def test_the_first_summary_stays() -> None:
    store = MemoryStore()
    first = evals.close(store, KEYS, summary([table(0)]))
    assert evals.close(store, KEYS, summary([], skipped="late")) == first
    assert evals.find(store, KEYS, VERSION) == first and evals.find(store, KEYS, VERSION + 1) is None
    assert not first.complete, "one prompt of three"
    assert evals.all_of(store, KEYS) == [first]


def test_a_crash_before_the_summary_leaves_a_version_that_is_evaluated_again() -> None:
    """One more prompt is there the second time: another table, another file, no conflict."""
    store = MemoryStore()
    evals.stage(store, KEYS, settings(), table(0))
    store.crash_before = 2
    with pytest.raises(Crash):
        _close(store)
    assert not evals.is_closed(store, KEYS, VERSION)
    store.crash_before = None
    evals.stage(store, KEYS, settings(), table(1))
    closed = _close(store)
    assert closed.evaluated == 2 and evals.read(store, closed).num_rows == 4


def _close(store: MemoryStore) -> EvaluationSummary:
    there = list(evals.staged(store, KEYS, settings(), VERSION).values())
    digest, data = evals.put_data(store, KEYS, pa.concat_tables(there))
    return evals.close(store, KEYS, summary(there, digest=digest, data=data))


def test_evaluations_lie_beside_the_batch_log() -> None:
    """Nothing that reads batches, groups or steps by key can meet them."""
    keys = {KEYS.eval_group(3, "d" * 64, 5), KEYS.eval_data(3, "d" * 64), KEYS.eval_summary(3)}
    assert keys == {
        "runs/r/evals/v=00000003/groups/dddddddddddddddd/p00000005.parquet",
        "runs/r/evals/v=00000003/data-dddddddddddddddd.parquet",
        "runs/r/evals/v=00000003/summary.json",
    }
    store = MemoryStore()
    evals.stage(store, KEYS, settings(), table(0))
    assert batches.find(store, KEYS, VERSION) is None


def test_times_are_kept_as_given() -> None:
    started = table(0)["started_at"][0].as_py()
    assert int(started.timestamp() * 1_000_000) == NOW + 1

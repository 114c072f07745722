"""The chaos checks find what they are there for: a small whole run passes, and each way to spoil it is named."""

from __future__ import annotations

import copy
import hashlib
import io
import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from roadstead.storage.digest import table_digest
from tests.chaos.checks import check

DATASET = ["p0", "p1", "p2", "p3"]
SPANS = [{"version": 0, "start": 0, "end": 2}, {"version": 1, "start": 2, "end": 3}]


class Run:
    """Two steps of two groups of two members, S = 1, as plain values that a test may spoil before they are stored."""

    def __init__(self) -> None:
        self.attempts = [{"attempt": 1, "fencing_token": "x", "from_version": 0, "terminal": {}}]
        self.ends: dict[int, dict[str, Any]] = {}
        self.batches = [self.batch(0, ["g00000000", "g00000001"]), self.batch(1, ["g00000002", "g00000003"])]
        self.staged = {
            f"groups/{rows[0]['group_id']}-a1.parquet": copy.deepcopy(rows)
            for batch in self.batches
            for rows in (batch["rows"][:2], batch["rows"][2:])
        }
        self.terminal = [dict.fromkeys(batch["groups"], "trained") for batch in self.batches]
        self.weights = ["w0", "w1", "w2"]
        self.cursor = 4
        self.extra: dict[str, bytes] = {}

    def batch(self, step: int, groups: list[str]) -> dict[str, Any]:
        rows = [self.row(step, slot, group, member) for slot, group in enumerate(groups) for member in range(2)]
        return {"groups": groups, "rows": rows, "attempt": 1}

    def row(self, step: int, slot: int, group: str, member: int) -> dict[str, Any]:
        spans = [{"version": 0, "start": 0, "end": 3}] if step == 0 else copy.deepcopy(SPANS)
        return {
            "step": step,
            "slot": slot,
            "group_id": group,
            "attempt": 1,
            "member": member,
            "prompt_id": DATASET[int(group[1:])],
            "response_token_ids": [1, 2, 3],
            "behavior_logprobs": [-0.5, -0.25, -0.125],
            "loss_mask": [True, True, True],
            "version_spans": spans,
            "v_traj": 0,
            "staleness": step,
            "reward": 1.0,
            "seed": member,
            "reserved_at": datetime(2026, 1, 1, tzinfo=UTC),
        }

    def store(self) -> dict[str, bytes]:
        config = {
            "staleness": {"max_staleness": 1, "groups_per_batch": 2},
            "rollout": {"group_size": 2},
            "training": {"steps": 2},
        }
        objects = {"run.json": dump({"config": config, "model_digest": "w0"})}
        for key, rows in self.staged.items():
            objects[key] = parquet(rows)[0]
        for step, batch in enumerate(self.batches):
            body, digest = parquet(batch["rows"])
            folder = f"batches/step={step:08d}"
            objects[f"{folder}/data-{digest[:16]}.parquet"] = body
            objects[f"{folder}/train-{digest[:16]}.parquet"] = b"results"
            objects[f"{folder}/_COMMIT.json"] = dump(
                {
                    "step": step,
                    "attempt": batch["attempt"],
                    "digest": digest,
                    "data": {
                        "key": f"runs/x/{folder}/data-{digest[:16]}.parquet",
                        "sha256": hashlib.sha256(body).hexdigest(),
                    },
                    "groups": [{"group_id": g, "attempt": 1} for g in batch["groups"]],
                }
            )
            objects[f"steps/step={step:08d}.json"] = dump(
                {
                    "step": step,
                    "batch_digest": digest,
                    "weights_in": self.weights[step],
                    "weights_out": self.weights[step + 1],
                    "terminal": self.terminal[step],
                    "cursor": self.cursor,
                    "metrics": {"applied": True},
                }
            )
            objects.update(self.version(step + 1, self.weights[step + 1], self.weights[step], digest))
        objects.update(self.version(0, "w0", None, None))
        for attempt in self.attempts:
            objects[f"attempts/{attempt['attempt']:06d}.json"] = dump(attempt)
        for number, end in self.ends.items():
            objects[f"attempts/{number:06d}-end.json"] = dump(end)
        return {**objects, **self.extra}

    def version(self, number: int, digest: str, parent: str | None, batch: str | None) -> dict[str, bytes]:
        key, body = f"weights/v={number:08d}/model.safetensors", digest.encode()
        file = {"key": f"runs/x/{key}", "sha256": hashlib.sha256(body).hexdigest()}
        manifest = {"digest": digest, "parent_digest": parent, "batch_digest": batch, "files": [file]}
        return {key: body, f"weights/v={number:08d}/manifest.json": dump(manifest)}


class Objects:
    def __init__(self, objects: dict[str, bytes]) -> None:
        self._objects = objects

    def get(self, key: str) -> bytes:
        return self._objects[key]

    def list(self, prefix: str) -> list[str]:
        return sorted(key for key in self._objects if key.startswith(prefix))


def dump(value: Any) -> bytes:
    return json.dumps(value).encode()


def parquet(rows: list[dict[str, Any]]) -> tuple[bytes, str]:
    table = pa.Table.from_pylist(rows)
    buffer = io.BytesIO()
    pq.write_table(table, buffer)
    return buffer.getvalue(), table_digest(table)


def violations(run: Run) -> list[str]:
    return check(Objects(run.store()), dataset=DATASET).violations


def test_a_whole_run_passes() -> None:
    verdict = check(Objects(Run().store()), dataset=DATASET)
    assert verdict.violations == []
    assert (verdict.batches, verdict.groups, verdict.terminal) == (2, 4, {"trained": 4})
    assert (verdict.max_staleness, verdict.trained_tokens, verdict.staged_tokens) == (1, 24, 24)


def test_ends_may_be_told_by_steps_attempts_and_their_ends() -> None:
    run = Run()
    run.cursor = 7
    run.terminal[1]["g00000004"] = "filtered"
    run.attempts.append({"attempt": 2, "fencing_token": "y", "from_version": 1, "terminal": {"g00000005": "expired"}})
    run.ends[1] = {"terminal": {"g00000006": "dead-lettered"}}
    assert violations(run) == []


def trained_twice(run: Run) -> None:
    run.batches[1] = run.batch(1, ["g00000001", "g00000003"])


def lost(run: Run) -> None:
    run.cursor = 5


def ended_twice(run: Run) -> None:
    run.attempts.append({"attempt": 2, "fencing_token": "y", "from_version": 1, "terminal": {"g00000001": "expired"}})


def told_but_not_trained(run: Run) -> None:
    run.cursor = 5
    run.terminal[1]["g00000004"] = "trained"


def past_the_cursor(run: Run) -> None:
    run.terminal[1]["g00000009"] = "expired"


def too_old(run: Run) -> None:
    for row in run.batches[1]["rows"]:
        row.update(version_spans=[{"version": -1, "start": 0, "end": 3}], v_traj=-1, staleness=2)


def from_the_future(run: Run) -> None:
    for row in run.batches[0]["rows"]:
        row["version_spans"] = [{"version": 1, "start": 0, "end": 3}]


def unstamped_tokens(run: Run) -> None:
    run.batches[1]["rows"][0]["version_spans"] = [{"version": 1, "start": 0, "end": 2}]


def admitted_too_late(run: Run) -> None:
    run.batches[1]["rows"][0]["v_traj"] = 1


def other_tokens_than_staged(run: Run) -> None:
    run.batches[1]["rows"][0]["response_token_ids"] = [9, 2, 3]


def never_staged(run: Run) -> None:
    del run.staged["groups/g00000002-a1.parquet"]


def broken_chain(run: Run) -> None:
    run.version = lambda n, d, parent, batch: Run.version(run, n, d, parent and "w0", batch)  # type: ignore[method-assign]


def did_not_move(run: Run) -> None:
    run.weights = ["w0", "w1", "w1"]


def half_a_batch(run: Run) -> None:
    run.batches[1]["rows"].pop()


def second_result(run: Run) -> None:
    run.extra["batches/step=00000001/train-0000000000000000.parquet"] = b"another"


def second_commit(run: Run) -> None:
    run.extra["batches/step=00000002/_COMMIT.json"] = b"{}"


def tampered_weights(run: Run) -> None:
    run.extra["weights/v=00000001/model.safetensors"] = b"other"


def hole_in_attempts(run: Run) -> None:
    run.attempts.append({"attempt": 3, "fencing_token": "y", "from_version": 1})


def same_token(run: Run) -> None:
    run.attempts.append({"attempt": 2, "fencing_token": "x", "from_version": 1})


def older_attempt_commits(run: Run) -> None:
    run.batches[0]["attempt"] = 2


def prompt_twice(run: Run) -> None:
    for row in [*run.batches[1]["rows"][2:], *run.staged["groups/g00000003-a1.parquet"]]:
        row["prompt_id"] = "p2"


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (trained_twice, "g00000001 is trained twice: in step 0 and in step 1"),
        (lost, "1 groups below the cursor 5 have no terminal state: ['g00000004']"),
        (ended_twice, "g00000001 ends twice: as trained in step 0, as expired in attempt 2"),
        (told_but_not_trained, "recorded as trained and not in a batch, or the other way: ['g00000004']"),
        (past_the_cursor, "1 groups at or past the cursor 4 have one: ['g00000009']"),
        (too_old, "versions [-1] in step 1, the bound is 1"),
        (from_the_future, "versions [1] in step 0, the bound is 1"),
        (unstamped_tokens, "spans do not cover its 3 tokens"),
        (admitted_too_late, "v_traj 1 is above its oldest token's 0"),
        (other_tokens_than_staged, "g00000002 differs from what was staged as groups/g00000002-a1.parquet"),
        (never_staged, "g00000002 differs from what was staged as groups/g00000002-a1.parquet"),
        (broken_chain, "weights/v=00000002/manifest.json: ('w2', 'w0',"),
        (did_not_move, "steps/step=00000001.json: the weights did not move"),
        (half_a_batch, "3 rows of 2 groups, expected 2 x 2"),
        (second_result, "step 1: trained 2 batches"),
        (second_commit, "batches/: committed are"),
        (tampered_weights, "its sha256 is not the one in weights/v=00000001/manifest.json"),
        (hole_in_attempts, "attempts/: ['attempts/000001.json', 'attempts/000003.json']"),
        (same_token, "two attempts share a fencing token"),
        (older_attempt_commits, "attempt 1 committed after attempt 2"),
        (prompt_twice, "epoch 0: prompts trained twice: ['p2']"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_what_is_spoilt_is_named(spoil: Callable[[Run], None], says: str) -> None:
    run = Run()
    spoil(run)
    found = violations(run)
    assert any(says in text for text in found), found

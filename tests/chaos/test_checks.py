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
        self.config: dict[str, Any] = {
            "staleness": {"max_staleness": 1, "groups_per_batch": 2},
            "rollout": {"group_size": 2},
            "training": {"steps": 2},
        }
        self.verdicts: dict[str, dict[str, Any]] = {}
        """By key of a staged group; those that have none were staged without."""
        self.letters: dict[str, dict[str, Any]] = {}
        self.evaluations: dict[int, dict[str, Any]] = {}
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
            "prompt_id": DATASET[int(group[1:]) % len(DATASET)],
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
        objects = {"run.json": dump({"config": self.config, "model_digest": "w0"})}
        for key, rows in self.staged.items():
            objects[key] = parquet(rows, self.verdicts.get(key))[0]
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
                    "attempt": batch["attempt"],
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
        for key, letter in self.letters.items():
            objects[key] = dump(letter)
        for version, evaluation in self.evaluations.items():
            objects.update(self.evaluated(version, **evaluation))
        return {**objects, **self.extra}

    def version(self, number: int, digest: str, parent: str | None, batch: str | None) -> dict[str, bytes]:
        key, body = f"weights/v={number:08d}/model.safetensors", digest.encode()
        file = {"key": f"runs/x/{key}", "sha256": hashlib.sha256(body).hexdigest()}
        manifest = {"digest": digest, "parent_digest": parent, "batch_digest": batch, "files": [file]}
        return {key: body, f"weights/v={number:08d}/manifest.json": dump(manifest)}

    # -- what a run may do besides ------------------------------------------------------------------------

    def filter(self) -> None:
        """g00000004 and g00000005 are filtered, g00000006 can't be generated."""
        self.config["filters"] = {"zero_variance": True, "functions": ["tests.chaos.test_checks:ends_in_nine"]}
        for rows in [*self.staged.values(), *(batch["rows"] for batch in self.batches)]:
            for row in rows:
                row["reward"] = float(row["member"])
        for group, reason in (("g00000004", "zero_variance"), ("g00000005", "ends_in_nine: a nine")):
            rows = [self.row(1, 0, group, member) for member in range(2)]
            for row in rows:
                del row["step"], row["slot"], row["staleness"]
                if reason != "zero_variance":
                    row.update(reward=float(row["member"]), response_token_ids=[1, 2, 9])
            self.staged[f"groups/{group}-a1.parquet"] = rows
            self.verdicts[f"groups/{group}-a1.parquet"] = {"filtered": reason, "aborted_members": 0}
        self.cursor = 7
        self.terminal[1] |= {"g00000004": "filtered", "g00000005": "filtered", "g00000006": "dead-lettered"}
        self.letters["dead-letters/g00000006-a1.json"] = letter("g00000006", 1)

    def evaluate(self) -> None:
        """Versions 0 and 2: two prompts, two samples each."""
        self.config["evaluation"] = {"every": 3, "group_size": 2}
        for version in (0, 2):
            rows = [self.sample(version, position, member) for position in range(2) for member in range(2)]
            self.evaluations[version] = {"rows": rows, "told": {}}

    def sample(self, version: int, position: int, member: int) -> dict[str, Any]:
        return {
            "version": version,
            "position": position,
            "member": member,
            "prompt_id": f"e{position}",
            "response_token_ids": [4, 5],
            "behavior_logprobs": [-0.5, -0.25],
            "loss_mask": [True, True],
            "version_spans": [{"version": version, "start": 0, "end": 2}],
            "reward": float(member),
            "seed": 10 * position + member,
        }

    def evaluated(self, version: int, rows: list[dict[str, Any]], told: dict[str, Any]) -> dict[str, bytes]:
        """told: what the summary says beside the truth."""
        folder = f"evals/v={version:08d}"
        body, digest = parquet(rows)
        key = f"{folder}/data-{digest[:16]}.parquet"
        positions = {row["position"] for row in rows}
        summary = {
            "version": version,
            "weights_digest": self.weights[version],
            "settings": {"prompts": 2},
            "samples": len(rows),
            "evaluated": len(positions),
            "mean_reward": sum(row["reward"] for row in rows) / len(rows),
            "failures": {},
            "skipped": None,
            "digest": digest,
            "data": {"key": f"runs/x/{key}", "sha256": hashlib.sha256(body).hexdigest()},
            **told,
        }
        staged = {
            f"{folder}/groups/0123456789abcdef/p{position:08d}.parquet": parquet(
                [row for row in rows if row["position"] == position]
            )[0]
            for position in positions
        }
        return {**staged, key: body, f"{folder}/summary.json": dump(summary)}


class Objects:
    def __init__(self, objects: dict[str, bytes]) -> None:
        self._objects = objects

    def get(self, key: str) -> bytes:
        return self._objects[key]

    def list(self, prefix: str) -> list[str]:
        return sorted(key for key in self._objects if key.startswith(prefix))


def dump(value: Any) -> bytes:
    return json.dumps(value).encode()


def letter(group: str, attempt: int) -> dict[str, Any]:
    return {"group_id": group, "attempt": attempt, "prompt_id": DATASET[int(group[1:]) % 4], "reason": "can't begin"}


def ends_in_nine(rows: list[dict[str, Any]]) -> str | None:
    """A filter."""
    return "a nine" if all(row["response_token_ids"][-1] == 9 for row in rows) else None


def parquet(rows: list[dict[str, Any]], verdict: dict[str, Any] | None = None) -> tuple[bytes, str]:
    table = pa.Table.from_pylist(rows)
    if verdict is not None:
        table = table.replace_schema_metadata({"roadstead.verdict": json.dumps(verdict)})
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
    run.terminal[1]["g00000004"] = "discarded"
    run.attempts.append({"attempt": 2, "fencing_token": "y", "from_version": 1, "terminal": {"g00000005": "expired"}})
    run.ends[1] = {"terminal": {"g00000006": "discarded"}}
    assert violations(run) == []


def test_a_run_that_filters_loses_prompts_and_evaluates_passes() -> None:
    run = Run()
    run.filter()
    run.evaluate()
    verdict = check(Objects(run.store()), dataset=DATASET)
    assert verdict.violations == []
    assert verdict.terminal == {"trained": 4, "filtered": 2, "dead-lettered": 1}
    assert verdict.evaluations == 2


def test_what_died_with_its_attempt_may_be_begun_again_or_stay_undone() -> None:
    run = Run()
    run.filter()
    run.evaluate()
    run.attempts.append({"attempt": 2, "fencing_token": "y", "from_version": 1, "terminal": {}})
    run.batches[1]["attempt"] = 2
    # g00000002 was dead-lettered by attempt 1, which died before a record said so, and trained by attempt 2.
    run.letters["dead-letters/g00000002-a1.json"] = letter("g00000002", 1)
    del run.evaluations[0]
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


def other_prompt_in_another_attempt(run: Run) -> None:
    run.staged["groups/g00000003-a2.parquet"] = [
        {**row, "attempt": 2, "prompt_id": "p1"} for row in run.staged["groups/g00000003-a1.parquet"]
    ]


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
        (prompt_twice, "epoch 0: prompts served twice: ['p2']"),
        (other_prompt_in_another_attempt, "g00000003 has two prompts: p3 and p1"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_what_is_spoilt_is_named(spoil: Callable[[Run], None], says: str) -> None:
    run = Run()
    spoil(run)
    found = violations(run)
    assert any(says in text for text in found), found


def half_a_group(run: Run) -> None:
    run.staged["groups/g00000004-a1.parquet"].pop()


def surplus_member(run: Run) -> None:
    run.staged["groups/g00000004-a1.parquet"].append(run.row(1, 0, "g00000004", 2))


def same_seed(run: Run) -> None:
    run.staged["groups/g00000004-a1.parquet"][1]["seed"] = 0


def nobody_was_aborted(run: Run) -> None:
    run.config["rollout"]["extra_members"] = 1


def filtered_and_trained(run: Run) -> None:
    run.verdicts["groups/g00000001-a1.parquet"] = {"filtered": "zero_variance"}


def filtered_without_a_verdict(run: Run) -> None:
    del run.verdicts["groups/g00000004-a1.parquet"]


def not_filtered(run: Run) -> None:
    """A group without an advantage is trained."""
    for row in [*run.batches[0]["rows"][:2], *run.staged["groups/g00000000-a1.parquet"]]:
        row["reward"] = 1.0


def other_filter(run: Run) -> None:
    run.verdicts["groups/g00000005-a1.parquet"]["filtered"] = "zero_variance"


def no_letter(run: Run) -> None:
    run.letters.clear()


def letter_of_a_later_attempt(run: Run) -> None:
    run.letters = {"dead-letters/g00000006-a2.json": letter("g00000006", 2)}


def letter_of_a_trained_group(run: Run) -> None:
    run.letters["dead-letters/g00000001-a1.json"] = letter("g00000001", 1)


def misnamed_letter(run: Run) -> None:
    run.letters["dead-letters/g00000006-a2.json"] = letter("g00000006", 1)


def letter_without_a_reason(run: Run) -> None:
    run.letters["dead-letters/g00000006-a1.json"]["reason"] = ""


def evaluated_in_part_by_another_version(run: Run) -> None:
    run.evaluations[2]["rows"][3]["version_spans"] = [
        {"version": 1, "start": 0, "end": 1},
        {"version": 2, "start": 1, "end": 2},
    ]


def unstamped_sample(run: Run) -> None:
    run.evaluations[2]["rows"][0]["version_spans"][0]["end"] = 1


def evaluated_other_weights(run: Run) -> None:
    run.evaluations[2]["told"]["weights_digest"] = "w1"


def not_due(run: Run) -> None:
    run.evaluations[1] = {"rows": [run.sample(1, 0, m) for m in range(2)], "told": {"failures": {"late": 1}}}


def not_evaluated(run: Run) -> None:
    del run.evaluations[0]


def last_one_missing(run: Run) -> None:
    del run.evaluations[2]
    run.attempts.append({"attempt": 2, "fencing_token": "y", "from_version": 1, "terminal": {}})


def sample_missing(run: Run) -> None:
    run.evaluations[2]["rows"].pop()


def other_mean(run: Run) -> None:
    run.evaluations[2]["told"]["mean_reward"] = 0.75


def prompt_missing(run: Run) -> None:
    run.evaluations[2]["rows"] = run.evaluations[2]["rows"][:2]


def tampered_samples(run: Run) -> None:
    run.evaluations[2]["told"]["data"] = {**data_of(run, 2), "sha256": "0"}


def lost_samples(run: Run) -> None:
    run.evaluations[2]["told"]["data"] = {**data_of(run, 2), "key": "runs/x/evals/v=00000002/data-0.parquet"}


def trained_on_the_evaluation(run: Run) -> None:
    """A sample of the evaluation is a member of g00000003."""
    for rows in (run.staged["groups/g00000003-a1.parquet"], run.batches[1]["rows"][2:]):
        kept = ("prompt_id", "seed", "response_token_ids", "behavior_logprobs")
        run.evaluations[2]["rows"][0].update({k: copy.deepcopy(rows[0][k]) for k in kept})
        run.evaluations[2]["rows"][0].update(loss_mask=[True] * 3, version_spans=[{"version": 2, "start": 0, "end": 3}])


def not_asked_for(run: Run) -> None:
    del run.config["evaluation"]


def skipped_without_a_word(run: Run) -> None:
    run.evaluations[2]["told"] = {"data": None, "samples": 0, "evaluated": 0, "mean_reward": None}


def data_of(run: Run, version: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run.store()[f"evals/v={version:08d}/summary.json"])["data"]
    return found


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (half_a_group, "groups/g00000004-a1.parquet: 1 members, expected 0 to 1"),
        (surplus_member, "groups/g00000004-a1.parquet: 3 members, expected 0 to 1"),
        (same_seed, "groups/g00000004-a1.parquet: two members have the same seed"),
        (nobody_was_aborted, "groups/g00000004-a1.parquet: tells of 0 members that were aborted, expected 1"),
        (filtered_and_trained, "groups/g00000001-a1.parquet: filtered (zero_variance), and trained"),
        (filtered_without_a_verdict, "g00000004 ends as filtered in step 1, and no verdict says why"),
        (not_filtered, "groups/g00000000-a1.parquet: filtered as None, the filters say 'zero_variance'"),
        (other_filter, "filtered as 'zero_variance', the filters say 'ends_in_nine: a nine'"),
        (no_letter, "g00000006 ends as dead-lettered in step 1, and there is no letter"),
        (letter_of_a_later_attempt, "g00000006 ends as dead-lettered in step 1, and there is no letter"),
        (letter_of_a_trained_group, "a dead letter, and g00000001 ends as trained in step 0"),
        (misnamed_letter, "dead-letters/g00000006-a2.json: holds the letter of g00000006, attempt 1"),
        (letter_without_a_reason, "dead-letters/g00000006-a1.json: gives no reason"),
        (evaluated_in_part_by_another_version, "over 2 tokens, expected version 2 alone"),
        (unstamped_sample, "over 2 tokens, expected version 2 alone"),
        (evaluated_other_weights, "evals/v=00000002/summary.json: of version 2 w1, expected w2"),
        (not_due, "evals/: versions [1] are evaluated and not due"),
        (not_evaluated, "evals/: versions [0] are due and not on record"),
        (last_one_missing, "evals/: versions [2] are due and not on record"),
        (sample_missing, "3 samples of 2 prompts, 2 of each expected"),
        (other_mean, "evals/v=00000002/summary.json: tells (4, 2, 0.75), its samples are (4, 2, 0.5)"),
        (prompt_missing, "evals/v=00000002/summary.json: 1 prompts evaluated, failures {}"),
        (tampered_samples, "its digests are not those in evals/v=00000002/summary.json"),
        (lost_samples, "its data evals/v=00000002/data-0.parquet is not there"),
        (trained_on_the_evaluation, "samples of prompts ['p3'] are staged for training too"),
        (not_asked_for, "and no evaluation is configured"),
        (skipped_without_a_word, "evals/v=00000002/summary.json: has no data, 0 samples, and no reason"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_what_is_spoilt_beside_the_batches_is_named(spoil: Callable[[Run], None], says: str) -> None:
    run = Run()
    run.filter()
    run.evaluate()
    spoil(run)
    found = violations(run)
    assert any(says in text for text in found), found

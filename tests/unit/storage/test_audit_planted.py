"""`audit` on runs with a planted cause: it must be the first finding, with exactly its rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from roadstead.staleness import TerminalState
from roadstead.storage import batches, groups, runs
from roadstead.storage.audit import Finding, audit, verify
from roadstead.storage.keys import RunKeys
from roadstead.storage.objects import canonical_json
from roadstead.storage.runs import CarriedGroup
from tests.support.audit_run import BOUND, MEMBERS, TEMPLATES, Row, SyntheticRun
from tests.support.memory_store import MemoryStore

KEYS = RunKeys("runs", "r")


def run(count: int = 6, seed: int = 0, **plants: Any) -> MemoryStore:
    store = MemoryStore()
    SyntheticRun(store, KEYS, seed=seed, **plants).write(count)
    return store


def top(store: MemoryStore) -> Finding:
    findings = audit(store, KEYS).findings
    assert findings, "the cause was not found"
    return findings[0]


def named(finding: Finding) -> set[tuple[int, str, int]]:
    return {(row.step, row.group_id, row.member) for row in finding.rows}


@pytest.mark.parametrize("seed", range(4))
def test_a_healthy_run_gives_no_finding(seed: int) -> None:
    report = audit(run(count=8, seed=100 + seed), KEYS)
    assert not report.findings
    assert report.steps == tuple(range(8)) and report.rows == 8 * 64 and len(report.checks) == 15


def test_the_same_log_gives_the_same_report() -> None:
    store = run(count=3)
    assert audit(store, KEYS) == audit(store, KEYS)


def test_one_missing_reward_in_64() -> None:
    def plant(step: int, rows: list[Row]) -> None:
        if step == 3:
            rows[17].update(reward=None, reward_components=None)

    finding = top(run(rows=plant))
    assert finding.check == "missing-reward" and finding.first_step == 3
    assert named(finding) == {(3, f"g{3 * 8 + 2:08d}", 1)}
    assert len(finding.environments) == 1 and finding.prompts == ("p26",)


def test_constant_rewards_from_a_step_on() -> None:
    def plant(step: int, rows: list[Row]) -> None:
        if step >= 4:
            for row in rows:
                if row["environment"] == "arithmetic":
                    row["reward"] = 0.0

    finding = top(run(count=8, rows=plant))
    assert finding.check == "constant-reward" and finding.first_step == 4
    assert finding.environments == ("arithmetic",) and finding.steps == tuple(range(4, 8))
    assert "100 %" in finding.title and "the same number" in finding.why
    assert len(finding.rows) == 4 * 6 * MEMBERS, "six of the eight groups of a step are arithmetic"


@pytest.mark.parametrize(("engine", "since"), [("engine-0", 0), ("engine-1", 0), ("engine-1", 5)])
def test_logprob_drift_of_one_of_two_engines(engine: str, since: int) -> None:
    def train(step: int, rows: list[Row], made: list[Row]) -> None:
        for i, row in enumerate(rows):
            if step >= since and row["engine_id"] == engine:
                # The engine reported 0.02 more than it sampled with.
                made[i].update(SyntheticRun.trained(row, made[i]["trainer_logprobs"] - np.float32(0.02)))

    finding = top(run(count=8, train=train))
    assert finding.check == "logprob-drift" and finding.engines == (engine,)
    assert finding.first_step == since and finding.confidence >= 0.9
    assert {row.engine_id for row in finding.rows} == {engine} and finding.steps == tuple(range(since, 8))
    assert "+0.02" in finding.title or "+0.01" in finding.title


def test_a_version_that_an_engine_only_pretended_to_load() -> None:
    def train(step: int, rows: list[Row], made: list[Row]) -> None:
        random = np.random.default_rng(step)
        for i, row in enumerate(rows):
            if step == 6 and row["head_version"] == 6:
                noise = random.normal(0, 0.2, len(row["loss_mask"])).astype(np.float32)
                made[i].update(SyntheticRun.trained(row, made[i]["trainer_logprobs"] + noise))

    finding = top(run(count=8, train=train))
    assert finding.check == "logprob-drift" and "version 6" in finding.title and finding.first_step == 6


def test_late_positions_that_the_engine_computes_differently() -> None:
    def train(step: int, rows: list[Row], made: list[Row]) -> None:
        for i, row in enumerate(rows):
            shift = np.where(np.arange(len(row["loss_mask"])) >= 31, np.float32(0.05), np.float32(0))
            made[i].update(SyntheticRun.trained(row, made[i]["trainer_logprobs"] - shift))

    finding = top(run(train=train))
    assert finding.check == "logprob-drift" and "31 to 62" in finding.title


@pytest.mark.parametrize("lying", [True, False])
def test_one_token_over_the_bound(lying: bool) -> None:
    def plant(step: int, rows: list[Row]) -> None:
        if step == 5:
            row = rows[9]
            tokens = len(row["loss_mask"])
            row["version_spans"] = [
                {"version": 5, "start": 0, "end": 3},
                {"version": 5 - BOUND - 1, "start": 3, "end": 4},
                {"version": 5, "start": 4, "end": tokens},
            ]
            row.update(tail_version=5, head_version=5 if lying else 5 - BOUND - 1, v_traj=5)

    finding = top(run(count=7, rows=plant))
    assert finding.check == "bound" and finding.first_step == 5 and finding.severity == "critical"
    assert named(finding) == {(5, "g00000041", 1)} and "token 3" in finding.why
    assert ("say otherwise" in finding.why) == lying


def test_an_old_token_outside_the_loss_is_no_breach() -> None:
    def plant(step: int, rows: list[Row]) -> None:
        if step == 5:
            row = rows[9]
            tokens = len(row["loss_mask"])
            row["version_spans"] = [{"version": 0, "start": 0, "end": 1}, {"version": 5, "start": 1, "end": tokens}]
            row["loss_mask"] = [False, *row["loss_mask"][1:]]
            row.update(head_version=5, tail_version=5, v_traj=0)

    assert not audit(run(count=7, rows=plant), KEYS).findings


def test_a_poisoned_environment_that_pays_one_template() -> None:
    def plant(step: int, rows: list[Row]) -> None:
        for row in rows:
            if step >= 2 and row["prompt_text"].startswith("Compute"):
                row["reward"] = 25.0 + row["member"]

    finding = top(run(rows=plant))
    assert finding.check == "outlying-reward" and finding.first_step == 2
    assert finding.templates == ("Compute # minus #.",) and finding.environments == (TEMPLATES[1][0],)
    assert {row.step for row in finding.rows} == {2, 3, 4, 5}
    assert len(finding.rows) == 4 * 2 * MEMBERS
    assert len([f for f in audit(run(rows=plant), KEYS).findings if f.check == "outlying-reward"]) == 1


def test_a_single_prompt_and_a_single_row_with_outlying_rewards() -> None:
    def prompt(step: int, rows: list[Row]) -> None:
        for row in rows:
            if row["prompt_id"] == "p21":
                row["reward"] = 9.0 + 0.1 * row["member"]

    def single(step: int, rows: list[Row]) -> None:
        if step == 4:
            rows[5]["reward"] = -1000.0

    finding = top(run(rows=prompt))
    assert finding.check == "outlying-reward" and finding.prompts == ("p21",) and finding.first_step == 2
    finding = top(run(rows=single))
    assert finding.check == "outlying-reward" and named(finding) == {(4, "g00000032", 5)}


@pytest.mark.parametrize("where", ["behavior_logprobs", "reward", "trainer_logprobs"])
def test_a_row_that_is_not_a_number(where: str) -> None:
    def plant(step: int, rows: list[Row]) -> None:
        if step == 2 and where == "behavior_logprobs":
            rows[33]["behavior_logprobs"][1] = float("nan")
        if step == 2 and where == "reward":
            rows[33].update(reward=float("nan"), advantage=float("nan"))

    def train(step: int, rows: list[Row], made: list[Row]) -> None:
        if step == 2 and where == "trainer_logprobs":
            made[33]["trainer_logprobs"][1] = np.nan
            made[33].update(SyntheticRun.trained(rows[33], made[33]["trainer_logprobs"]))

    finding = top(run(rows=plant, train=train))
    assert finding.check == "not-a-number" and finding.severity == "critical" and finding.first_step == 2
    assert named(finding) == {(2, "g00000020", 1)}
    origin = {"behavior_logprobs": "engine", "reward": "environment", "trainer_logprobs": "trainer's forward"}[where]
    assert origin in finding.why


def test_a_group_trained_twice() -> None:
    kept: list[Row] = []

    def plant(step: int, rows: list[Row]) -> None:
        if step == 1:
            kept.extend({**row} for row in rows[8:16])
        if step == 2:
            rows[40:48] = [{**row} for row in kept]

    found = audit(run(rows=plant), KEYS).findings
    finding = found[0]
    assert finding.check == "trained-twice" and finding.groups == ("g00000009",) and finding.first_step == 2
    assert {(row.step, row.slot) for row in finding.rows} == {(1, 1), (2, 5)} and len(finding.rows) == 2 * MEMBERS
    assert any(f.check == "terminal-states" and f.groups == ("g00000021",) for f in found[1:]), "whose place it took"


def test_a_truncated_parquet() -> None:
    store = run()
    commit = batches.find(store, KEYS, 4)
    assert commit is not None
    store.objects[commit.data.key] = store.objects[commit.data.key][:-200]
    finding = top(store)
    assert finding.check == "digests" and finding.first_step == 4 and "truncated" in finding.why
    assert commit.data.key in finding.keys and finding.groups == tuple(g.group_id for g in commit.groups)
    assert "staged groups" in finding.why, "how it can be had again"
    verdict = verify(store, KEYS)
    assert {p.step for p in verdict.problems} == {4} and verdict.problems[0].kind == "sha256"


@pytest.mark.parametrize("how", ["bytes", "commits"])
def test_a_swapped_batch(how: str) -> None:
    store = run()
    one, other = batches.find(store, KEYS, 1), batches.find(store, KEYS, 4)
    assert one and other
    pairs = {
        "bytes": (one.data.key, other.data.key),
        "commits": (KEYS.batch_commit(1), KEYS.batch_commit(4)),
    }[how]
    store.objects[pairs[0]], store.objects[pairs[1]] = store.objects[pairs[1]], store.objects[pairs[0]]
    finding = top(store)
    assert finding.check == "digests" and finding.first_step == 1 and finding.steps == (1, 4)
    assert "swapped with step 4" in finding.title
    if how == "bytes":
        assert finding.groups == tuple(g.group_id for g in one.groups)


def test_advantages_that_do_not_follow_from_rewards() -> None:
    def plant(step: int, rows: list[Row]) -> None:
        if step == 3:
            rows[2]["advantage"] = 3.0

    finding = top(run(rows=plant))
    assert finding.check == "advantages" and finding.first_step == 3 and (3, "g00000024", 2) in named(finding)


def test_members_that_share_a_seed() -> None:
    def plant(step: int, rows: list[Row]) -> None:
        if step == 2:
            source = max(rows[16:24], key=lambda row: len(row["loss_mask"]))
            copied = ("response_token_ids", "behavior_logprobs", "loss_mask", "version_spans", "turns")
            for row in rows[16:24]:
                row.update({name: source[name] for name in (*copied, "head_version", "tail_version")})

    finding = top(run(rows=plant))
    assert finding.check == "duplicates"
    assert named(finding) == {(2, "g00000018", member) for member in range(8)}


def test_a_jump_of_truncation() -> None:
    def plant(step: int, rows: list[Row]) -> None:
        if step >= 5:
            for row in rows:
                row["finish_reason"] = "length"

    finding = top(run(count=8, rows=plant))
    assert finding.check == "lengths" and finding.first_step == 5 and "100%" in finding.title


def test_staleness_that_costs_the_gradient() -> None:
    def train(step: int, rows: list[Row], made: list[Row]) -> None:
        for i, row in enumerate(rows):
            if step - row["head_version"] == 2:
                half = np.where(np.arange(len(row["loss_mask"])) % 4 == 0, np.float32(1.5), np.float32(-0.6))
                made[i].update(SyntheticRun.trained(row, made[i]["trainer_logprobs"] + half))

    findings = audit(run(count=8, train=train), KEYS).findings
    assert any(f.check == "importance" and "staleness 2" in f.title for f in findings)


def test_a_window_of_steps_looks_at_nothing_else() -> None:
    def plant(step: int, rows: list[Row]) -> None:
        if step == 1:
            rows[0].update(reward=None)

    store = run(rows=plant)
    report = audit(store, KEYS, range(2, 5))
    assert report.steps == (2, 3, 4) and not report.findings and any("window" in note for note in report.notes)
    assert audit(store, KEYS, range(0, 2)).findings
    with pytest.raises(ValueError, match="0:6"):
        audit(store, KEYS, range(9, 12))


def test_a_prompt_that_vanished_and_a_group_that_ended_twice() -> None:
    store = run()
    key = KEYS.step_record(2)
    store.objects[key] = store.objects[key].replace(b'"g00000017":"trained"', b'"g00000003":"expired"')
    found = {f.check: f for f in audit(store, KEYS).findings}
    assert found["terminal-states"].groups and found["prompts"].groups == ("g00000017",)
    assert any("g00000003" in f.groups and "more than once" in f.title for f in audit(store, KEYS).findings)


def test_a_group_changed_between_staging_and_batch() -> None:
    store, other = run(), MemoryStore()
    rows: list[Row] = groups.read(store, KEYS, "g00000010", 1, _digest(store, "g00000010")).to_pylist()
    rows[0]["response_text"] = "another"
    groups.stage(other, KEYS, rows)
    store.objects[KEYS.group("g00000010", 1)] = other.objects[KEYS.group("g00000010", 1)]
    finding = top(store)
    assert finding.check == "digests" and finding.first_step == 1 and finding.groups == ("g00000010",)


def _digest(store: MemoryStore, group: str) -> str:
    found = groups.find(store, KEYS, group, 1)
    assert found is not None
    return found.digest


def test_a_resumed_run_is_healthy_and_its_accounts_are_read() -> None:
    """A second attempt that adopted one staged group, let another expire, and was stopped before it trained."""

    def resumed(**terminal: TerminalState) -> MemoryStore:
        store = run(count=3)
        first = runs.attempts(store, KEYS)[0]
        second = first.model_copy(
            update={
                "attempt": 2,
                "carried": (CarriedGroup(group_id="g00000025", attempt=1, digest="d"),),
                "terminal": {"g00000024": "expired", **terminal},
            }
        )
        runs.open_attempt(store, KEYS, second)
        end = runs.find_end(store, KEYS, 1)
        assert end is not None
        runs.end_attempt(
            store,
            KEYS,
            end.model_copy(update={"attempt": 2, "how": "stopped", "cursor": 26, "carried": ("g00000025",)}),
        )
        return store

    assert not audit(resumed(), KEYS).findings
    assert "more than once" in top(resumed(g00000007="expired")).title
    assert "never drawn" in top(resumed(g00000026="expired")).title


def test_the_bound_is_that_of_the_attempt_which_made_the_batch() -> None:
    """A resume may allow more; what was trained before it is judged by what held before it."""
    store = run(count=4)
    first = runs.attempts(store, KEYS)[0]
    store.objects[KEYS.attempt(1)] = canonical_json(
        first.model_copy(update={"config": {"staleness": {"max_staleness": 0}}}).model_dump(mode="json")
    )
    finding = top(store)
    assert finding.check == "bound" and {row.step for row in finding.rows} <= {1, 2, 3}

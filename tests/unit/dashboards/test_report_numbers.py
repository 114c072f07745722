"""The numbers on the page are the numbers of the data, computed another way from the objects themselves."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import duckdb
import pyarrow as pa
import pytest

from roadstead.dashboards.report import numbers as numbers_module
from roadstead.dashboards.report import write_report
from roadstead.storage import batches, groups, runs, steps
from roadstead.storage.audit import audit
from roadstead.storage.keys import RunKeys
from tests.support.audit_run import BOUND, GROUPS, Row
from tests.support.memory_store import MemoryStore
from tests.support.page import Parsed, value
from tests.support.report_run import ReportRun

KEYS = RunKeys("runs", "r")
STEPS = 14


def plant(version: int, rows: list[Row]) -> None:
    if version == 4:
        rows[0]["reward"] = None


@pytest.fixture(scope="module")
def store() -> MemoryStore:
    store = MemoryStore()
    ReportRun(store, KEYS, rows=plant).write(STEPS)
    return store


@pytest.fixture(scope="module")
def page(store: MemoryStore, tmp_path_factory: pytest.TempPathFactory) -> Parsed:
    file = tmp_path_factory.mktemp("page") / "r.html"
    size = write_report(store, KEYS, file)
    assert size == file.stat().st_size
    return Parsed(file.read_text("utf-8"))


@pytest.fixture(scope="module")
def log(store: MemoryStore) -> Iterator[duckdb.DuckDBPyConnection]:
    """Every trained row, from the data files, not the stats or the index that the report reads."""
    commits = [batches.find(store, KEYS, step) for step in range(STEPS)]
    connection = duckdb.connect()
    connection.register("log", pa.concat_tables([batches.read(store, c) for c in commits if c]))
    yield connection
    connection.close()


def column(page: Parsed, table: str, label: str) -> dict[int, float | None]:
    head, *rows = page.tables[table]
    at = head.index(label)
    return {int(row[0]): value(row[at]) for row in rows}


def asked(log: duckdb.DuckDBPyConnection, what: str) -> dict[int, float]:
    return dict(log.sql(f"select step, {what} from log group by step").fetchall())


@pytest.mark.parametrize(
    ("table", "label", "sql"),
    [
        ("reward", "reward", "avg(reward)"),
        ("reward", "reward, deviation", "stddev_pop(reward)"),
        ("components", "short", "avg(reward_components['short'])"),
        ("trainable", "trainable", "count(*) filter (advantage <> 0 and reward is not null) / count(*)"),
        ("oldest", "oldest", "max(step - head_version)"),
        ("oldest", "mean", "avg(step - head_version)"),
        ("ages", "age 0", "count(*) filter (step = head_version)"),
        ("ages", "age 2", "count(*) filter (step - head_version = 2)"),
        ("tokens", "tokens", "sum(len(response_token_ids))"),
    ],
)
def test_a_chart_is_what_the_rows_say(
    page: Parsed, log: duckdb.DuckDBPyConnection, table: str, label: str, sql: str
) -> None:
    shown, expected = column(page, table, label), asked(log, sql)
    assert shown == pytest.approx(expected, rel=1e-3, abs=1e-9)
    assert page.data["charts"][table][label] == pytest.approx([expected[s] for s in range(STEPS)], rel=1e-5, abs=1e-9)


def test_the_bound_is_drawn_and_holds(page: Parsed) -> None:
    assert set(column(page, "oldest", "bound S").values()) == {BOUND}
    assert max(v or 0 for v in column(page, "oldest", "oldest").values()) == BOUND
    assert "none is older than S = 2" in page.text


def test_the_trainer_and_the_ledger_are_the_step_records(page: Parsed, store: MemoryStore) -> None:
    records = steps.all_of(store, KEYS)
    for table, label, name in (
        ("loss", "loss", "loss"),
        ("grad-norm", "grad norm", "grad_norm"),
        ("kl", "KL", "kl_to_behavior"),
        ("importance", "largest", "importance_max"),
        ("capped", "capped", "capped_share"),
    ):
        expected = {record.step: getattr(record.metrics, name) for record in records}
        assert column(page, table, label) == pytest.approx(expected, rel=1e-3)
    occupied = {r.step: sum(len(done) for done, _ in r.ledger["buffers"]) for r in records}
    reserved = {r.step: sum(len(open_) for _, open_ in r.ledger["buffers"]) for r in records}
    for label, expected in (("occupied", occupied), ("reserved", reserved)):
        shown = column(page, "slots", label)
        assert {step: count for step, count in expected.items() if shown.get(step) is not None} == shown
    cursors = [0] + [record.cursor for record in records]
    assert column(page, "admitted", "admitted") == {i: cursors[i + 1] - cursors[i] for i in range(STEPS)}
    assert set(column(page, "admitted", "(S + 1) × B").values()) == {(BOUND + 1) * GROUPS}  # noqa: RUF001


def test_throughput_leaves_the_pause_of_a_resume_out(page: Parsed, log: duckdb.DuckDBPyConnection) -> None:
    first = dict(log.sql("select v_traj, min(epoch_us(reserved_at)) from log group by 1").fetchall())
    tokens = asked(log, "sum(len(response_token_ids))")
    shown = column(page, "tokens-per-s", "tokens/s")
    resumed = STEPS // 2
    timed = {step for step, rate in shown.items() if rate is not None}
    assert timed and resumed - 1 not in timed, "attempt 2 began between the first uses of these versions"
    for step in timed - {0}:
        seconds = (first[step + 1] - first[step]) / 1e6
        assert shown[step] == pytest.approx(tokens[step] / seconds, rel=1e-3)
        assert seconds < 600, "the pause"


def test_waste_counts_every_group_once(page: Parsed, store: MemoryStore) -> None:
    ends: Counter[str] = Counter()
    for record in steps.all_of(store, KEYS):
        ends.update(record.terminal.values())
    for attempt in (1, 2):
        end = runs.find_end(store, KEYS, attempt)
        ends.update(end.terminal.values() if end else ())
    head, *rows = page.tables["ends"]
    shown = {row[0]: row for row in rows}
    assert head == ["end", "groups", "staged", "tokens"]
    assert {state: value(row[1]) for state, row in shown.items()} == dict(ends)
    assert ends["dead-lettered"] + ends["filtered"] > 0, "the run has waste to show"
    trained = {g.group_id for s in range(STEPS) if (c := batches.find(store, KEYS, s)) for g in c.groups}
    staged = [key.rsplit("/", 1)[1].removesuffix(".parquet").split("-a") for key in store.keys("runs/r/groups/")]
    wasted = [groups.find(store, KEYS, name, int(attempt)) for name, attempt in staged if name not in trained]
    shown_tokens = sum(value(row[3].split()[0]) or 0 for state, row in shown.items() if state != "trained")
    assert shown_tokens == sum(group.tokens for group in wasted if group)


def test_findings_are_the_audits(page: Parsed, store: MemoryStore) -> None:
    findings = audit(store, KEYS).findings
    assert findings, "a reward is missing"
    for finding in findings:
        assert finding.title in page.text and finding.why in page.text
    assert f"roadstead batch show r {findings[0].first_step}" in page.text


def test_attempts_and_what_they_changed(page: Parsed) -> None:
    _, first, second = page.tables["attempts"]
    assert first[0] == "1" and "killed" in first[5] and first[3] == f"0–{STEPS // 2 - 1}"  # noqa: RUF001
    assert second[0] == "2" and second[5].startswith("finished") and second[2] == str(STEPS // 2)
    assert second[8] == "training.learning_rate: 0.0001 → 5e-05"
    assert "attempts killed" in page.text


def test_every_step_has_its_command(page: Parsed, store: MemoryStore) -> None:
    _, *rows = page.tables["steps"]
    assert [row[-1] for row in rows] == [f"roadstead batch show r {step}" for step in range(STEPS)]
    rewards = [record.mean_reward for record in steps.all_of(store, KEYS)]
    assert [value(row[3]) for row in rows] == pytest.approx(rewards, rel=1e-3)


def test_bins_hold_all_rows_of_their_steps(
    store: MemoryStore, log: duckdb.DuckDBPyConnection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numbers_module, "MOST_BINS", 4)
    write_report(store, KEYS, tmp_path / "r.html", with_audit=False)
    page = Parsed((tmp_path / "r.html").read_text("utf-8"))
    assert page.data["width"] == 4 and page.data["bins"] == [0, 4, 8, 12]
    assert "drawn as 4 points of 4 steps each" in page.text
    expected = log.sql(
        """select avg(reward), max(step - head_version), count(*) filter (step - head_version = 2),
                  sum(len(response_token_ids)) / count(distinct step) from log group by step // 4 order by step // 4"""
    ).fetchall()
    charts = page.data["charts"]
    shown = zip(
        charts["reward"]["reward"],
        charts["oldest"]["oldest"],
        charts["ages"]["age 2"],
        charts["tokens"]["tokens"],
        strict=True,
    )
    for one, other in zip(shown, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-5)
    losses = [record.metrics.loss for record in steps.all_of(store, KEYS)]
    means = [statistics.fmean(losses[i : i + 4]) for i in (0, 4, 8, 12)]
    assert charts["loss"]["loss"] == pytest.approx(means, rel=1e-5)

"""The page is whole, safe and small, whatever the run is."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from roadstead.dashboards.report import write_report
from roadstead.dashboards.report.data import COLUMNS, RunData, read_run
from roadstead.dashboards.report.numbers import numbers_of
from roadstead.dashboards.report.page import render
from roadstead.storage import batches, runs
from roadstead.storage.keys import RunKeys
from roadstead.storage.objects import ObjectMissing
from roadstead.storage.runs import RunRecord
from roadstead.storage.schema import SCHEMA
from tests.support.audit_run import Row, SyntheticRun
from tests.support.memory_store import MemoryStore
from tests.support.page import Parsed
from tests.support.report_run import ReportRun, config

KEYS = RunKeys("runs", "r")
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'{{7*7}}&amp;"


def page_of(store: MemoryStore, folder: Path, *, with_audit: bool = True, keys: RunKeys = KEYS) -> Parsed:
    write_report(store, keys, folder / "page.html", with_audit=with_audit)
    return Parsed((folder / "page.html").read_text("utf-8"))


def made(store: MemoryStore, count: int, **changes: int) -> None:
    ReportRun(store, KEYS).write(count, **changes)


def test_no_request_leaves_the_page_and_no_script_but_its_own_runs(tmp_path: Path) -> None:
    store = MemoryStore()
    made(store, 3)
    page = page_of(store, tmp_path)
    policy = next(a["content"] for t, a in page.tags if t == "meta" and a.get("http-equiv"))
    assert policy and policy.startswith("default-src 'none'") and "script-src 'sha256-" in policy
    for tag, attributes in page.tags:
        assert tag not in {"iframe", "object", "embed", "form", "base", "img"}
        assert not any(name.startswith("on") for name in attributes), (tag, attributes)
        for name in ("src", "href"):
            target = attributes.get(name) or "#"
            assert target.startswith(("#", "data:,")), (tag, target)
    assert sum(tag == "script" for tag, _ in page.tags) == 2


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    def plant(version: int, rows: list[Row]) -> None:
        for row in rows:
            row.update(environment=HOSTILE, prompt_text=HOSTILE, prompt_id=HOSTILE, engine_id=HOSTILE)
            row["reward_components"] = [(HOSTILE, row["reward"]), ("b", 1.0)]
        rows[0]["reward"] = None

    store = MemoryStore()
    ReportRun(store, KEYS, rows=plant).write(3, killed_at=0)
    record = runs.read(store, KEYS)
    hostile = record.model_copy(update={"config": {**record.config, "model": {"path": HOSTILE}}})
    store.objects[KEYS.run] = hostile.model_dump_json().encode()
    page = page_of(store, tmp_path)
    assert HOSTILE in page.text, "it is shown, as it is"
    assert HOSTILE in page.data["charts"]["components"]
    assert sum(tag == "script" for tag, _ in page.tags) == 2 and not any(tag == "img" for tag, _ in page.tags)
    assert "49" not in page.text.split("Roadstead run report")[0], "nothing is evaluated"


def test_a_run_that_has_not_begun(tmp_path: Path) -> None:
    store = MemoryStore()
    record = RunRecord(
        run_id="r",
        config=config(5),
        versions={},
        model_digest="m",
        dataset_digest="d",
        dataset_rows=1,
        created_at="2026-01-01T00:00:00Z",
    )
    runs.create(store, KEYS, record)
    page = page_of(store, tmp_path)
    assert "never began" in page.text and "No batch is committed yet." in page.text
    assert page.data == {"width": 1, "bins": [], "charts": {}}


def test_one_step(tmp_path: Path) -> None:
    store = MemoryStore()
    made(store, 1)
    page = page_of(store, tmp_path)
    assert page.data["bins"] == [0] and len(page.tables["reward"]) == 2
    assert [row[-1] for row in page.tables["steps"][1:]] == ["roadstead batch show r 0"]


def test_a_run_of_another_hand_without_times_ledger_and_config(tmp_path: Path) -> None:
    store = MemoryStore()
    SyntheticRun(store, KEYS).write(3)
    page = page_of(store, tmp_path)
    assert "No step record with a ledger yet." not in page.text, "admissions are known from the cursors"
    assert "slots" not in page.data["charts"] and "tokens-per-s" not in page.data["charts"]
    assert page.data["charts"]["admitted"]["admitted"] == [8, 8, 8]


def test_gaps_and_broken_objects_are_notes_not_failures(tmp_path: Path) -> None:
    store = MemoryStore()
    made(store, 6)
    del store.objects[KEYS.step_record(2)]
    del store.objects[KEYS.batch_commit(2)]
    commit = batches.find(store, KEYS, 4)
    assert commit is not None
    store.objects[commit.stats.key] = store.objects[commit.stats.key][:-20]
    store.objects[KEYS.step_record(5)] = b"{}"
    page = page_of(store, tmp_path)
    reward = page.data["charts"]["reward"]["reward"]
    assert [value is None for value in reward] == [False, False, True, False, True, False]
    assert page.data["charts"]["loss"]["loss"][2] is None and page.data["charts"]["loss"]["loss"][5] is None
    assert "steps of which nothing is there" in page.text and KEYS.step_record(5) in page.text
    states = {row[0]: row[-2] for row in page.tables["steps"][1:]}
    assert states == {"0": "", "1": "", "2": "missing", "3": "", "4": "", "5": "not recorded"}


def test_no_such_run(tmp_path: Path) -> None:
    with pytest.raises(ObjectMissing):
        page_of(MemoryStore(), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_charts_have_words_and_tables(tmp_path: Path) -> None:
    store = MemoryStore()
    made(store, 4)
    page = page_of(store, tmp_path)
    plots = [a for t, a in page.tags if a.get("role") == "img"]
    assert len(plots) == len(page.data["charts"]) > 12
    for plot in plots:
        assert "at step" in (plot.get("aria-label") or "") and plot.get("tabindex") == "0"
    assert set(page.data["charts"]) <= set(page.tables)
    assert next(a["lang"] for t, a in page.tags if t == "html") == "en"


def test_ten_thousand_steps_are_under_three_megabytes() -> None:
    count, each = 10_000, 4
    run = grown(count, each)
    numbers = numbers_of(run)
    body = render(run, numbers)
    assert len(body.encode()) < 3_000_000, f"{len(body.encode())} bytes"
    page = Parsed(body)
    assert len(page.tables["steps"]) == count + 1
    assert numbers.width == 42 and "10,000 steps are drawn as 239 points of 42 steps each" in page.text
    assert sum(map(sum, numbers.ages.values())) == count * each, "no row is left out"


def grown(count: int, each: int) -> RunData:
    """A run of `count` steps of `each` rows without a store: the records of a short one, over and over."""
    store = MemoryStore()
    made(store, 8, killed_at=0)
    short = read_run(store, KEYS, with_audit=False, progress=lambda what, done, total: None)
    records = {s: short.records[s % 8].model_copy(update={"step": s}) for s in range(count)}
    commits = {s: short.commits[s % 8].model_copy(update={"step": s}) for s in range(count)}
    step = np.repeat(np.arange(count), each)
    start = int(datetime(2026, 1, 1, tzinfo=UTC).timestamp() * 1e6)
    times = start + step * 40_000_000
    age = np.minimum(step, np.tile(np.arange(each) % 3, count))
    values = {
        "step": step,
        "group_id": [f"g{i:08d}" for i in range(count * each)],
        "v_traj": step - age,
        "staleness": age,
        "from_live_policy": np.ones(count * each, dtype=bool),
        "reward": np.random.default_rng(0).random(count * each),
        "reward_components": [[("correct", 1.0), ("short", 0.5)]] * (count * each),
        "advantage": np.ones(count * each, dtype=np.float32),
        "reserved_at": times - age * 40_000_000,
        "started_at": times,
        "finished_at": times + 10,
        "occupied_at": times + 20,
    }
    schema = pa.schema([SCHEMA.field(name) for name in COLUMNS])
    rows = pa.table([pa.array(values[name], schema.field(name).type) for name in COLUMNS], schema=schema)
    return dataclasses.replace(short, steps=range(count), records=records, commits=commits, rows=rows)

"""SQL over a run's log on the real S3 server, and an audit and a verification of the same run over the wire."""

from __future__ import annotations

import uuid

import duckdb
import pytest

from roadstead.storage.audit import audit, verify
from roadstead.storage.audit.queries import connect, load_httpfs, secret
from roadstead.storage.keys import RunKeys
from roadstead.storage.objects import ObjectStore
from tests.support.audit_run import Row, SyntheticRun


@pytest.fixture(scope="module")
def keys(store: ObjectStore) -> RunKeys:
    keys = RunKeys("queries", uuid.uuid4().hex[:12])

    def plant(step: int, rows: list[Row]) -> None:
        if step == 2:
            rows[3].update(reward=None)

    SyntheticRun(store, keys, rows=plant).write(4)
    store.create(f"{keys.step_folder(1)}/stats-0000000000000000.parquet", b"an orphan of a killed attempt")
    return keys


def test_one_line_answers_over_scalars_tokens_and_training(store: ObjectStore, keys: RunKeys) -> None:
    sql = connect(store, keys)
    assert sql.sql("select step, count(*) from rows group by step order by step").fetchall() == [
        (step, 64) for step in range(4)
    ]
    assert sql.sql("select step, group_id, member from rows where reward is null").fetchall() == [(2, "g00000016", 3)]
    joined = sql.sql(
        """select count(*), max(abs(behavior_logprobs[1] - trainer_logprobs[1])) < 1 from batches
           join train using (step, group_id, member) where len(behavior_logprobs) = len(trainer_logprobs)"""
    )
    assert joined.fetchall() == [(4 * 64, True)]
    for view in ("rows", "batches", "train"):
        assert sql.sql(f"select count(*) from {view} where step = 3").fetchone() == (64,)
    assert sql.sql("select * from rows where step = 1").to_arrow_table().num_rows == 64


def test_a_plain_duckdb_reads_the_log_by_a_glob(store: ObjectStore, keys: RunKeys) -> None:
    """The line of docs/forensics.md, with a local store's secret; another run's prefix has no orphan to choke on."""
    clean = RunKeys("queries", uuid.uuid4().hex[:12])
    SyntheticRun(store, clean).write(2)
    plain = duckdb.connect()
    load_httpfs(plain)
    plain.execute(secret(store.address))
    found = plain.sql(
        f"select step, count(*) from read_parquet('{store.url(clean.root)}/batches/*/stats-*.parquet', "
        "hive_partitioning = false) group by step order by step"
    )
    assert found.fetchall() == [(0, 64), (1, 64)]


def test_the_audit_and_the_verification_over_the_wire(store: ObjectStore, keys: RunKeys) -> None:
    verdict = verify(store, keys)
    assert verdict.ok and verdict.steps == 4 and verdict.objects > 4 * 14
    (finding,) = audit(store, keys).findings
    assert finding.check == "missing-reward" and [(r.step, r.member) for r in finding.rows] == [(2, 3)]

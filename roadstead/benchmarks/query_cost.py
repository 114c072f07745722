"""Questions to the log of 1,000 steps x 128 rows over S3: `python -m roadstead.benchmarks.query_cost --endpoint URL`.

Owns: a synthetic log of commits and stats (no tokens) under `benchmark/`, and the timing of questions to it, from the
index and from the plain files. Never touches: a run's log.
Invariant: every question is asked over HTTP of a connection of its own; nothing is cached between two.
A crash leaves: the objects under `benchmark/`.
"""

from __future__ import annotations

import argparse
import statistics
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import duckdb
import numpy as np
import pyarrow as pa

from roadstead.benchmarks.persist_cost import realistic_batch
from roadstead.storage import schema
from roadstead.storage.audit import index
from roadstead.storage.audit.queries import load_httpfs, secret
from roadstead.storage.batches import BatchCommit, StoredFile
from roadstead.storage.digest import table_digest
from roadstead.storage.keys import RunKeys
from roadstead.storage.objects import ObjectStore, StoreAddress, canonical_json, sha256
from roadstead.storage.parquet import encode

QUESTIONS = {
    "mean reward a step": "select step, avg(reward) from {rows} group by step order by step",
    "staleness, all steps": "select staleness, count(*) from {rows} group by staleness order by staleness",
    "largest rewards and their rows": "select step, group_id, member, prompt_id, reward from {rows} "
    "order by abs(reward - (select median(reward) from {rows})) desc limit 20",
    "reward by environment and engine": "select environment, engine_id, count(*), avg(reward), stddev(reward) "
    "from {rows} group by all",
    "groups with constant rewards a step": "select step, count(*) filter (low = high) from (select step, group_id, "
    "min(reward) low, max(reward) high from {rows} group by all) group by step order by step",
    "one prompt over the run": "select step, member, reward from {rows} where prompt_id = 'p7' order by step, member",
    "rows of steps 640 to 645": "select * from {rows} where step between 640 and 645",
}


def write_log(store: ObjectStore, keys: RunKeys, steps: int) -> None:
    """Commits and stats files of `steps` batches of 128 rows; the data files that commits name do not exist."""
    stats = realistic_batch(tokens=4).select(list(schema.STATS_COLUMNS))
    random = np.random.default_rng(0)

    def put(step: int, rewards: np.ndarray) -> None:
        table = stats.set_column(
            stats.column_names.index("step"), stats.schema.field("step"), pa.array([step] * len(stats), pa.int64())
        )
        table = table.set_column(
            table.column_names.index("reward"), table.schema.field("reward"), pa.array(rewards, pa.float64())
        )
        names = [f"g{step * 16 + slot:08d}" for slot in range(16) for _ in range(8)]
        table = table.set_column(
            table.column_names.index("group_id"), table.schema.field("group_id"), pa.array(names, pa.string())
        )
        body, digest = encode(table), table_digest(table)
        file = StoredFile(key=keys.batch_stats(step, digest), bytes=len(body), sha256=sha256(body))
        store.create(file.key, body)
        commit = BatchCommit(
            run_id=keys.run_id,
            attempt=1,
            step=step,
            digest=digest,
            data=file.model_copy(update={"key": keys.batch_data(step, digest)}),
            stats=file,
            rows=len(table),
            response_tokens=0,
            max_staleness=1,
            groups=(),
        )
        store.create(keys.batch_commit(step), canonical_json(commit.model_dump(mode="json")))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(put, range(steps), [random.random(len(stats)) for _ in range(steps)]))


def seconds(store: ObjectStore, question: str, rows: str, repeats: int) -> list[float]:
    """Wall time of a question, a new connection each time; loading the extension is not counted."""
    found = []
    for _ in range(repeats):
        connection = duckdb.connect()
        load_httpfs(connection)
        connection.execute(secret(store.address))
        begin = time.perf_counter()
        answer = connection.execute(question.format(rows=rows)).to_arrow_table()
        found.append(time.perf_counter() - begin)
        assert answer.num_rows, "a question without an answer times nothing"
        connection.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--endpoint", required=True, help="S3 endpoint; credentials from the AWS environment")
    parser.add_argument("--bucket", default="roadstead")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    store = ObjectStore(StoreAddress(options.bucket, options.endpoint))
    keys = RunKeys("benchmark", uuid.uuid4().hex)
    begin = time.perf_counter()
    write_log(store, keys, options.steps)
    print(f"{options.steps} steps x 128 rows written in {time.perf_counter() - begin:.1f} s")
    begin = time.perf_counter()
    index.refresh(store, keys)
    built = time.perf_counter() - begin
    size = len(store.get(keys.index_rows))
    begin = time.perf_counter()
    index.refresh(store, keys)
    print(f"index: {size / 1e6:.1f} MB, built in {built:.1f} s, found fresh in {time.perf_counter() - begin:.2f} s")
    sources = {
        "index": (f"'{store.url(keys.index_rows)}'", options.repeats),
        "plain files": (
            f"read_parquet('{store.url(keys.root)}/batches/*/stats-*.parquet', hive_types={{'step': BIGINT}})",
            1,
        ),
    }
    print(f"{'seconds: best, median, worst':<40} " + " ".join(f"{name:>24}" for name in sources))
    for name, question in QUESTIONS.items():
        cells = []
        for rows, repeats in sources.values():
            found = seconds(store, question, rows, repeats)
            cells.append(f"{min(found):8.3f}{statistics.median(found):8.3f}{max(found):8.3f}")
        print(f"{name:<40} " + " ".join(f"{cell:>24}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()

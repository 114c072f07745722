"""What persisting a batch costs: `python -m roadstead.benchmarks.persist_cost [--endpoint URL --bucket NAME]`.

Owns: one realistic batch and the timing of what becomes of it. Never touches: a run's log; what it writes lies under
`benchmark/`.
Invariant: every figure is measured in the same process on the same table as the bare pyarrow write beside it, the
kinds taking turns, so that whatever else the machine does hits all of them alike.
A crash leaves: the objects under `benchmark/`.

The batch: 128 trajectories of 10,000 response tokens, 16 groups of 8, ids Zipf-distributed as text is, logprobs of a
gamma law. "bare" is `pyarrow.parquet.write_table(table, buffer)` with pyarrow's defaults, and reading that back.
"""

from __future__ import annotations

import argparse
import functools
import io
import os
import statistics
import time
import uuid
from collections.abc import Callable
from typing import IO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from roadstead.storage import batches, schema
from roadstead.storage.digest import table_digest
from roadstead.storage.keys import RunKeys
from roadstead.storage.objects import ObjectMissing, ObjectStore, StoreAddress, sha256
from roadstead.storage.parquet import decode, encode

_GROUPS, _MEMBERS, _TOKENS = 16, 8, 10_000
_STEP_S = 60.0
"""Step time that the share is stated for. 128 x 10k tokens are 1.3 M tokens a step; at 20,000 trained and generated
tokens a second, a brisk 8-GPU machine with a 7B model, that takes a minute."""


_ASSEMBLE = "ours: assemble (rows, table, check)"


class _Memory(ObjectStore):
    """The protocol without a store behind it: what it costs in this process."""

    def __init__(self) -> None:
        self.address, self._objects = StoreAddress(bucket="memory"), dict[str, bytes]()

    def _create(self, key: str, body: bytes | IO[bytes], digest: str | None = None) -> bool:
        created = key not in self._objects
        self._objects.setdefault(key, body if isinstance(body, bytes) else body.read())
        return created

    def get(self, key: str, digest: str | None = None) -> bytes:
        if key not in self._objects:
            raise ObjectMissing(key)
        return self._objects[key]


def realistic_batch(groups: int = _GROUPS, members: int = _MEMBERS, tokens: int = _TOKENS, seed: int = 0) -> pa.Table:
    """A batch of the schema, checked. Advantages, versions and times are plausible and of no meaning."""
    random = np.random.default_rng(seed)
    rows = []
    for slot in range(groups):
        prompt = [int(t) for t in random.integers(0, 150_000, 200)]
        for member in range(members):
            ids = (random.zipf(1.1, tokens) % 150_000).astype(np.int32)
            turn = tokens // 2
            rows.append(
                {
                    "run_id": "benchmark",
                    "attempt": 1,
                    "step": 7,
                    "slot": slot,
                    "group_id": f"g{slot:08d}",
                    "member": member,
                    "prompt_id": f"p{slot}",
                    "prompt_text": "prompt " * 100,
                    "prompt_token_ids": prompt,
                    "response_text": " ".join(map(str, ids)),
                    "response_token_ids": ids,
                    "loss_mask": np.ones(tokens, dtype=bool),
                    "behavior_logprobs": -random.gamma(0.5, 1.0, tokens).astype(np.float32),
                    "version_spans": [
                        {"version": 6, "start": 0, "end": turn},
                        {"version": 7, "start": turn, "end": tokens},
                    ],
                    "v_traj": 6,
                    "head_version": 6,
                    "tail_version": 7,
                    "staleness": 1,
                    "reward": float(member % 2),
                    "reward_components": [("correct", float(member % 2))],
                    "advantage": float(member % 2) * 2 - 1,
                    "finish_reason": "stop",
                    "turns": [{"role": "assistant", "start": 0, "end": tokens}],
                    "engine_id": f"engine-{member % 2}",
                    "engine_build": "benchmark",
                    "sampling": {
                        "temperature": 1.0,
                        "top_p": 1.0,
                        "top_k": -1,
                        "max_tokens": tokens,
                        "logprobs_mode": "processed",
                    },
                    "seed": member,
                    "environment": "benchmark",
                    "from_live_policy": True,
                    "reserved_at": 1,
                    "started_at": 2,
                    "finished_at": 3,
                    "occupied_at": 4,
                }
            )
    return schema.table_from_rows(rows, batch=True)


def _bare_write(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink)
    return sink.getvalue()


def measure(
    table: pa.Table, repeats: int, stores: dict[str, ObjectStore]
) -> tuple[dict[str, list[tuple[float, float]]], dict[str, int]]:
    """((wall, CPU) seconds by name, one pair a repeat; bytes by name)."""
    ours, bare = encode(table), _bare_write(table)
    digest = table_digest(table)
    kinds: dict[str, Callable[[], object]] = {
        "bare pyarrow: write": lambda: _bare_write(table),
        "bare pyarrow: read": lambda: pq.read_table(io.BytesIO(bare)),
        _ASSEMBLE: lambda: schema.table_from_rows(table.to_pylist(), batch=True),
        "ours: encode": lambda: encode(table),
        "ours: check of the schema": lambda: schema.check(table, batch=True),
        "ours: canonical digest": lambda: table_digest(table),
        "ours: verify (decode, digest, sha256)": lambda: (table_digest(decode(ours)), sha256(ours)),
        "ours: read (decode)": lambda: decode(ours),
    }
    committed: dict[str, batches.BatchCommit] = {}

    def commit(name: str, store: ObjectStore) -> None:
        # A run of its own each time: the same batch again would only be answered "already".
        keys = RunKeys("benchmark", uuid.uuid4().hex)
        committed[name] = batches.commit(store, keys, table, attempt=1, groups=())

    def prove(name: str, store: ObjectStore) -> None:
        batches.read(store, committed[name])

    for name, store in stores.items():
        kinds[f"whole commit, {name}"] = functools.partial(commit, name, store)
        kinds[f"read and prove, {name}"] = functools.partial(prove, name, store)
    times: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
    for _ in range(repeats):
        for kind, call in kinds.items():
            begin, busy = time.perf_counter(), time.process_time()
            call()
            times[kind].append((time.perf_counter() - begin, time.process_time() - busy))
    assert table_digest(decode(ours)) == digest
    return times, {"table in memory": table.nbytes, "bare pyarrow": len(bare), "ours": len(ours)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--endpoint", help="S3 endpoint; credentials from the AWS environment. Without: memory only")
    parser.add_argument("--bucket", default="roadstead")
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    stores: dict[str, ObjectStore] = {"store in memory": _Memory()}
    if options.endpoint:
        stores["S3"] = ObjectStore(StoreAddress(options.bucket, options.endpoint))
    table = realistic_batch()
    times, sizes = measure(table, options.repeats, stores)
    print(f"{table.num_rows} rows, {_GROUPS * _MEMBERS * _TOKENS:,} response tokens, {os.cpu_count()} cores")
    for name, size in sizes.items():
        print(f"{name:<40} {size / 1e6:8.1f} MB")
    heads = ("best", "median", "worst", "median CPU")
    print(f"{f'seconds, {options.repeats} repeats':<40} " + " ".join(f"{head:>10}" for head in heads))
    medians: dict[str, tuple[float, float]] = {}
    for name, pairs in times.items():
        wall, busy = zip(*pairs, strict=True)
        medians[name] = (statistics.median(wall), statistics.median(busy))
        figures = (min(wall), medians[name][0], max(wall), medians[name][1])
        print(f"{name:<40} " + " ".join(f"{figure:>10.3f}" for figure in figures))
    for name in stores:
        wall_s, busy_s = (a + b for a, b in zip(medians[_ASSEMBLE], medians[f"whole commit, {name}"], strict=True))
        print(
            f"assemble and commit, {name}: {wall_s:.2f} s wall, {wall_s / _STEP_S:.2%} of a step of {_STEP_S:.0f} s; "
            f"{busy_s:.2f} s CPU, {busy_s / _STEP_S:.2%}"
        )


if __name__ == "__main__":
    main()

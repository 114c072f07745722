"""Traces: the synthetic one is near the post's; files of every kind are read, bad ones refused with a remedy."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from roadstead.benchmarks.simulator.workload import POST_STATISTICS, Trace, read_trace, synthetic


def test_the_synthetic_trace_is_within_5_percent_of_the_post() -> None:
    found = synthetic().statistics()
    for key, stated in POST_STATISTICS.items():
        assert found[key] == pytest.approx(stated, rel=0.05), key
    assert found["response_p95"] > 25_000
    assert found["response_max"] == 38_912


def test_the_long_tail_is_three_groups_and_nothing_else() -> None:
    plain, tail = synthetic(), synthetic(long_tail=True)
    changed = [b for a, b in zip(plain.groups, tail.groups, strict=True) if a != b]
    assert len(changed) == 3
    for _, lengths in changed:
        assert sum(lengths) / len(lengths) == pytest.approx(45_000, rel=0.01)
        assert max(lengths) <= 131_072


def test_the_same_seed_draws_the_same_order_and_each_pass_holds_every_group_once() -> None:
    trace = Trace("t", tuple((1, (n,)) for n in range(1, 21)))
    first, again, other = (list(itertools.islice(trace.draw(seed), 40)) for seed in (1, 1, 2))
    assert first == again != other
    assert set(first[:20]) == set(first[20:]) == set(trace.groups)
    assert first[:20] != first[20:]


def test_lines_without_a_group_are_grouped_in_order(tmp_path: Path) -> None:
    path = tmp_path / "lengths.jsonl"
    path.write_text('{"_meta": 1}\n' + "".join(f'{{"length": {n}}}\n' for n in range(1, 8)))
    assert read_trace(str(path), 3).groups == ((138, (1, 2, 3)), (138, (4, 5, 6)))


def test_lines_with_a_group_are_grouped_by_it(tmp_path: Path) -> None:
    path = tmp_path / "lengths.jsonl"
    rows = [{"length": 5, "group": "b", "prompt": 7}, {"length": 6, "group": "a"}, {"length": 0, "group": "b"}]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    assert read_trace(str(path), 3).groups == ((7, (5, 1)), (138, (6,)))


def test_parquet_with_a_length_column(tmp_path: Path) -> None:
    pq.write_table(pa.table({"length": [3, 4, 5, 6], "group": [1, 1, 2, 2]}), tmp_path / "a.parquet")
    assert read_trace(str(tmp_path / "*.parquet"), 8).groups == ((138, (3, 4)), (138, (5, 6)))


def test_parquet_of_a_runs_batches(tmp_path: Path) -> None:
    for step in range(2):
        columns = {
            "group_id": [f"g{step}"] * 2,
            "member": [0, 1],
            "prompt_token_ids": [[1, 2, 3]] * 2,
            "response_token_ids": [[1] * (step + 1), [1] * 9],
        }
        pq.write_table(pa.table(columns), tmp_path / f"batch-{step}.parquet")
    assert read_trace(str(tmp_path / "batch-*.parquet"), 8).groups == ((3, (1, 9)), (3, (2, 9)))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"length": -3}', r"line 1: length: -3 is no token count; use 0 or more"),
        ("a.jsonl", '{"length": 3}\nnope', r"line 2 is no JSON .*mend or remove"),
        ("a.jsonl", '{"length": 3}', r"1 responses, not one group of 8; lower --group-size"),
        ("a.csv", "3", r"neither .jsonl nor .parquet; convert it"),
        ("a.parquet", "no", r"can't be read as Parquet"),
    ],
)
def test_a_bad_file_is_refused_with_its_place_and_the_remedy(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        read_trace(str(tmp_path / name), 8)


def test_parquet_without_lengths_names_its_columns(tmp_path: Path) -> None:
    pq.write_table(pa.table({"tokens": [3]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="has the columns tokens; name one `length`"):
        read_trace(str(tmp_path / "a.parquet"), 8)


def test_a_missing_length_in_parquet_names_its_row(tmp_path: Path) -> None:
    pq.write_table(pa.table({"length": [3, None]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"row 1: length: None is no token count"):
        read_trace(str(tmp_path / "a.parquet"), 1)

"""Prompts come in seeded order, each once an epoch."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roadstead.environments.prompts import DatasetError, PromptSet, load_prompts


def prompts(count: int) -> PromptSet:
    return PromptSet([{"prompt": f"{i}+{i}="} for i in range(count)], "test")


@given(rows=st.integers(1, 40), epochs=st.integers(1, 3), seed=st.integers(0, 5))
def test_each_epoch_serves_every_prompt_once(rows: int, epochs: int, seed: int) -> None:
    served = prompts(rows)
    for epoch in range(epochs):
        ids = [served.at(epoch * rows + i, seed)["prompt_id"] for i in range(rows)]
        assert sorted(ids) == sorted(f"p{i}" for i in range(rows))


def test_the_order_is_pinned_by_seed_and_epoch() -> None:
    served = prompts(8)
    order = {
        (seed, epoch): [served.at(epoch * 8 + i, seed)["prompt_id"] for i in range(8)]
        for seed in (0, 1)
        for epoch in (0, 1)
    }
    assert len({tuple(ids) for ids in order.values()}) == 4
    assert order[0, 0] == ["p4", "p2", "p6", "p0", "p7", "p5", "p1", "p3"], "another order skips prompts on resume"


def test_the_fingerprint_sees_content_and_order() -> None:
    rows = [{"prompt": "a"}, {"prompt": "b"}]
    assert PromptSet([dict(r) for r in rows], "x").digest == PromptSet([dict(r) for r in rows], "y").digest
    assert PromptSet([dict(r) for r in rows], "x").digest != PromptSet([dict(r) for r in rows[::-1]], "x").digest


def test_jsonl_and_parquet_give_the_same_prompts(tmp_path: Path) -> None:
    rows = [{"prompt": "1+1=", "prompt_id": "x", "answer": "2"}, {"prompt": "2+2=", "prompt_id": "y", "answer": "4"}]
    (tmp_path / "p.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "p.parquet")
    assert load_prompts(tmp_path / "p.jsonl").digest == load_prompts(tmp_path / "p.parquet").digest


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("p.jsonl", "", "no rows"),
        ("p.jsonl", '{"prompt": "a"}\n{"question": "b"}', "row 1 has no text under `prompt`"),
        ("p.jsonl", '{"prompt": "a"}\nnonsense', "p.jsonl:2: not JSON"),
        ("p.jsonl", "[1]", "expected an object"),
        ("p.csv", "prompt", "neither .jsonl nor .parquet"),
        ("p.jsonl", '{"prompt": "a", "prompt_id": "x"}\n{"prompt": "b", "prompt_id": "x"}', "share prompt_id 'x'"),
    ],
)
def test_a_bad_file_is_refused_by_name_and_row(tmp_path: Path, name: str, text: str, words: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(DatasetError) as error:
        load_prompts(tmp_path / name)
    assert words in str(error.value) and str(tmp_path) in str(error.value)


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"data\.prompts.*none\.jsonl"):
        load_prompts(tmp_path / "none.jsonl")

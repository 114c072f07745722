"""Trajectories that a prompt row brings: what is taken, what it becomes, what is refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.arithmetic.tokenizer import build_tokenizer
from roadstead.config import RolloutSection
from roadstead.environments.external import check_external, check_prompt, external_members
from roadstead.environments.prompts import DatasetError, PromptSet, load_prompts
from roadstead.environments.protocol import Turn
from roadstead.environments.rewards import Score
from roadstead.environments.text import TextCodec
from roadstead.storage.schema import table_from_rows
from tests.support.rows import group_rows

LIMITS = RolloutSection(group_size=2, max_tokens=8)


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    folder = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer(64).save_pretrained(folder)
    return TextCodec(folder, chat=False)


def entry(**changes: Any) -> dict[str, Any]:
    values = {"response_token_ids": [5, 6, 7], "behavior_logprobs": [-0.5, -0.25, 0.0], "reward": 1.0, **changes}
    return {key: value for key, value in values.items() if value is not ...}


def row(*entries: dict[str, Any], **columns: Any) -> dict[str, Any]:
    return {"prompt": "1+1=", "prompt_id": "p", "trajectories": list(entries), **columns}


def test_an_ordinary_prompt_brings_nothing(codec: TextCodec) -> None:
    assert external_members({"prompt": "1+1="}, codec, 2, 3) is None
    assert external_members({"prompt": "1+1=", "trajectories": None}, codec, 2, 3) is None


def test_members_are_whole_rows_of_the_admission(codec: TextCodec) -> None:
    made = external_members(
        row(
            entry(loss_mask=[True, False, True], reward_components={"correct": 1.0}, finish_reason="length"),
            entry(
                reward=..., turns=[{"role": "assistant", "start": 0, "end": 2}, {"role": "tool", "start": 2, "end": 3}]
            ),
        ),
        codec,
        2,
        4,
    )
    assert made is not None and len(made) == 2
    first, second = made
    assert first.score == Score(1.0, {"correct": 1.0}) and second.score is None
    assert first.columns["loss_mask"] == [True, False, True] and second.columns["loss_mask"] == [True] * 3
    assert first.columns["behavior_logprobs"] == [-0.5, -0.25, 0.0]
    assert first.columns["finish_reason"] == first.transcript.finish_reason == "length"
    for member in made:
        assert member.columns["version_spans"] == [{"version": 4, "start": 0, "end": 3}]
        assert member.columns["head_version"] == member.columns["tail_version"] == 4
    text = codec.decode([5, 6, 7])
    assert first.transcript.turns == (Turn("assistant", text),) and first.columns["response_text"] == text
    assert second.transcript.turns == (Turn("assistant", codec.decode([5, 6])), Turn("tool", codec.decode([7])))
    base = group_rows(members=2)
    rows = [{**b, **m.columns, "reward": 0.0, "from_live_policy": False} for b, m in zip(base, made, strict=True)]
    assert table_from_rows(rows, batch=False).num_rows == 2


@pytest.mark.parametrize(("scored", "ends"), [(3, True), (2, False)], ids=["with its end", "without"])
def test_text_becomes_ids_and_its_end_token_as_far_as_it_was_scored(codec: TextCodec, scored: int, ends: bool) -> None:
    given_ = entry(response_token_ids=..., response_text="42", behavior_logprobs=[-0.5] * scored)
    made = external_members(row(given_, given_), codec, 2, 0)
    assert made is not None
    ids = made[0].columns["response_token_ids"]
    assert codec.decode(ids) == made[0].columns["response_text"] == "42"
    assert tuple(ids) == codec.response("42", ended=ends)


def test_text_that_was_cut_off_has_no_end_token(codec: TextCodec) -> None:
    given_ = entry(response_token_ids=..., response_text="42", behavior_logprobs=[-0.5] * 2, finish_reason="length")
    made = external_members(row(given_, given_), codec, 2, 0)
    assert made is not None and len(made[0].columns["response_token_ids"]) == 2
    given_["behavior_logprobs"] = [-0.5] * 3
    with pytest.raises(DatasetError, match=r"behavior_logprobs has 3 entries for 2 response tokens"):
        external_members(row(given_, given_), codec, 2, 0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"behavior_logprobs": ...}, ["no behavior_logprobs", "importance weight", "nats"]),
        ({"behavior_logprobs": None}, ["no behavior_logprobs"]),
        ({"behavior_logprobs": [-0.5]}, ["behavior_logprobs has 1 entries for 3"]),
        ({"behavior_logprobs": [-0.5, -0.5, 0.7]}, ["behavior_logprobs[2] is 0.7", "not above 0"]),
        ({"behavior_logprobs": [-0.5, float("nan"), -1.0]}, ["behavior_logprobs[1] is nan"]),
        ({"loss_mask": [True]}, ["loss_mask has 1 entries for 3"]),
        ({"loss_mask": [False] * 3}, ["no token carries loss"]),
        ({"response_token_ids": [], "behavior_logprobs": []}, ["no token carries loss"]),
        ({"response_token_ids": [5, -1, 7]}, ["response_token_ids.1"]),
        ({"response_token_ids": ...}, ["either response_token_ids or response_text"]),
        ({"response_text": "42"}, ["either response_token_ids or response_text"]),
        ({"reward": float("inf")}, ["reward is inf"]),
        ({"turns": [{"role": "assistant", "start": 0, "end": 2}]}, ["turns must cover the 3"]),
        ({"turns": [{"role": "a", "start": 0, "end": 3}, {"role": "b", "start": 3, "end": 3}]}, ["turns must cover"]),
        ({"loss_masks": [True] * 3}, ["unknown key 'loss_masks'", "loss_mask"]),
        ({"temperature": 0.7}, ["temperature 0.7", "rollout.temperature: 1"]),
        (
            {"response_token_ids": [5] * 9, "behavior_logprobs": [-1.0] * 9},
            ["has 9 tokens, over rollout.max_tokens: 8"],
        ),
    ],
)
def test_what_can_not_be_trained_on_is_refused_at_the_start_by_row_and_entry(
    changes: dict[str, Any], words: list[str]
) -> None:
    prompts = PromptSet([{"prompt": "a"}, row(entry(), entry(**changes))], "test")
    with pytest.raises(DatasetError) as error:
        check_external(prompts, LIMITS, allowed=True)
    for word in ["data.prompts: row 1 (prompt_id 'p'): trajectories[1]", *words]:
        assert word in str(error.value)


@pytest.mark.parametrize("column", [[], [entry()], [entry()] * 3, "text", {"a": 1}])
def test_a_group_is_exactly_as_large_as_any_other(column: Any) -> None:
    prompts = PromptSet([row(trajectories=column)], "test")
    with pytest.raises(DatasetError, match=r"rollout\.group_size: 2 trajectories"):
        check_external(prompts, LIMITS, allowed=True)


def test_they_are_trained_on_only_if_asked() -> None:
    rows = [{"prompt": "a"}, row(entry(), entry())]
    assert check_external(PromptSet(rows, "test"), LIMITS, allowed=True) == 1
    with pytest.raises(
        DatasetError, match=r"row 1 \(prompt_id 'p'\).*data\.train_on_external is false; set it to true"
    ):
        check_external(PromptSet(rows, "test"), LIMITS, allowed=False)
    assert check_external(PromptSet(rows[:1], "test"), LIMITS, allowed=False) == 0


def test_a_prompt_that_becomes_other_tokens_here_is_refused() -> None:
    check_prompt({"prompt_id": "p"}, [1, 2])
    check_prompt({"prompt_id": "p", "prompt_token_ids": [1, 2]}, (1, 2))
    with pytest.raises(DatasetError, match=r"'p'.*3 ids.*prompt_token_ids \(2\)"):
        check_prompt({"prompt_id": "p", "prompt_token_ids": [1, 2]}, (1, 2, 3))


def _written(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(list(rows)), path)
    else:
        path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_both_file_formats_bring_them_and_the_fingerprint_covers_them(
    kind: str, tmp_path: Path, codec: TextCodec
) -> None:
    rows = [row(entry(), entry(loss_mask=[True, True, False])), {"prompt": "a", "prompt_id": "q"}]
    prompts = load_prompts(_written(tmp_path / f"one.{kind}", rows))
    assert check_external(prompts, LIMITS, allowed=True) == 1
    members = external_members(prompts.rows[0], codec, 2, 1)
    assert members is not None and members[1].columns["loss_mask"] == [True, True, False]
    assert external_members(prompts.rows[1], codec, 2, 1) is None
    rows[0]["trajectories"][1]["behavior_logprobs"][2] = -0.125
    assert load_prompts(_written(tmp_path / f"two.{kind}", rows)).digest != prompts.digest


@settings(deadline=None, max_examples=30)
@given(st.lists(st.floats(-60, 0, width=32), min_size=1, max_size=8), st.data())
def test_a_logprob_survives_the_file_bit_by_bit(logprobs: list[float], data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(3, 20), min_size=len(logprobs), max_size=len(logprobs)))
    line = json.dumps(row(entry(response_token_ids=ids, behavior_logprobs=logprobs), entry()))

    class Codec:
        def decode(self, token_ids: Sequence[int]) -> str:
            return ""

    members = external_members(json.loads(line), Codec(), 2, 0)  # type: ignore[arg-type]
    assert members is not None
    back = np.array(members[0].columns["behavior_logprobs"], dtype=np.float32)
    assert back.tobytes() == np.array(logprobs, dtype=np.float32).tobytes()

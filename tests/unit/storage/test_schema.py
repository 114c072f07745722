"""A malformed table is refused whole, with its row and column."""

from __future__ import annotations

from typing import Any

import pytest

from roadstead.storage.schema import SCHEMA, SchemaError, check, table_from_rows
from tests.support.rows import batch_rows, group_rows


def broken(**changes: Any) -> list[dict[str, Any]]:
    rows = batch_rows()
    rows[1].update(changes)
    return rows


def test_a_whole_batch_and_a_whole_group_pass() -> None:
    check(table_from_rows(batch_rows(), batch=True), batch=True)
    check(table_from_rows(group_rows(), batch=False), batch=False)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"behavior_logprobs": [-0.1]}, "row 1 (g00000000 member 1): per-token lists differ in length"),
        ({"loss_mask": [True] * 5}, "per-token lists differ"),
        ({"version_spans": [{"version": 0, "start": 0, "end": 3}]}, "version_spans"),
        ({"version_spans": [{"version": 0, "start": 0, "end": 2}, {"version": 1, "start": 3, "end": 4}]}, "version"),
        ({"staleness": 7}, "staleness: differs"),
        ({"prompt_id": None}, "prompt_id: null in 1 row"),
        ({"advantage": None}, "advantage: null in 1 row"),
        ({"seed": "x"}, "does not fit"),
        ({"surprise": 1}, "unknown column(s) ['surprise']"),
    ],
)
def test_a_bad_row_refuses_the_batch(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(SchemaError) as error:
        table_from_rows(broken(**changes), batch=True)
    assert words in str(error.value)


def test_a_failed_reward_is_a_null_and_not_an_error() -> None:
    table_from_rows(broken(reward=None), batch=True)


def test_no_rows_is_refused() -> None:
    with pytest.raises(SchemaError, match="no rows"):
        table_from_rows([], batch=True)


def test_the_schema_is_the_one_on_record() -> None:
    """Readers of old files depend on it: a change needs a new SCHEMA_VERSION and a reader for this one."""
    assert SCHEMA.metadata == {b"roadstead.schema_version": b"1"}
    assert SCHEMA.names[:6] == ["run_id", "attempt", "step", "slot", "group_id", "member"]
    assert len(SCHEMA.names) == 34

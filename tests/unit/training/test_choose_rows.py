"""Which rows of a batch a counterfactual keeps."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from roadstead.training.batch_rows import choose_rows

TABLE = pa.table(
    {
        "group_id": ["g0", "g0", "g1", "g1", "2", "2"],
        "member": [0, 1, 0, 1, 0, 1],
        "staleness": [0, 2, 1, 1, 0, 0],
        "from_live_policy": [True] * 6,
    }
)


@pytest.mark.parametrize(
    ("conditions", "kept"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"without": ["g0"]}, [2, 3, 4, 5]),
        ({"without": ["g0/1", "3"]}, [0, 2, 4, 5]),
        ({"only": ["g1", "g0/0"]}, [0, 2, 3]),
        ({"only": ["g0", "g1"], "without": ["0"]}, [1, 2, 3]),
        ({"max_staleness": 1}, [0, 2, 3, 4, 5]),
        ({"max_staleness": 0, "without": ["5"]}, [0, 4]),
        ({"without": ["2"]}, [0, 1, 2, 3]),  # the group of that name, not the row of that number
        ({"without": ["2/1"]}, [0, 1, 2, 3, 4]),
    ],
)
def test_conditions(conditions: dict[str, Any], kept: list[int]) -> None:
    assert choose_rows(TABLE, **conditions) == kept


@pytest.mark.parametrize("name", ["g7", "6", "-1", "g0/2", "g0/", ""])
def test_a_name_that_the_batch_does_not_have(name: str) -> None:
    with pytest.raises(ValueError, match=r"not in this batch; name rows by number \(0 to 5\), by group"):
        choose_rows(TABLE, without=[name])


def test_nothing_left() -> None:
    with pytest.raises(ValueError, match="none of the batch's 6 rows is left"):
        choose_rows(TABLE, only=["g0/1"], max_staleness=1)


def test_rows_from_elsewhere_have_no_age() -> None:
    live = pa.array([True, False, True, True, True, True])
    table = TABLE.set_column(3, "from_live_policy", live)
    assert choose_rows(table, max_staleness=0) == [0, 1, 4, 5]

"""A rank that stands still is told from one that is starting and from one of an earlier life."""

from __future__ import annotations

import os
import time
from pathlib import Path

from roadstead.training import pulse


def test_a_rank_beats_and_one_that_never_did_is_left_out(tmp_path: Path) -> None:
    began = time.time() - 1
    pulse.beat(tmp_path, 1)
    deadline = time.monotonic() + 10
    while not (found := pulse.silence(tmp_path, 3, began)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert set(found) == {"1"} and 0 <= found["1"] < 10


def test_silence_is_counted_from_the_last_beat_of_this_life(tmp_path: Path) -> None:
    folder = tmp_path / "pulse"
    folder.mkdir()
    now = time.time()
    for rank, ago in enumerate((0.0, 42.0, 900.0)):
        (folder / f"rank-{rank}").touch()
        os.utime(folder / f"rank-{rank}", (now - ago, now - ago))
    found = pulse.silence(tmp_path, 3, now - 600)
    assert set(found) == {"0", "1"}, "rank 2's is of the incarnation before"
    assert found["0"] < 5 and 41 < found["1"] < 60

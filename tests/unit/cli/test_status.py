"""`roadstead status`: what people see of a run that goes, and what scripts get."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, RenderableType
from typer.testing import CliRunner, Result

from roadstead.cli import status as status_module
from roadstead.cli.begin import CannotBegin
from roadstead.cli.main import app
from roadstead.cli.pace import Pace, recorded_pace
from roadstead.cli.progress import bound_of, duration, view
from roadstead.cli.status import at_a_glance
from roadstead.storage import batches, steps
from roadstead.storage.keys import RunKeys
from roadstead.workflows.messages import RunStatus
from tests.support.live_status import running
from tests.support.memory_store import MemoryStore
from tests.support.report_run import ReportRun

KEYS = RunKeys("runs", "r")
STEPS = 6


@pytest.fixture(scope="module")
def store() -> MemoryStore:
    store = MemoryStore()
    ReportRun(store, KEYS).write(STEPS, killed_at=0)
    return store


@pytest.fixture
def call(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    def with_run(name: str, data: Path | None, read: Callable[[MemoryStore, RunKeys], Any]) -> Any:
        assert name == KEYS.run_id
        return read(store, KEYS)

    monkeypatch.setattr(status_module, "with_run", with_run)
    live_with(monkeypatch, None)
    return lambda *arguments: CliRunner().invoke(app, ["status", "r", *arguments], env={"COLUMNS": "100"})


def live_with(monkeypatch: pytest.MonkeyPatch, live: RunStatus | None) -> None:
    async def answer(name: str, data: Path | None) -> RunStatus | None:
        return live

    monkeypatch.setattr(status_module, "_live", answer)


def drawn(what: RenderableType, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(what)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def paced() -> Pace:
    pace = Pace()
    pace.note(0.0, 10, 0)
    pace.note(60.0, 12, 12_000)
    return pace


def test_a_run_that_goes_is_drawn_slot_by_slot() -> None:
    text = drawn(at_a_glance(running(), paced(), 2))
    lines = [line.rstrip() for line in text.splitlines()]
    assert "  buffer 12  training  ■ ■ ■ ■" in lines
    assert "  buffer 13  stuck     ■ ■ ■ ▨" in lines
    assert "  buffer 14  pending   ■ □ □ ▨" in lines
    assert "6 of 12 = (S + 1) x B groups: 2 in flight, 4 finished and waiting" in text
    assert "58 admitted: 48 trained, 3 filtered, 1 dead-lettered" in text
    assert "120 steps/h, 200 tokens/s, ETA 14 min" in text
    assert "last steps: 1 2 2 1 2; bound S = 2" in text
    assert "0.640 at step 11" in text and "▁" in text and "█" in text
    assert "12 of 40 steps" in text and "running" in text and "attempt 1" in text
    assert all(len(line) <= 80 for line in lines)


def test_a_terminal_without_squares_gets_letters() -> None:
    text = drawn(view(running(), Pace(), 2, letters=True))
    assert "  buffer 14  pending   O . . R" in [line.rstrip() for line in text.splitlines()]
    text.encode("ascii")
    assert "not known before two steps were seen" in text


def test_wide_buffers_are_folded_not_cut() -> None:
    live = running()
    buffer = live.window[0].model_copy(update={"slots": "O" * 100 + "R" * 28})
    text = drawn(view(live.model_copy(update={"window": (buffer,), "training": None}), Pace(), 2))
    assert text.count("■") - 1 == 100 and text.count("▨") - 1 == 28, "the legend has one of each"


def test_the_bound_is_read_off_the_window() -> None:
    assert bound_of(running()) == 2


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(5, "5 s"), (89, "89 s"), (90, "2 min"), (3600, "60 min"), (12_000, "3 h 20 min"), (187_200, "2 d 4 h")],
)
def test_durations_are_read_at_a_glance(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_pace_needs_two_moments_and_forgets_old_ones() -> None:
    pace = Pace()
    assert pace.steps_per_hour is None and pace.tokens_per_second is None and pace.seconds_for(3) is None
    pace.note(0.0, 0, 0)
    pace.note(0.5, 0, 0)
    assert pace.steps_per_hour is None, "nothing was finished yet"
    pace.note(1000.0, 1, 100)
    assert pace.steps_per_hour == pytest.approx(3.6) and pace.tokens_per_second == pytest.approx(0.1)
    for step in range(2, 40):
        pace.note(1000.0 + step, step, 100 * step)
    assert pace.steps_per_hour == pytest.approx(3600) and pace.seconds_for(10) == pytest.approx(10)


def test_the_recorded_pace_is_that_of_the_rows(store: MemoryStore) -> None:
    commits = [batches.find(store, KEYS, step) for step in range(STEPS)]
    ready = [max(batches.read(store, c)["occupied_at"].to_pylist()).timestamp() for c in commits if c]
    tokens = sum(record.response_tokens for record in steps.all_of(store, KEYS)[1:])
    pace = recorded_pace(store, KEYS)
    assert pace.steps_per_hour == pytest.approx((STEPS - 1) / (ready[-1] - ready[0]) * 3600)
    assert pace.tokens_per_second == pytest.approx(tokens / (ready[-1] - ready[0]))


def test_json_has_what_it_had_and_the_pace(call: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    answer = json.loads(call("--json").stdout)
    assert answer["live"] is None and answer["recorded"]["steps"] == STEPS
    assert set(answer["pace"]) == {"steps_per_hour", "tokens_per_second"}
    live_with(monkeypatch, running())
    answer = json.loads(call("--json").stdout)
    assert RunStatus.model_validate(answer["live"]) == running()


def test_without_a_workflow_it_is_what_s3_holds(call: Callable[..., Result]) -> None:
    result = call()
    assert result.exit_code == 0 and f"{STEPS} of {STEPS}" in result.stdout and "buffer" not in result.stdout


def test_with_one_both_are_shown(call: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    live_with(monkeypatch, running())
    result = call()
    assert "buffer 13" in result.stdout and "steps/h" in result.stdout and "trained trajectories" in result.stdout


def test_nothing_to_watch_is_said_and_the_record_shown(
    call: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    def live_run(name: str, data: Path | None) -> Any:
        raise CannotBegin(f"run {name!r} is not running: it is completed")

    monkeypatch.setattr(status_module, "live_run", live_run)
    result = call("--watch")
    assert result.exit_code == 0 and "nothing to watch" in result.output and f"{STEPS} of {STEPS}" in result.output


def test_watching_as_json_is_refused_with_the_remedy(call: Callable[..., Result]) -> None:
    result = call("--watch", "--json")
    assert result.exit_code == 2 and "--watch" in result.output


def test_what_may_stop_the_run_is_told_before_it_does() -> None:
    hour_ago = int((time.time() - 3700) * 1e6)
    status = running().model_copy(update={"stuck_since": hour_ago, "empty_groups": 9, "evaluating": (10, 12)})
    shown = _drawn(status)
    assert "the trainer has waited 62 min for the unfinished groups of buffer 12" in shown
    assert "9 groups in a row with nothing to learn from" in shown
    assert "version 10, 12" in shown
    calm = _drawn(running().model_copy(update={"empty_groups": 2}))
    assert "look at" not in calm and "evaluating" not in calm


def _drawn(status: RunStatus) -> str:
    console = Console(width=110, file=io.StringIO())
    console.print(view(status, Pace(), 2))
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]

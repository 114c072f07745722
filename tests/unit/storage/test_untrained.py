"""Every group that ended untrained can be found with its reason, from the records alone."""

from __future__ import annotations

import json

import pytest
from rich.console import Console

from roadstead.cli import groups as command
from roadstead.staleness import TerminalState
from roadstead.storage import dead_letters, groups, runs, steps
from roadstead.storage.dead_letters import DeadLetter
from roadstead.storage.keys import RunKeys
from roadstead.storage.runs import AttemptEnd, AttemptRecord
from roadstead.storage.steps import StepRecord
from roadstead.storage.untrained import Untrained, untrained
from tests.support.memory_store import MemoryStore
from tests.support.rows import group_rows
from tests.unit.storage.test_commit import metrics

KEYS = RunKeys("runs", "r")


def attempt(number: int, **changes: object) -> AttemptRecord:
    values = {"run_id": "r", "attempt": number, "reason": "begun", "from_version": 0, "fencing_token": "t"}
    return AttemptRecord.model_validate({**values, "started_at": "2026-01-01T00:00:00+00:00", **changes})


def step(number: int, attempt_: int, terminal: dict[str, TerminalState]) -> StepRecord:
    return StepRecord(
        run_id="r",
        attempt=attempt_,
        step=number,
        batch_digest="b",
        weights_in="w",
        weights_out="x",
        rows=2,
        response_tokens=8,
        max_staleness=0,
        mean_reward=0.5,
        terminal=terminal,
        ledger={},
        cursor=9,
        metrics=metrics(),
    )


@pytest.fixture
def store() -> MemoryStore:
    """Two attempts: one batch each, a filtered and a dead group in the first, one expired by the resume."""
    store = MemoryStore()
    groups.stage(store, KEYS, group_rows("g00000001"), filtered="zero_variance", trainable=False, note="reward 0")
    groups.stage(store, KEYS, group_rows("g00000004"))
    letter = DeadLetter(
        run_id="r",
        attempt=1,
        group_id="g00000002",
        prompt_id="p",
        prompt="1+1=",
        version=0,
        attempts=5,
        reason="BadRequest: the prompt is too long",
        at="2026-01-01T00:00:00+00:00",
    )
    dead_letters.write(store, KEYS, letter)
    dead_letters.write(store, KEYS, letter.model_copy(update={"reason": "another execution's"}))
    runs.open_attempt(store, KEYS, attempt(1))
    steps.write(
        store,
        KEYS,
        step(0, 1, {"g00000001": "filtered", "g00000000": "trained", "g00000002": "dead-lettered"}),
    )
    runs.open_attempt(store, KEYS, attempt(2, terminal={"g00000004": "expired"}))
    steps.write(store, KEYS, step(1, 2, {"g00000005": "trained", "g00000006": "discarded"}))
    runs.end_attempt(
        store,
        KEYS,
        AttemptEnd(
            run_id="r",
            attempt=2,
            how="drained",
            version=2,
            cursor=9,
            terminal={"g00000007": "discarded"},
            carried=(),
            ended_at="2026-01-01T00:00:00+00:00",
        ),
    )
    return store


def test_each_is_told_once_in_order_with_its_reason(store: MemoryStore) -> None:
    found = untrained(store, KEYS)
    assert [(u.group_id, u.state, u.step, u.attempt) for u in found] == [
        ("g00000001", "filtered", 0, 1),
        ("g00000002", "dead-lettered", 0, 1),
        ("g00000004", "expired", None, 2),
        ("g00000006", "discarded", 1, 2),
        ("g00000007", "discarded", None, 2),
    ]
    reasons = [u.reason for u in found]
    assert reasons[0] == "zero_variance" and reasons[1] == "BadRequest: the prompt is too long"
    assert reasons[3] == "not finished: stuck, overdue or surplus"
    assert found[2].staged is not None and found[2].staged.attempt == 1, "adopted from the attempt before"


def test_states_and_the_newest_can_be_chosen(store: MemoryStore) -> None:
    assert [u.group_id for u in untrained(store, KEYS, ("discarded",))] == ["g00000006", "g00000007"]
    assert [u.group_id for u in untrained(store, KEYS, last=2)] == ["g00000006", "g00000007"]
    assert untrained(store, KEYS, ("filtered",), last=1)[0].group_id == "g00000001"


def test_the_command_prints_what_json_says(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "with_run", lambda name, data, look: look(store, KEYS))
    monkeypatch.setattr(command, "Console", lambda: Console(width=160))
    command.groups("r", None, 20, as_json=True)
    rows = json.loads(capsys.readouterr().out)
    assert rows[1]["dead_letter"]["prompt"] == "1+1=" and rows[0]["staged"]["note"] == "reward 0"
    command.groups("r", [command.State.DEAD_LETTERED], 20, as_json=False)
    shown = capsys.readouterr().out
    assert "g00000002" in shown and "the prompt is too long" in shown and "g00000001" not in shown
    monkeypatch.setattr(command, "with_run", lambda name, data, look: list[Untrained]())
    command.groups("r", None, 20, as_json=False)
    assert "every group that ended was trained on" in capsys.readouterr().out

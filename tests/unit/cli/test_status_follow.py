"""Following a run: every step is said once, silence is said, the end ends it. `roadstead run` and `status --watch`."""

from __future__ import annotations

import asyncio
import io
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from temporalio.client import WorkflowExecutionStatus
from temporalio.service import RPCError, RPCStatusCode

from roadstead.cli import progress
from roadstead.cli.progress import follow
from roadstead.workflows.messages import RunStatus
from tests.support.live_status import running


class Workflow:
    """Answers one after another: a status, or None for a worker that does not answer; then it has ended."""

    def __init__(self, *answers: RunStatus | None, final: RunStatus) -> None:
        self._answers, self._final = list(answers), final

    async def describe(self) -> Any:
        state = WorkflowExecutionStatus.RUNNING if self._answers else WorkflowExecutionStatus.COMPLETED
        return SimpleNamespace(status=state)

    async def query(self, name: str, result_type: type[RunStatus]) -> RunStatus:
        answer = self._answers.pop(0)
        if answer is None:
            raise RPCError("no worker", RPCStatusCode.DEADLINE_EXCEEDED, b"")
        return answer

    async def result(self) -> RunStatus:
        return self._final


def at(version: int) -> RunStatus:
    """The run when `version` steps are done."""
    one = running().recent[-1]
    recent = tuple(one.model_copy(update={"step": step}) for step in range(max(0, version - 5), version))
    return running().model_copy(update={"version": version, "recent": recent})


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_POLL_S", 0.01)


def followed(workflow: Workflow, *, terminal: bool = False) -> tuple[RunStatus, str]:
    console = Console(file=io.StringIO(), width=100, force_terminal=terminal)
    final = asyncio.run(follow(workflow, console, 40))  # type: ignore[arg-type]
    assert isinstance(console.file, io.StringIO)
    return final, console.file.getvalue()


def test_each_step_is_said_once_and_the_final_ones_too() -> None:
    end = at(5).model_copy(update={"phase": "finished"})
    final, text = followed(Workflow(at(1), at(1), at(3), None, at(3), final=end))
    assert final is end
    lines = [line for line in text.splitlines() if line.startswith("step")]
    assert [int(line.split()[1]) for line in lines] == [0, 1, 2, 3, 4]


def test_a_terminal_gets_the_window() -> None:
    _, text = followed(Workflow(at(2), at(3), final=at(3)), terminal=True)
    assert "▨" in text and "buffer" in text and "under way" in text


def test_a_pipe_gets_lines_only() -> None:
    _, text = followed(Workflow(at(2), at(3), final=at(3)))
    assert "▨" not in text and "\x1b" not in text


def test_a_run_that_stands_still_says_what_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_QUIET_S", 0.0)
    _, text = followed(Workflow(at(2), at(2), at(2), final=at(2)))
    assert "2 groups are being generated" in text and "step 12 is being persisted" in text

"""Tool calls: parsed from text, and whatever goes wrong with one is an observation."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roadstead.environments.protocol import Observation, Response, Reward, Transcript
from roadstead.environments.tools import CALCULATOR, HERMES, Call, Outcome, Tool, ToolUse, run_call
from tests.unit.environments import games


@pytest.fixture(autouse=True)
def _release_threads() -> Iterator[None]:
    games.release.clear()
    yield
    games.release.set()


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


async def sleeps(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "slept"


def hangs() -> str:
    games.release.wait(30)
    return "woke"


def breaks(what: str = "") -> str:
    raise RuntimeError(what)


def echo(**arguments: Any) -> str:
    return str(arguments)


TOOLS = (
    CALCULATOR,
    Tool("sleeps", "", sleeps, timeout_s=0.1),
    Tool("hangs", "", hangs, timeout_s=0.1),
    Tool("breaks", "", breaks),
    Tool("echo", "", echo),
    Tool("long", "", lambda: "x" * 5000),
)
ENVIRONMENT = ToolUse("calc", TOOLS, lambda row, said: Reward(1.0, {"right": 1.0}))


def test_calls_are_found_in_order_and_text_around_them_is_ignored() -> None:
    text = f"let me see {call('calculator', expression='1+1')} and {call('echo')} so"
    assert HERMES.parse(text) == [Call("calculator", {"expression": "1+1"}), Call("echo", {})]
    assert HERMES.parse("no call </tool_call>") == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('<tool_call>{"name": "echo"', "<tool_call> without </tool_call>"),
        ("<tool_call>echo()</tool_call>", "not JSON"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "not JSON"),
        ("<tool_call>" + "9" * 10_000 + "</tool_call>", "not JSON"),
        ("<tool_call>[]</tool_call>", 'expected {"name": ..., "arguments": {...}}'),
        ('<tool_call>{"name": 3}</tool_call>', 'expected {"name": ..., "arguments": {...}}'),
        ('<tool_call>{"name": "echo", "arguments": [1]}</tool_call>', '"arguments" is not an object'),
    ],
    ids=range(7),
)
async def test_a_malformed_call_is_an_observation(text: str, problem: str) -> None:
    (found,) = HERMES.parse(text)
    assert found.problem == problem
    outcome = await run_call(found, TOOLS)
    assert (outcome.status, outcome.text) == ("malformed", f"malformed tool call: {problem}")


@pytest.mark.parametrize(
    ("said", "status", "text"),
    [
        (Call("calculator", {"expression": "6*7"}), "ok", "42"),
        (Call("calculator", {"expression": "1/0"}), "error", "error: calculator: CalculationError: division by zero"),
        (Call("calculator", {"expression": 3}), "error", "error: calculator: CalculationError: expected an expression"),
        (Call("calculator", {"wrong": 3}), "error", "error: calculator: TypeError"),
        (Call("calculator", {}), "error", "error: calculator: TypeError"),
        (Call("breaks", {"what": "the disk is full"}), "error", "error: breaks: RuntimeError: the disk is full"),
        (Call("breaks", {"what": "x" * 10_000}), "error", "error: breaks: RuntimeError: xxx"),
        (Call("sleeps", {"seconds": 60}), "timeout", "timeout: sleeps: no answer in 0.1 s"),
        (Call("hangs", {}), "timeout", "timeout: hangs: no answer in 0.1 s"),
        (Call("nobody", {}), "malformed", "malformed tool call: no tool 'nobody'; there is calculator, sleeps"),
        (Call("echo", {"what": 1, "function": 2, "func": 3, "self": 4, "timeout_s": 5}), "ok", "{'what': 1, 'fun"),
        (Call("long", {}), "ok", "xxx"),
    ],
    ids=range(12),
)
async def test_whatever_a_tool_does_becomes_a_bounded_observation(said: Call, status: str, text: str) -> None:
    began = time.monotonic()
    outcome = await run_call(said, TOOLS)
    assert outcome.status == status and outcome.text.startswith(text) and len(outcome.text) < 2100
    assert time.monotonic() - began < 5


async def test_an_episode_goes_on_while_tools_are_called_and_counts_how_they_fared() -> None:
    episode = ENVIRONMENT.reset({"prompt": "6*7?"}, 0)
    assert [message["role"] for message in episode.start] == ["system", "user"]
    assert "calculator: computes" in episode.start[0]["content"] and episode.start[1]["content"] == "6*7?"
    first = await episode.step(Response(call("calculator", expression="6*7") + call("hangs"), (1,)))
    assert first == Observation("42\ntimeout: hangs: no answer in 0.1 s", role="tool")
    second = await episode.step(Response(call("breaks") + call("nobody"), (1,)))
    assert second is not None and second.text.startswith("error: breaks: RuntimeError\nmalformed tool call")
    assert await episode.step(Response("42", (1,))) is None
    reward = await episode.reward(Transcript((), "stop"))
    counts = {"tool_calls": 4.0, "tool_timeout": 1.0, "tool_error": 1.0, "tool_malformed": 1.0}
    assert reward == Reward(1.0, {"right": 1.0, **counts})


async def test_calls_beyond_the_limit_are_not_run() -> None:
    ran: list[int] = []
    tool = Tool("count", "", lambda: ran.append(1))
    episode = ToolUse("t", (tool,), lambda row, said: 0.0).reset({"prompt": "p"}, 0)
    observation = await episode.step(Response(call("count") * 20, (1,)))
    assert len(ran) == 8 and observation is not None
    assert observation.text.endswith("12 more calls were not run; at most 8 a turn")


class Angles:
    """Another format: `<2+2>`, and no instructions."""

    def instructions(self, tools: Sequence[Tool]) -> str:
        return ""

    def parse(self, text: str) -> list[Call]:
        return [Call("calculator", {"expression": found}) for found in re.findall("<(.*?)>", text)]

    def answer(self, outcomes: Sequence[Outcome]) -> Observation:
        return Observation("".join(f"[{outcome.text}]" for outcome in outcomes), role="user")


async def test_calls_may_be_written_in_another_format() -> None:
    episode = ToolUse("calc", TOOLS, lambda row, said: 1.0, Angles()).reset({"prompt": "6*7?"}, 0)
    assert episode.start == "6*7?"  # as it stands: a model without a chat template has no other beginning
    assert await episode.step(Response("<6*7> <1+1>", (1,))) == Observation("[42][2]", role="user")
    said = await episode.step(Response("<6*>", (1,)))
    assert said is not None and said.text.startswith("[error: calculator: CalculationError")
    assert await episode.step(Response("42", (1,))) is None
    assert await episode.reward(Transcript((), "stop")) == Reward(1.0, {"tool_calls": 3.0, "tool_error": 1.0})


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.text(max_size=20),
            st.sampled_from(["<tool_call>", "</tool_call>", '{"name": "calculator", "arguments": ', "}", "{}", "[[["]),
        ),
        max_size=30,
    ).map("".join)
)
async def test_no_text_breaks_a_step(text: str) -> None:
    episode = ENVIRONMENT.reset({"prompt": "p"}, 0)
    observation = await episode.step(Response(text, (1,)))
    assert (observation is None) == ("<tool_call>" not in text)
    assert observation is None or len(observation.text) < 9 * 2100

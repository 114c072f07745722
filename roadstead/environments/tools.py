"""Tool use: an environment whose episodes go on as long as the model calls tools.

Owns: the format of a call, running it, what the model is told of the outcome. Never touches: tokens, engines.
Invariant: whatever a call says or a tool does, the model gets an observation of bounded length in bounded time.
A tool that raises or hangs is something the model sees and the data shows, never a failed trajectory.
A crash leaves: nothing of ours; what a tool did outside stays done, so tools that act must bear a second call.

A call is `<tool_call>{"name": "calculator", "arguments": {"expression": "2+2"}}</tool_call>`, as Qwen and Hermes
models write it. A turn may hold several; a turn without one ends the episode.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from roadstead.environments.calculator import calculate
from roadstead.environments.calls import CallFailed, CallTimedOut, bounded
from roadstead.environments.protocol import Message, Observation, Response, Reward, Row, Transcript
from roadstead.environments.single_turn import Judge

OPENING, CLOSING = "<tool_call>", "</tool_call>"

_MAX_CALLS = 8
"""A turn. A model that has learned to stutter calls must not start hundreds of tools at once."""
_MAX_RESULT_CHARS = 2000
"""Of one result; the rest would eat the trajectory's token budget."""

Status = Literal["ok", "error", "timeout", "malformed"]


@dataclass(frozen=True)
class Tool:
    name: str
    description: str
    """For the model: what it does, and its arguments."""
    function: Callable[..., Any]
    """Sync or async, called with the call's arguments by name; what it returns is shown as text."""
    timeout_s: float = 10.0


CALCULATOR = Tool("calculator", 'computes an expression: {"expression": "2*(3+4)**2"}', calculate, timeout_s=2.0)


@dataclass(frozen=True)
class Call:
    """What stood between the marks. `problem`: why it can't be run, else None."""

    name: str
    arguments: dict[str, Any]
    problem: str | None = None


@dataclass(frozen=True)
class Outcome:
    status: Status
    text: str
    """What the model is shown."""


def parse_calls(text: str) -> list[Call]:
    """The calls in a turn, in order. Never raises: a malformed one is a call with a problem."""
    calls = []
    for piece in text.split(OPENING)[1:]:
        body, closed, _ = piece.partition(CLOSING)
        calls.append(_parse(body) if closed else Call("", {}, f"{OPENING} without {CLOSING}"))
    return calls


def _parse(body: str) -> Call:
    try:
        call = json.loads(body)
    except (ValueError, RecursionError):
        return Call("", {}, "not JSON")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return Call("", {}, 'expected {"name": ..., "arguments": {...}}')
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        return Call(call["name"], {}, '"arguments" is not an object')
    return Call(call["name"], arguments)


async def run_call(call: Call, tools: Sequence[Tool]) -> Outcome:
    """Run one call. Never raises for what the call says or the tool does."""
    tool = next((tool for tool in tools if tool.name == call.name), None)
    if call.problem:
        return Outcome("malformed", f"malformed tool call: {call.problem}")
    if tool is None:
        known = ", ".join(tool.name for tool in tools)
        return Outcome("malformed", f"malformed tool call: no tool {call.name[:40]!r}; there is {known}")
    try:
        result = str(await bounded(tool.name, tool.timeout_s, partial(tool.function, **call.arguments)))
    except CallTimedOut as error:
        return Outcome("timeout", f"timeout: {error}")
    except CallFailed as error:
        return Outcome("error", f"error: {error}")
    if len(result) > _MAX_RESULT_CHARS:
        result = f"{result[:_MAX_RESULT_CHARS]}... ({len(result)} characters, cut)"
    return Outcome("ok", result)


@dataclass(frozen=True)
class ToolUse:
    """An environment of tools. `judge` gives the reward proper; the counts of calls are added to its components."""

    name: str
    tools: tuple[Tool, ...]
    judge: Judge

    def reset(self, row: Row, seed: int) -> ToolEpisode:
        return ToolEpisode(self, row)

    @property
    def instructions(self) -> str:
        """For the system message: the tools and the format of a call."""
        listed = "\n".join(f"- {tool.name}: {tool.description}" for tool in self.tools)
        return (
            f"You may call these tools:\n{listed}\nTo call one, write\n"
            f'{OPENING}{{"name": "<name>", "arguments": {{...}}}}{CLOSING}\nand wait for the result. '
            "A message without a call is your final answer."
        )


class ToolEpisode:
    """Row and outcomes of one trajectory."""

    def __init__(self, environment: ToolUse, row: Row) -> None:
        self._environment, self._row = environment, row
        self.outcomes: list[Outcome] = []

    @property
    def start(self) -> Sequence[Message]:
        return (
            {"role": "system", "content": self._environment.instructions},
            {"role": "user", "content": self._row["prompt"]},
        )

    async def step(self, response: Response) -> Observation | None:
        calls = parse_calls(response.text)
        if not calls:
            return None
        run, over = calls[:_MAX_CALLS], calls[_MAX_CALLS:]
        outcomes = await asyncio.gather(*(run_call(call, self._environment.tools) for call in run))
        if over:
            outcomes.append(Outcome("malformed", f"{len(over)} more calls were not run; at most {_MAX_CALLS} a turn"))
        self.outcomes += outcomes
        return Observation("\n".join(outcome.text for outcome in outcomes), role="tool")

    def reward(self, transcript: Transcript) -> Awaitable[Reward]:
        """The judge's, with `tool_calls`, and `tool_<status>` for each way in which calls failed, as components."""
        return self._counted(self._environment.judge(self._row, transcript))

    async def _counted(self, judged: Reward | float | Awaitable[Reward | float]) -> Reward:
        value = await judged if inspect.isawaitable(judged) else judged
        reward = value if isinstance(value, Reward) else Reward(value)
        counts = {"tool_calls": float(len(self.outcomes))}
        for outcome in self.outcomes:
            if outcome.status != "ok":
                key = f"tool_{outcome.status}"
                counts[key] = counts.get(key, 0.0) + 1.0
        return Reward(reward.total, {**reward.components, **counts})

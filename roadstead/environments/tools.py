"""Tool use: an environment whose episodes go on as long as the model calls tools.

Owns: running a call, and counting how calls fared. Never touches: how a call is written (tool_calls.py), tokens,
engines.
Invariant: whatever a call says or a tool does, the model gets an observation of bounded length in bounded time.
A tool that raises or hangs is something the model sees and the data shows, never a failed trajectory.
A crash leaves: nothing of ours; what a tool did outside stays done, so tools that act must bear a second call.

A turn may hold several calls; a turn without one ends the episode.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from functools import partial

from roadstead.environments.calculator import calculate
from roadstead.environments.calls import CallFailed, CallTimedOut, bounded
from roadstead.environments.protocol import Message, Observation, Response, Reward, Row, Transcript
from roadstead.environments.single_turn import Judge
from roadstead.environments.tool_calls import HERMES, Call, CallFormat, Outcome, Tool

__all__ = ["CALCULATOR", "HERMES", "Call", "CallFormat", "Outcome", "Tool", "ToolEpisode", "ToolUse", "run_call"]

_MAX_CALLS = 8
"""A turn. A model that has learned to stutter calls must not start hundreds of tools at once."""
_MAX_RESULT_CHARS = 2000
"""Of one result; the rest would eat the trajectory's token budget."""

CALCULATOR = Tool("calculator", 'computes an expression: {"expression": "2*(3+4)**2"}', calculate, timeout_s=2.0)


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
    calls: CallFormat = HERMES

    def reset(self, row: Row, seed: int) -> ToolEpisode:
        return ToolEpisode(self, row)


class ToolEpisode:
    """Row and outcomes of one trajectory."""

    def __init__(self, environment: ToolUse, row: Row) -> None:
        self._environment, self._row = environment, row
        self.outcomes: list[Outcome] = []

    @property
    def start(self) -> str | Sequence[Message]:
        prompt: str = self._row["prompt"]
        instructions = self._environment.calls.instructions(self._environment.tools)
        if not instructions:
            return prompt
        return ({"role": "system", "content": instructions}, {"role": "user", "content": prompt})

    async def step(self, response: Response) -> Observation | None:
        calls = self._environment.calls.parse(response.text)
        if not calls:
            return None
        run, over = calls[:_MAX_CALLS], calls[_MAX_CALLS:]
        outcomes = await asyncio.gather(*(run_call(call, self._environment.tools) for call in run))
        if over:
            outcomes.append(Outcome("malformed", f"{len(over)} more calls were not run; at most {_MAX_CALLS} a turn"))
        self.outcomes += outcomes
        return self._environment.calls.answer(outcomes)

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

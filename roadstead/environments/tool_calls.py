"""How a model writes tool calls, and how it is shown their outcomes.

Owns: what a tool, a call and an outcome are, and the format that Hermes and Qwen models are trained on. Never touches:
the tools' functions, tokens, engines.
Invariant: parsing never raises; a malformed call is a call with a problem, so that the model can be told of it.
A crash leaves: nothing, it is pure.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from roadstead.environments.protocol import Observation

OPENING, CLOSING = "<tool_call>", "</tool_call>"

Status = Literal["ok", "error", "timeout", "malformed"]


@dataclass(frozen=True)
class Tool:
    name: str
    description: str
    """For the model: what it does, and its arguments."""
    function: Callable[..., Any]
    """Sync or async, called with the call's arguments by name; what it returns is shown as text."""
    timeout_s: float = 10.0


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
    """A tool's result, or what went wrong; of bounded length."""


class CallFormat(Protocol):
    """One way of writing calls and outcomes. `ToolUse` takes any, for models that were trained on another one."""

    def instructions(self, tools: Sequence[Tool]) -> str:
        """The system message. Empty: there is none, and an episode begins with the row's prompt as it stands, which a
        model without a chat template needs."""
        ...

    def parse(self, text: str) -> list[Call]:
        """The calls in a turn, in order; none ends the episode. Never raises."""
        ...

    def answer(self, outcomes: Sequence[Outcome]) -> Observation:
        """What the model is shown, of at least one outcome, in the calls' order."""
        ...


class HermesFormat:
    """`<tool_call>{"name": "calculator", "arguments": {"expression": "2+2"}}</tool_call>`; outcomes are one message of
    role `tool`, a line each."""

    def instructions(self, tools: Sequence[Tool]) -> str:
        listed = "\n".join(f"- {tool.name}: {tool.description}" for tool in tools)
        return (
            f"You may call these tools:\n{listed}\nTo call one, write\n"
            f'{OPENING}{{"name": "<name>", "arguments": {{...}}}}{CLOSING}\nand wait for the result. '
            "A message without a call is your final answer."
        )

    def parse(self, text: str) -> list[Call]:
        calls = []
        for piece in text.split(OPENING)[1:]:
            body, closed, _ = piece.partition(CLOSING)
            calls.append(_parse(body) if closed else Call("", {}, f"{OPENING} without {CLOSING}"))
        return calls

    def answer(self, outcomes: Sequence[Outcome]) -> Observation:
        return Observation("\n".join(outcome.text for outcome in outcomes), role="tool")


HERMES = HermesFormat()


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

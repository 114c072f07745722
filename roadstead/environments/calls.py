"""Calls of other people's code, with a deadline.

Owns: how a sync or async function of an environment, tool or reward is run. Never touches: what it means.
Invariant: a call ends within its deadline, and neither what it raises nor what it blocks stops the event loop.
A crash leaves: nothing. A sync function past its deadline can't be stopped: its thread goes on, alone and as a
daemon, so that it holds up no other call and no exit.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections.abc import Callable
from typing import Any

_REASON_CHARS = 300
"""Of an exception's text: enough to act on, short enough to be stored with every row that it hit."""


class CallFailed(RuntimeError):
    """The call raised; the text says what."""


class CallTimedOut(CallFailed):
    """The call gave no answer within its deadline."""


async def bounded(what: str, timeout_s: float, function: Callable[..., Any], *args: Any) -> Any:
    """What `function` returns, awaited if need be. what: its name in errors. Raises CallTimedOut, CallFailed.

    A plain function runs in a thread of its own, an `async` one on the event loop, which it must not block.
    """
    try:
        async with asyncio.timeout(timeout_s) as deadline:
            if inspect.iscoroutinefunction(function):
                answer = function(*args)
            else:
                answer = await _in_thread(what, function, args)
            return await answer if inspect.isawaitable(answer) else answer
    except (Exception, SystemExit) as error:
        if isinstance(error, TimeoutError) and deadline.expired():
            raise CallTimedOut(f"{what}: no answer in {timeout_s:g} s") from None
        raise CallFailed(f"{what}: {_reason(error)}") from error


async def _in_thread(what: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    # Not asyncio.to_thread: its pool has few threads, the store uses them too, and exit waits for them.
    loop, done = asyncio.get_running_loop(), asyncio.Event()
    outcome: list[tuple[bool, Any]] = []

    def work() -> None:
        try:
            outcome.append((True, function(*args)))
        except BaseException as error:  # SystemExit included: it is not for the callee to end the worker
            outcome.append((False, error))
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(done.set)

    threading.Thread(target=work, name=what, daemon=True).start()
    await done.wait()
    fine, value = outcome[0]
    if fine:
        return value
    raise value if isinstance(value, Exception) else CallFailed(_reason(value))


def _reason(error: BaseException) -> str:
    if isinstance(error, CallFailed):
        return str(error)
    try:
        text = str(error)
    except Exception:
        text = "(its text can't be made)"
    return f"{type(error).__name__}: {text}"[:_REASON_CHARS].rstrip(": ")

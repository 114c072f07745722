"""Environments and reward functions by import path.

Owns: what `module:attribute` may name, and the adapter that makes an environment of it. Never touches: the run.
Invariant: what is returned has the protocol's methods; a path that can't be used is refused before anything runs.
A crash leaves: nothing.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any, cast

from roadstead.environments.protocol import Environment
from roadstead.environments.single_turn import Judge, SingleTurn


def load_environment(path: str, key: str = "data.environment") -> Environment:
    """Import `module:attribute`. key: of the configuration that names it. Raises ValueError that names the path and
    what failed.

    It may be a class or a function without arguments, which is called and returns an environment, or an object with
    `name` and `reward(row, response, finish_reason)`; or a reward function of (row, transcript).
    """
    found = _import(key, path)
    if _takes_nothing(found):
        found = found()
    if callable(getattr(found, "reset", None)):
        return cast(Environment, found)
    if callable(getattr(found, "reward", None)):
        return SingleTurn.of(found)
    if inspect.isfunction(found):
        return SingleTurn(found.__name__, found)
    raise ValueError(
        f"{key}: {path!r} is {type(found).__name__}, which has neither `reset` nor `reward`; "
        "give `module:Class` of an environment or `module:function` of a reward"
    )


def load_judge(path: str) -> Judge:
    """Import the reward function `module:function`. Raises ValueError that names the path and what failed."""
    found = _import("data.rewards", path)
    if not callable(found):
        raise ValueError(f"data.rewards: {path!r} is {type(found).__name__}; give `module:function` of a reward")
    return cast(Judge, found)


def load_filter(path: str) -> Callable[..., Any]:
    """Import the filter `module:function`. Raises ValueError that names the path and what failed."""
    found = _import("filters.functions", path)
    if not callable(found):
        raise ValueError(f"filters.functions: {path!r} is {type(found).__name__}; give `module:function` of a filter")
    return cast(Callable[..., Any], found)


def _import(key: str, path: str) -> Any:
    module_name, _, attribute = path.partition(":")
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{key}: {path!r} can't be imported ({error}); give `module:attribute` of something that "
            "this Python can import"
        ) from error


def _takes_nothing(found: Any) -> bool:
    if not callable(found):
        return False
    try:
        inspect.signature(found).bind()
    except TypeError:
        return False
    return True

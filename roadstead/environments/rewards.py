"""What an environment is, and how one is found by its import path.

Owns: the `Environment` protocol and the `Reward` it returns. Never touches: tokens, engines, the store.
Invariant: a reward is a function of the dataset row and the response alone, so that it can be computed again.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, cast


@dataclass(frozen=True)
class Reward:
    """`total` is what advantages are made of; `components` are kept for people."""

    total: float
    components: dict[str, float] = field(default_factory=dict)


class Environment(Protocol):
    """Single turn: a prompt, a response, a reward."""

    name: str

    def reward(self, row: Mapping[str, Any], response: str, finish_reason: str) -> Reward:
        """`row`: the prompt's dataset row; `response`: without special tokens; `finish_reason`: stop | length."""
        ...


def load_environment(path: str) -> Environment:
    """Import `module:attribute` and call it. Raises ValueError that names the path and what failed."""
    module_name, _, attribute = path.partition(":")
    try:
        factory = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"data.environment: {path!r} can't be imported ({error}); give `module:Class` of an environment"
        ) from error
    return cast(Environment, factory())

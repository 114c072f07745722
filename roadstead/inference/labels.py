"""What an engine calls the weights that it serves.

Owns: the labels that go into an engine and come back with its tokens. Never touches: the engine.
Invariant: a label `<version>.<load>` is written once in an engine's life, after the weights are in; no two loads share
one, not even of the same version. So a label says which policy made a token, and, used as the salt of the prefix cache,
which weights made a cached block.
A crash leaves: a label `loading-<version>`: whatever is in memory then is not vouched for.
"""

from __future__ import annotations

import re
import secrets

FRESH = "default"
"""What vLLM calls the weights that it was started with."""
LOADING_PREFIX = "loading-"
_LABEL = re.compile(r"(\d+)\.[0-9a-f]+")


def new_label(version: int) -> str:
    return f"{version}.{secrets.token_hex(4)}"


def loading_label(version: int) -> str:
    return f"{LOADING_PREFIX}{version}"


def version_of(label: str) -> int | None:
    """The policy version; None when the weights are of none, or unknown."""
    match = _LABEL.fullmatch(label)
    return int(match[1]) if match else None

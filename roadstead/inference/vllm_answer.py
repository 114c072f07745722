"""From vLLM's answer to a `Generation`, or not at all.

Owns: the checks of an answer. Never touches: the network.
Invariant: what passes has a finish reason, as many logprobs as tokens, and a policy version for each token.
A crash leaves: nothing.
"""

from __future__ import annotations

import json
from typing import Any

from roadstead.inference.engine import EngineDown, Generation
from roadstead.staleness import VersionSpan, check_cover


def parse_generation(body: bytes, what: str) -> Generation:
    """`body`: the JSON of /inference/v1/generate. `what` begins the error. Raises EngineDown."""
    try:
        choice = json.loads(body)["choices"][0]
        reason, token_ids = choice["finish_reason"], tuple(choice["token_ids"])
        logprobs = tuple(float(entry["logprob"]) for entry in choice["logprobs"]["content"])
        labels = choice["weight_versions"]
    except (ValueError, KeyError, IndexError, TypeError) as error:
        # A dying engine answers 200 with an error text inside: only a finish reason means success.
        raise EngineDown(f"{what}: not a finished generation ({error!r}): {body[:500]!r}") from error
    if reason not in ("stop", "length"):
        raise EngineDown(f"{what}: ended with finish reason {reason!r}")
    if not token_ids or len(logprobs) != len(token_ids):
        raise EngineDown(f"{what}: {len(token_ids)} tokens but {len(logprobs)} logprobs")
    return Generation(token_ids, logprobs, _spans(labels, len(token_ids), what), reason)


def _spans(labels: Any, tokens: int, what: str) -> tuple[VersionSpan, ...]:
    if not all(label["version"].isdecimal() for label in labels or ()):
        raise EngineDown(f"{what}: tokens of unknown weights, sampled while none were attached: {labels}")
    spans = tuple(VersionSpan(int(label["version"]), label["start"], label["end"]) for label in labels or ())
    try:
        check_cover(spans, tokens)
    except ValueError as error:
        raise EngineDown(f"{what}: {error}") from error
    return spans

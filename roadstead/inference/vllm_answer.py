"""From vLLM's answers to a `Generation`, or not at all.

Owns: the checks of an answer, whole or in chunks, and which weights wrote the KV of its tokens. Never touches: the
network.
Invariant: what passes has a finish reason, as many logprobs as tokens, and a policy version for each token. What passes
of an unfinished response is a beginning of it, and stamped like the whole.
A crash leaves: nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal

from roadstead.inference.engine import EngineDown, Generation, Partial
from roadstead.inference.labels import version_of
from roadstead.staleness import VersionSpan, check_cover, merge_spans


class AbortedByEngine(Exception):
    """The response ended with finish reason `abort`. Who asked for it, the engine doesn't say."""


class Response:
    """One response while it arrives.

    `what` begins every error. `kept_kv`: the engine keeps the KV of requests in flight over an update.
    """

    def __init__(self, what: str, *, kept_kv: bool) -> None:
        self.what, self._kept_kv = what, kept_kv
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._labels: list[dict[str, Any]] = []
        self.finish_reason: str | None = None

    @property
    def first_label(self) -> str | None:
        """Of the weights that sampled the first token; None while there is none."""
        return str(self._labels[0]["version"]) if self._labels else None

    def add(self, body: str | bytes) -> None:
        """`body`: the JSON of a chunk, or of a whole answer, of /inference/v1/generate.

        Raises EngineDown when it is something else, or has tokens that it doesn't stamp.
        """
        try:
            choice = json.loads(body)["choices"][0]
            token_ids = choice["token_ids"] or []
            logprobs = [float(entry["logprob"]) for entry in (choice["logprobs"] or {}).get("content") or []]
            labels, self.finish_reason = choice["weight_versions"], choice["finish_reason"]
        except (ValueError, KeyError, IndexError, TypeError) as error:
            # A dying engine answers 200 with an error text inside: only a finish reason means success.
            raise EngineDown(f"{self.what}: not a generation ({error!r}): {body[:500]!r}") from error
        if len(logprobs) != len(token_ids):
            raise EngineDown(f"{self.what}: {len(token_ids)} tokens but {len(logprobs)} logprobs")
        self._token_ids += token_ids
        self._logprobs += logprobs
        if self._token_ids and not labels:
            raise EngineDown(
                f"{self.what}: {len(self._token_ids)} tokens of unknown weights; "
                "start the server with `python -m roadstead.inference.launcher`, which stamps each chunk"
            )
        self._labels = labels or []

    def partial(self) -> Partial:
        """What has arrived. Raises EngineDown when a token's weights are no version."""
        spans = self._spans()
        return Partial(tuple(self._token_ids), tuple(self._logprobs), spans, self._kv(spans))

    def generation(self) -> Generation:
        """The finished response. Raises AbortedByEngine, and EngineDown when it proves too little."""
        if self.finish_reason == "abort":
            raise AbortedByEngine
        if self.finish_reason not in ("stop", "length"):
            raise EngineDown(f"{self.what}: ended with finish reason {self.finish_reason!r}")
        if not self._token_ids:
            raise EngineDown(f"{self.what}: finished without a token")
        spans = self._spans()
        reason: Literal["stop", "length"] = "stop" if self.finish_reason == "stop" else "length"
        return Generation(tuple(self._token_ids), tuple(self._logprobs), spans, reason, self._kv(spans))

    def _kv(self, spans: tuple[VersionSpan, ...]) -> tuple[VersionSpan, ...] | None:
        return kv_spans(spans) if self._kept_kv and len(spans) > 1 else None

    def _spans(self) -> tuple[VersionSpan, ...]:
        """One a version: reloads of the same version are joined."""
        spans = []
        for label in self._labels:
            version = version_of(label["version"])
            if version is None:
                raise EngineDown(
                    f"{self.what}: tokens of unknown weights, sampled while none were attached: {self._labels}"
                )
            spans.append(VersionSpan(version, label["start"], label["end"]))
        try:
            check_cover(spans, len(self._token_ids))
        except ValueError as error:
            raise EngineDown(f"{self.what}: {error}") from error
        return tuple(merge_spans(spans))


def kv_spans(spans: Sequence[VersionSpan]) -> tuple[VersionSpan, ...]:
    """Which weights wrote the KV of each of n response tokens, when an update keeps the KV of requests in flight.

    spans: versions that sampled the tokens, covering [0, n), merged. The pass that samples token i + 1 is the one that
    takes token i in, and writes its KV; so KV[i] is of the version of token i + 1, and every boundary lies one token
    earlier than that of `spans`. No pass takes the last token in: KV[n - 1] is never written, and carries the last
    version. A first span of one token leaves none: its weights wrote the KV of the prompt only, which is always of
    the version of the first token (a request that was admitted under older weights is asked again) and not covered.

    Not known here: a request that the engine's scheduler preempts for want of memory has its KV computed anew, or found
    in the prefix cache, when it goes on; its tokens before that then have KV of a newer version than recorded. The
    engine counts it (`vllm:num_preemptions_total`) but does not say whom it hit.
    """
    end = spans[-1].end
    bounds = [0, *(span.start - 1 for span in spans[1:]), end]
    return tuple(
        VersionSpan(span.version, start, stop)
        for span, (start, stop) in zip(spans, pairwise(bounds), strict=True)
        if start < stop
    )

"""What the rest of Roadstead may ask of an inference engine.

Owns: the types of a generation, the errors an engine may end in, and the `Engine` protocol.
Never touches: a network, a process, weights.
Invariant: every sampled token carries the policy version whose weights sampled it. An engine that can't say
so raises; it never guesses.
A crash leaves: nothing; there is no state here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal, Protocol

from roadstead.staleness import VersionSpan


class EngineError(RuntimeError):
    """An engine did not do what was asked."""


class EngineDown(EngineError):
    """Unreachable, crashed, or its answer is unusable: unfinished, or of unknown version. Retry."""


class NotAttached(EngineDown):
    """The engine is up, but its label is no policy version: `attach` it first. Retry."""


class EngineStalled(EngineError):
    """A stage passed its deadline. What became of it is unknown. Retry."""

    def __init__(self, engine_id: str, stage: str, since: datetime, waiting_for: str) -> None:
        super().__init__(
            f"{engine_id}: stalled in {stage!r} since {since.isoformat(timespec='seconds')}, waiting for {waiting_for}"
        )
        self.stage = stage
        self.since = since
        self.waiting_for = waiting_for


class GenerationAborted(EngineError):
    """A weight update ended the request (`rollout.on_update: abort`), or would have mixed two versions in a response
    without `rollout.partial_rollout`. Nothing is wrong: ask again. An abort by anything else is EngineDown."""


class BadRequest(EngineError):
    """The engine refused the request itself (too long, unknown token, ...). The same request fails again."""


class UpdateFailed(EngineError):
    """The engine refused new weights and serves the old ones, or doesn't serve what it acknowledged."""


@dataclass(frozen=True)
class GenerateRequest:
    """One sample of one prompt."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    temperature: float
    """Divides the logits; nothing else (top-p, top-k, penalties) shapes the distribution."""
    seed: int
    ignore_eos: bool


@dataclass(frozen=True)
class Generation:
    """A finished response of n >= 1 tokens."""

    token_ids: tuple[int, ...]
    """n token ids, the end token included when the model gave one."""
    logprobs: tuple[float, ...]
    """n logprobs in nats of the sampled tokens, after temperature."""
    version_spans: tuple[VersionSpan, ...]
    """Contiguous spans that cover exactly [0, n)."""
    finish_reason: Literal["stop", "length"]
    kv_version_spans: tuple[VersionSpan, ...] | None = None
    """Contiguous spans over [0, n): the weights that wrote the KV of each token. None: whenever a token was sampled,
    all KV before it was of the version stamped on it. Differs only under `engine.kv_cache: keep`, see `kv_spans`."""


@dataclass(frozen=True)
class Partial:
    """What has arrived of an unfinished response: n >= 0 tokens from its beginning, as in `Generation`."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    version_spans: tuple[VersionSpan, ...]
    """Cover exactly [0, n): a response that a crash cuts short keeps the versions of what arrived."""
    kv_version_spans: tuple[VersionSpan, ...] | None = None
    """As in `Generation`."""


OnPartial = Callable[[Partial], None]
"""Called from the event loop for each chunk that arrives; must be quick and not raise."""


@dataclass(frozen=True)
class EngineInfo:
    """What a batch records about the engine that generated it."""

    engine_id: str
    build: str
    """Name and version, for example `vllm 0.32.0+cpu`."""
    max_model_len: int
    """Tokens of prompt and response together."""


class Engine(Protocol):
    """Every call ends within the engine's own deadlines; past one it raises EngineStalled."""

    async def generate(self, req: GenerateRequest, on_partial: OnPartial | None = None) -> Generation:
        """Raises EngineDown, EngineStalled, GenerationAborted, BadRequest. Cancelling the call aborts the request.

        `on_partial`: gets the response so far, each time longer and each a beginning of the final one.
        """

    async def attach(self) -> int | None:
        """Make a fresh or abandoned engine serve and label its tokens; idempotent. Returns its version.

        None: an update broke off half-way and the weights are unknown; load some. Raises EngineDown,
        EngineStalled, UpdateFailed when the folder that the engine was started from does not say its version.
        """

    async def version(self) -> int:
        """Policy version being served, from the engine's core.

        Raises EngineDown, NotAttached, EngineStalled.
        """

    async def load_weights(self, folder: Path, version: int) -> None:
        """Replace the weights by those in `folder`; what becomes of requests in flight is the engine's policy.

        `folder`: what `storage.weights.download` made, on the engine's own disk. One caller at a time. It returns when
        the engine has shown that it serves them. Raises UpdateFailed, also for a version older than the one that has
        requests in flight; EngineDown; EngineStalled. What serves after an error, `version` knows: the old weights, or
        none that are certain (NotAttached, see `attach`).
        """

    async def info(self) -> EngineInfo:
        """Raises EngineDown, EngineStalled."""

    async def abort(self, request_id: str) -> None:
        """End a request; whoever waits for it gets EngineDown. Raises EngineDown, EngineStalled."""

    async def aclose(self) -> None:
        """Release the connections; the engine itself runs on."""

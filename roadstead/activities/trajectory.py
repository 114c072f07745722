"""One trajectory: turns of the model and of the environment, until one of them ends it or a budget does.

Owns: the per-token lists of a trajectory and the order of its turns. Never touches: groups, the store, the ledger.
Invariant: tokens are only ever appended, so that what the engine is sent for a turn is, to the id, what it was sent
and sampled before, plus the observation. A trajectory ends in a turn of the model.
A crash leaves: nothing; half a trajectory is not kept. One that is cut off by its time-out is: what was sampled until
then, with its versions.

Environment tokens carry no loss (mask false), a behaviour logprob of 0.0 that nothing reads, and the version of the
model token before them: no policy sampled them, so they must not bring in a version that sampled nothing.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from roadstead.config import RolloutSection
from roadstead.environments.calls import CallFailed, bounded
from roadstead.environments.protocol import Episode, Observation, Response, Transcript, Turn
from roadstead.environments.text import TextCodec
from roadstead.inference.engine import Engine, GenerateRequest, Generation, GenerationAborted, Partial
from roadstead.staleness import VersionSpan, head_version, merge_spans, shift_spans, tail_version

ASSISTANT = "assistant"


class NothingGenerated(RuntimeError):
    """The time-out came before the first token: there is nothing to cut off."""


@dataclass
class Trajectory:
    """T response tokens, environment's included; all lists but `spans` and `turns` are one entry a token."""

    prompt: tuple[int, ...]
    token_ids: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    turns: list[tuple[str, int, int]] = field(default_factory=list)
    """role, start, end."""
    kv_spans: list[VersionSpan] | None = None
    """None as long as no turn kept KV of older weights."""

    def append_model(self, generation: Generation | Partial) -> None:
        start = len(self.token_ids)
        kv = generation.kv_version_spans
        if kv is not None or self.kv_spans is not None:
            before = self.spans if self.kv_spans is None else self.kv_spans
            self.kv_spans = merge_spans([*before, *shift_spans(kv or generation.version_spans, start)])
        self.logprobs += generation.logprobs
        self.spans = merge_spans([*self.spans, *shift_spans(generation.version_spans, start)])
        self._append(ASSISTANT, generation.token_ids, True)

    def append_environment(self, role: str, token_ids: Sequence[int]) -> None:
        """Follows a turn of the model. An empty observation leaves no turn."""
        if not token_ids:
            return
        start, version = len(self.token_ids), self.spans[-1].version
        self.logprobs += [0.0] * len(token_ids)
        own = VersionSpan(version, start, start + len(token_ids))
        self.spans = merge_spans([*self.spans, own])
        if self.kv_spans is not None:
            self.kv_spans = merge_spans([*self.kv_spans, own])
        self._append(role, token_ids, False)

    def _append(self, role: str, token_ids: Sequence[int], loss: bool) -> None:
        start = len(self.token_ids)
        self.token_ids += token_ids
        self.mask += [loss] * len(token_ids)
        self.turns.append((role, start, len(self.token_ids)))

    def columns(self) -> dict[str, Any]:
        """Its columns of the batch schema."""
        return {
            "response_token_ids": self.token_ids,
            "loss_mask": self.mask,
            "behavior_logprobs": self.logprobs,
            "version_spans": _columns(self.spans),
            "kv_version_spans": None if self.kv_spans is None else _columns(self.kv_spans),
            "head_version": head_version(self.spans, self.mask),
            "tail_version": tail_version(self.spans, self.mask),
            "turns": [{"role": role, "start": start, "end": end} for role, start, end in self.turns],
        }


@dataclass(frozen=True)
class Played:
    trajectory: Trajectory
    transcript: Transcript
    failure: str | None
    """Why the environment could not go on, with finish reason `error`; such a trajectory has no reward."""


async def play(
    engine: Engine,
    codec: TextCodec,
    episode: Episode,
    prompt: tuple[int, ...],
    limits: RolloutSection,
    request_id: str,
    seed: int,
    cut_at: float | None = None,
) -> Played:
    """Play one episode to its end. request_id: of the trajectory; a turn's has the turn appended.

    cut_at: loop time at which the trajectory ends where it is, with finish reason `timeout`. Raises NothingGenerated
    when that is before its first token, what `engine.generate` raises but for GenerationAborted, which is asked again,
    and ValueError for an observation that the chat template can't render.
    """
    trajectory, turns = Trajectory(prompt), list[Turn]()
    said: Observation | None = None

    def ended(reason: str, failure: str | None = None) -> Played:
        return Played(trajectory, Transcript(tuple(turns), reason), failure)

    for turn in range(limits.max_turns):
        # An observation joins the trajectory with the turn that answers it: one that is cut off ends with the model.
        observed = () if said is None else codec.observe(said, trajectory.token_ids[-1])
        if len(trajectory.token_ids) + len(observed) >= limits.max_tokens:
            return ended("length")  # no room for another turn of the model
        request = GenerateRequest(
            request_id=f"{request_id}-t{turn}",
            prompt_token_ids=(*prompt, *trajectory.token_ids, *observed),
            max_tokens=limits.max_tokens - len(trajectory.token_ids) - len(observed),
            temperature=limits.temperature,
            seed=_turn_seed(seed, turn),
            ignore_eos=limits.ignore_eos,
        )
        generation = await _generate(engine, request, cut_at)
        if generation.token_ids:
            if said is not None:
                trajectory.append_environment(said.role, observed)
                turns.append(Turn(said.role, said.text))
            trajectory.append_model(generation)
            turns.append(Turn(ASSISTANT, codec.decode(generation.token_ids)))
        if isinstance(generation, Partial):
            if not trajectory.token_ids:
                raise NothingGenerated(f"{request_id}: no token before the time-out")
            return ended("timeout")
        if generation.finish_reason == "length":
            return ended("length")
        try:
            answer = await asyncio.wait_for(
                bounded(
                    "step", limits.environment_timeout_s, episode.step, Response(turns[-1].text, generation.token_ids)
                ),
                None if cut_at is None else max(0.0, cut_at - asyncio.get_running_loop().time()),
            )
        except CallFailed as error:
            return ended("error", str(error))
        except TimeoutError:
            return ended("timeout")
        if answer is None:
            return ended("stop")
        said = Observation(answer) if isinstance(answer, str) else answer
        if not isinstance(said, Observation):
            return ended("error", f"step: returned {type(said).__name__}; expected text, an Observation or None")
    return ended("max_turns")


async def _generate(engine: Engine, request: GenerateRequest, cut_at: float | None) -> Generation | Partial:
    """One turn. At `cut_at` it is ended in the engine, and what has arrived is the answer."""
    arrived = Partial((), (), ())

    def keep(partial: Partial) -> None:
        nonlocal arrived
        arrived = partial

    for again in itertools.count():
        asked = request if not again else dataclasses.replace(request, request_id=f"{request.request_id}-{again}")
        try:
            async with asyncio.timeout_at(cut_at):
                # Streaming costs a message a token; only a turn that may be cut off needs it.
                return await engine.generate(asked, on_partial=None if cut_at is None else keep)
        except TimeoutError:
            return arrived
        except GenerationAborted:
            continue  # new weights came and could not wait for it; the group's time-out bounds this
    raise AssertionError("counts for ever")


def _columns(spans: list[VersionSpan]) -> list[dict[str, int]]:
    return [{"version": span.version, "start": span.start, "end": span.end} for span in spans]


def _turn_seed(seed: int, turn: int) -> int:
    """The trajectory's own seed for its first turn; others for later ones, or they would repeat its draws."""
    if turn == 0:
        return seed
    return int.from_bytes(hashlib.sha256(f"{seed}/{turn}".encode()).digest()[:4], "big")

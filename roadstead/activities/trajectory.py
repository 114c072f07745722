"""One trajectory: turns of the model and of the environment, until one of them ends it or a budget does.

Owns: the per-token lists of a trajectory and the order of its turns. Never touches: groups, the store, the ledger.
Invariant: tokens are only ever appended, so that what the engine is sent for a turn is, to the id, what it was sent
and sampled before, plus the observation. A trajectory ends in a turn of the model.
A crash leaves: nothing; half a trajectory is not kept.

Environment tokens carry no loss (mask false), a behaviour logprob of 0.0 that nothing reads, and the version of the
model token before them: no policy sampled them, so they must not bring in a version that sampled nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from roadstead.config import RolloutSection
from roadstead.environments.calls import CallFailed, bounded
from roadstead.environments.protocol import Episode, Observation, Response, Transcript, Turn
from roadstead.environments.text import TextCodec
from roadstead.inference.engine import Engine, GenerateRequest, Generation
from roadstead.staleness import VersionSpan, head_version, merge_spans, shift_spans, tail_version

ASSISTANT = "assistant"


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

    def append_model(self, generation: Generation) -> None:
        start = len(self.token_ids)
        self.logprobs += generation.logprobs
        self.spans = merge_spans([*self.spans, *shift_spans(generation.version_spans, start)])
        self._append(ASSISTANT, generation.token_ids, True)

    def append_environment(self, role: str, token_ids: Sequence[int]) -> None:
        """Follows a turn of the model. An empty observation leaves no turn."""
        if not token_ids:
            return
        start, version = len(self.token_ids), self.spans[-1].version
        self.logprobs += [0.0] * len(token_ids)
        self.spans = merge_spans([*self.spans, VersionSpan(version, start, start + len(token_ids))])
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
            "version_spans": [{"version": s.version, "start": s.start, "end": s.end} for s in self.spans],
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
) -> Played:
    """Play one episode to its end. request_id: of the trajectory; a turn's has the turn appended.

    Raises what `engine.generate` raises, and ValueError for an observation that the chat template can't render.
    """
    trajectory, turns = Trajectory(prompt), list[Turn]()

    def ended(reason: str, failure: str | None = None) -> Played:
        return Played(trajectory, Transcript(tuple(turns), reason), failure)

    for turn in range(limits.max_turns):
        generation = await engine.generate(
            GenerateRequest(
                request_id=f"{request_id}-t{turn}",
                prompt_token_ids=(*prompt, *trajectory.token_ids),
                max_tokens=limits.max_tokens - len(trajectory.token_ids),
                temperature=limits.temperature,
                seed=_turn_seed(seed, turn),
                ignore_eos=limits.ignore_eos,
            )
        )
        trajectory.append_model(generation)
        turns.append(Turn(ASSISTANT, codec.decode(generation.token_ids)))
        if generation.finish_reason == "length":
            return ended("length")
        try:
            said = await bounded(
                "step", limits.environment_timeout_s, episode.step, Response(turns[-1].text, generation.token_ids)
            )
        except CallFailed as error:
            return ended("error", str(error))
        if said is None:
            return ended("stop")
        observation = Observation(said) if isinstance(said, str) else said
        if not isinstance(observation, Observation):
            return ended("error", f"step: returned {type(said).__name__}; expected text, an Observation or None")
        if turn + 1 < limits.max_turns:
            token_ids = codec.observe(observation, generation.token_ids[-1])
            if len(trajectory.token_ids) + len(token_ids) >= limits.max_tokens:
                return ended("length")  # no room for another turn of the model
            trajectory.append_environment(observation.role, token_ids)
            turns.append(Turn(observation.role, observation.text))
    return ended("max_turns")


def _turn_seed(seed: int, turn: int) -> int:
    """The trajectory's own seed for its first turn; others for later ones, or they would repeat its draws."""
    if turn == 0:
        return seed
    return int.from_bytes(hashlib.sha256(f"{seed}/{turn}".encode()).digest()[:4], "big")

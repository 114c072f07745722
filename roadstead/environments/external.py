"""Finished trajectories that a prompt row brings with it, in its column `trajectories`.

Owns: what such a column must hold, and its members' columns of the batch schema. Never touches: engines, rewards, the
ledger; who calls it marks the rows as not from the live policy.
Invariant: a member has one behaviour logprob a response token, or it is refused: the loss weighs each token by what
the policy that made it thought of it. Its tokens carry the version of the group's admission, so that the ledger holds
it for fresh; that version made none of them, which is why such rows count in no age statistics.
A crash leaves: nothing, it is pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from roadstead.config import RolloutSection
from roadstead.environments.prompts import DatasetError, PromptSet
from roadstead.environments.protocol import Row, Transcript, Turn
from roadstead.environments.rewards import Score
from roadstead.environments.text import TextCodec

COLUMN = "trajectories"
_ASSISTANT = "assistant"
_ROUNDING = 1e-3
"""Nats above 0 that a log-probability may be: engines round in bfloat16."""

TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]


class GivenTurn(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    role: str
    start: int
    end: int


class GivenTrajectory(BaseModel):
    """One entry of the column. T response tokens; null is the same as absent."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    response_token_ids: tuple[TokenId, ...] | None = None
    response_text: str | None = None
    """In place of ids: the tokenizer makes them."""
    behavior_logprobs: tuple[float, ...] | None = None
    """[T] nats, of the policy that made the tokens, at rollout.temperature."""
    loss_mask: tuple[bool, ...] | None = None
    """[T] null: every token carries loss."""
    turns: tuple[GivenTurn, ...] | None = None
    """Over response tokens; null: one turn of the model."""
    finish_reason: str = "stop"
    reward: float | None = None
    """Null: the environment and the reward functions judge it."""
    reward_components: dict[str, float | None] | tuple[tuple[str, float | None], ...] | None = None
    temperature: float | None = None
    """That the logprobs are of, to be compared with rollout.temperature; null: taken on trust."""


@dataclass(frozen=True)
class ExternalMember:
    columns: dict[str, Any]
    """Its own columns of the batch schema, but for reward, reward_components, member and seed."""
    transcript: Transcript
    score: Score | None
    """None: the environment and the reward functions judge it."""


def external_members(row: Row, codec: TextCodec, group_size: int, version: int) -> list[ExternalMember] | None:
    """The row's own trajectories; None: it is an ordinary prompt. version: of the group's admission.

    Raises DatasetError that names the prompt, the trajectory and the remedy.
    """
    if row.get(COLUMN) is None:
        return None
    name = f"prompt {row.get('prompt_id')!r}"
    return [
        _member(f"{name}: {COLUMN}[{i}]", given, codec, version)
        for i, given in enumerate(_given(name, row[COLUMN], group_size))
    ]


def check_prompt(row: Row, prompt: Sequence[int]) -> None:
    """Raise DatasetError unless `prompt` is what the row's trajectories were made from, as far as it says so."""
    wanted = row.get("prompt_token_ids")
    if wanted is not None and tuple(wanted) != tuple(prompt):
        raise DatasetError(
            f"prompt {row.get('prompt_id')!r}: its prompt becomes {len(prompt)} ids here that are not its "
            f"prompt_token_ids ({len(wanted)}), so its logprobs are of another context; use the tokenizer, chat "
            "template and environment that it was made with"
        )


def check_external(prompts: PromptSet, limits: RolloutSection, *, allowed: bool) -> int:
    """How many rows bring trajectories. allowed: data.train_on_external.

    What needs the tokenizer is checked later, row by row. Raises DatasetError for the first row that can't be used.
    """
    found = 0
    for i, row in enumerate(prompts.rows):
        if row.get(COLUMN) is None:
            continue
        name = f"data.prompts: row {i} (prompt_id {row['prompt_id']!r})"
        if not allowed:
            raise DatasetError(
                f"{name} brings {COLUMN}, and data.train_on_external is false; set it to true to train on what the "
                f"running policy did not make, or leave the column {COLUMN!r} out"
            )
        for k, given in enumerate(_given(name, row[COLUMN], limits.group_size)):
            _check_limits(f"{name}: {COLUMN}[{k}]", given, limits)
        found += 1
    return found


def _check_limits(name: str, given: GivenTrajectory, limits: RolloutSection) -> None:
    tokens = len(given.behavior_logprobs or ())
    if tokens > limits.max_tokens:
        raise DatasetError(
            f"{name} has {tokens} tokens, over rollout.max_tokens: {limits.max_tokens}; raise that or leave it out"
        )
    if given.temperature is not None and given.temperature != limits.temperature:
        raise DatasetError(
            f"{name}: temperature {given.temperature:g}, the run has rollout.temperature: {limits.temperature:g}; "
            "logprobs at another temperature are another policy's: set rollout.temperature to theirs"
        )


def _given(name: str, column: Any, group_size: int) -> list[GivenTrajectory]:
    if not isinstance(column, Sequence) or isinstance(column, str) or len(column) != group_size:
        what = f"{len(column)} entries" if isinstance(column, list | tuple) else type(column).__name__
        raise DatasetError(
            f"{name}: {COLUMN} holds {what}; it takes a list of exactly rollout.group_size: {group_size} trajectories, "
            "whose rewards are compared with each other"
        )
    found = []
    for i, entry in enumerate(column):
        where = f"{name}: {COLUMN}[{i}]"
        try:
            given = GivenTrajectory.model_validate(entry)
        except ValidationError as error:
            raise DatasetError(f"{where}: {_explain(error)}") from error
        _check(where, given)
        found.append(given)
    return found


def _check(name: str, given: GivenTrajectory) -> None:
    """What can be told without a tokenizer."""
    if (given.response_token_ids is None) == (given.response_text is None):
        raise DatasetError(f"{name}: needs either response_token_ids or response_text")
    logprobs = given.behavior_logprobs
    if logprobs is None:
        raise DatasetError(
            f"{name}: no behavior_logprobs. The importance weight of a token is its probability under the trained "
            "policy over that under the policy that made it, so without them it can't be trained on; record them "
            "where it is made, or have a model score it: nats, one a response token"
        )
    for k, value in enumerate(logprobs):
        if not math.isfinite(value) or value > _ROUNDING:
            raise DatasetError(
                f"{name}: behavior_logprobs[{k}] is {value}; a log-probability is finite and not above 0"
            )
    if given.response_token_ids is not None:
        _check_lengths(name, given, len(given.response_token_ids))
    if given.reward is not None and not math.isfinite(given.reward):
        raise DatasetError(f"{name}: reward is {given.reward}, not a finite number; leave it out to have it judged")


def _check_lengths(name: str, given: GivenTrajectory, tokens: int) -> None:
    lists = {"behavior_logprobs": given.behavior_logprobs, "loss_mask": given.loss_mask}
    for key, values in lists.items():
        if values is not None and len(values) != tokens:
            raise DatasetError(
                f"{name}: {key} has {len(values)} entries for {tokens} response tokens; it takes one each"
            )
    if tokens == 0 or (given.loss_mask is not None and not any(given.loss_mask)):
        raise DatasetError(f"{name}: no token carries loss, so there is nothing to train on; leave the row out")
    if given.turns is not None:
        edges = [0, *(edge for turn in given.turns for edge in (turn.start, turn.end)), tokens]
        met = all(edges[i] == edges[i + 1] for i in range(0, len(edges), 2))
        if not met or any(turn.end <= turn.start for turn in given.turns):
            raise DatasetError(f"{name}: turns must cover the {tokens} response tokens in order, each at least one")


def _member(name: str, given: GivenTrajectory, codec: TextCodec, version: int) -> ExternalMember:
    ids = _token_ids(name, given, codec)
    mask = given.loss_mask or (True,) * len(ids)
    turns = given.turns or (GivenTurn(role=_ASSISTANT, start=0, end=len(ids)),)
    assert given.behavior_logprobs is not None, "checked"
    columns = {
        "response_text": codec.decode(ids),
        "response_token_ids": list(ids),
        "loss_mask": list(mask),
        "behavior_logprobs": list(given.behavior_logprobs),
        "version_spans": [{"version": version, "start": 0, "end": len(ids)}],
        "head_version": version,
        "tail_version": version,
        "finish_reason": given.finish_reason,
        "turns": [turn.model_dump() for turn in turns],
    }
    said = tuple(Turn(turn.role, codec.decode(ids[turn.start : turn.end])) for turn in turns)
    score = None if given.reward is None else Score(given.reward, dict(given.reward_components or {}))
    return ExternalMember(columns, Transcript(said, given.finish_reason), score)


def _token_ids(name: str, given: GivenTrajectory, codec: TextCodec) -> tuple[int, ...]:
    if given.response_token_ids is not None:
        return given.response_token_ids
    assert given.response_text is not None and given.behavior_logprobs is not None, "checked"
    ids = codec.response(given.response_text, ended=given.finish_reason == "stop")
    # Whoever scored the text may have left out the token that ended it.
    if len(ids) == len(given.behavior_logprobs) + 1 and given.finish_reason == "stop":
        ids = codec.response(given.response_text, ended=False)
    _check_lengths(name, given, len(ids))
    return ids


def _explain(error: ValidationError) -> str:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return f"unknown key {key!r}; known: {', '.join(GivenTrajectory.model_fields)}"
    return f"{key or 'it'}: {first['msg']}"

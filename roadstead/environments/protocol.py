"""What an environment is: `reset` begins an episode, `step` answers a turn of the model, `reward` judges the end.

Owns: the types that an environment sees and gives. Never touches: tokens, engines, the store.
Invariant: an episode belongs to one trajectory and keeps its own state; the environment itself has none that
episodes could share. Every method may be `async`; one that is not runs in a thread of its own.
A crash leaves: nothing; an episode that was cut off is begun again from its row and seed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

Row: TypeAlias = Mapping[str, Any]
"""A row of the prompt dataset, with all of its columns."""

Message: TypeAlias = Mapping[str, str]
"""`role` and `content`, as a chat template takes them."""


@dataclass(frozen=True)
class Reward:
    """`total` is what advantages are made of; `components` are kept for people."""

    total: float
    components: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Response:
    """One turn of the model that it ended by itself."""

    text: str
    """Without special tokens."""
    token_ids: tuple[int, ...]
    """As sampled, the end token included."""


@dataclass(frozen=True)
class Observation:
    """What the environment says between two turns of the model."""

    text: str
    role: str = "user"
    """Of the message in a chat template, and of the turn in the data."""
    token_ids: tuple[int, ...] | None = None
    """Exactly these, in place of what tokenizer and chat template would make of `text`."""


@dataclass(frozen=True)
class Turn:
    role: str
    """`assistant`, or what the observation said."""
    text: str


@dataclass(frozen=True)
class Transcript:
    """A trajectory as a reward sees it. The prompt is in the row."""

    turns: tuple[Turn, ...]
    finish_reason: str
    """stop: the episode ended; length: the token budget did; max_turns: the turn budget did."""

    @property
    def response(self) -> str:
        """The model's last turn: in a single-turn task, all there is."""
        return next((turn.text for turn in reversed(self.turns) if turn.role == "assistant"), "")


class Episode(Protocol):
    """One trajectory of an environment. Calls come one at a time, in order."""

    @property
    def start(self) -> str | Sequence[Message]:
        """The prompt: text, or messages for the chat template. The same for all members of a group."""
        ...

    def step(self, response: Response) -> Observation | str | Awaitable[Observation | str | None] | None:
        """Answer a turn of the model; None ends the episode. A turn cut off by the token budget isn't shown.

        An exception, or no answer in time, ends the trajectory: it is recorded and not trained on. What the model
        should learn to avoid is an observation, not an exception.
        """
        ...

    def reward(self, transcript: Transcript) -> Reward | float | Awaitable[Reward | float]:
        """Called once, at the end, whatever ended the episode. An exception excludes the trajectory from training."""
        ...


class Environment(Protocol):
    """Makes episodes. Used by many trajectories at once."""

    @property
    def name(self) -> str: ...

    def reset(self, row: Row, seed: int) -> Episode | Awaitable[Episode]:
        """Begin an episode. seed: a function of the run's seed and the prompt's position, so that all members of a
        group meet the same task."""
        ...

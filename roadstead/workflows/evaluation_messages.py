"""What an evaluation's workflow and activities say to each other.

Owns: their payloads; the run's own, with EvaluationOrder, are in messages.py. Never touches: anything else.
Invariant: references and counts, as everywhere: samples travel by S3.
"""

from __future__ import annotations

from roadstead.workflows.messages import EvaluationOrder, Message


class EvaluationGroupOrder(Message):
    """Prompts `first` to `first + count` - 1 to evaluate, one after another."""

    evaluation: EvaluationOrder
    first: int
    count: int


class EvaluationClose(Message):
    """What happened that the staged samples do not say."""

    evaluation: EvaluationOrder
    failures: dict[int, str]
    """Why an order did not finish, by its first prompt."""
    share: int
    """Prompts an order."""
    skipped: str | None
    """Why none was begun."""
    seconds: float

"""What training needs of a committed batch.

Owns: reading the batch's columns, the refusal of a row that can't be trained, the choice of some rows.
Never touches: the store, torch.
Invariant: rows keep the order of the batch; a `TrainingBatch` that exists can be trained without an index error,
so that a bad batch is refused before any rank enters a collective.
A crash leaves: nothing, it is pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import pyarrow as pa

from roadstead.training.protocol import TrainerBadBatch

_AGE = ("staleness", "from_live_policy")


@dataclass(frozen=True)
class TrainingRow:
    """What the loss needs of one trajectory. P prompt tokens, T response tokens."""

    group_id: str
    group: int
    """Number of the group in the whole batch, in the order of the rows."""
    member: int
    tokens: np.ndarray
    """[P + T] int32."""
    prompt_length: int
    behavior: np.ndarray
    """[T] float32, nats."""
    mask: np.ndarray
    """[T] bool: tokens that carry loss."""
    over_age: np.ndarray
    """[T] bool: tokens that would carry loss if they were younger."""
    ages: np.ndarray
    """[T] int64: step minus the token's own version; 0 for rows of no version of ours."""
    reward: float | None
    """None: it failed."""
    advantage: float
    temperature: float

    @property
    def measured(self) -> np.ndarray:
        """[T] bool: the batch's own loss mask, over which the row is measured whatever was masked for its age."""
        measured: np.ndarray = self.mask | self.over_age
        return measured

    @property
    def trainable(self) -> bool:
        """It has a gradient. An advantage of NaN counts: the optimizer must see and refuse it."""
        return bool(self.mask.any()) and self.advantage != 0.0


@dataclass(frozen=True)
class TrainingBatch:
    rows: tuple[TrainingRow, ...]

    @classmethod
    def from_table(cls, table: pa.Table, vocabulary: int) -> Self:
        """vocabulary: token ids of the model. Raises TrainerBadBatch for a row that can't be trained, naming it."""
        rows = []
        groups: dict[str, int] = {}
        for i, row in enumerate(table.to_pylist()):
            name = f"row {i} ({row['group_id']} member {row['member']})"
            if not row["prompt_token_ids"]:
                raise TrainerBadBatch(f"{name}: prompt_token_ids is empty; nothing predicts the first response token")
            _check_sampling(name, row["sampling"])
            tokens = np.array(row["prompt_token_ids"] + row["response_token_ids"], dtype=np.int32)
            if tokens.min() < 0 or tokens.max() >= vocabulary:
                raise TrainerBadBatch(
                    f"{name}: token ids run from {tokens.min()} to {tokens.max()}, the model has {vocabulary}; "
                    "the batch was made with another tokenizer"
                )
            mask = np.array(row["loss_mask"], dtype=bool)
            if row["reward"] is None:
                mask[:] = False  # the reward failed: its tokens must not thin out the others' mean either
            rows.append(
                TrainingRow(
                    group_id=row["group_id"],
                    group=groups.setdefault(row["group_id"], len(groups)),
                    member=row["member"],
                    tokens=tokens,
                    prompt_length=len(row["prompt_token_ids"]),
                    behavior=np.array(row["behavior_logprobs"], dtype=np.float32),
                    mask=mask,
                    over_age=np.zeros_like(mask),
                    ages=_ages(row),
                    reward=row["reward"],
                    advantage=row["advantage"],
                    temperature=row["sampling"]["temperature"],
                )
            )
        return cls(tuple(rows))

    def subset(self, indices: Sequence[int]) -> Self:
        """The batch as if only these rows had been in it: the loss is then the mean over their tokens."""
        return type(self)(tuple(self.rows[i] for i in indices))

    def without_older_than(self, age: int | None) -> Self:
        """The batch with the loss taken from tokens whose own version is more than `age` versions old; None: none."""
        if age is None:
            return self
        old = [row.mask & (row.ages > age) for row in self.rows]
        return type(self)(
            tuple(replace(row, mask=row.mask & ~gone, over_age=gone) for row, gone in zip(self.rows, old, strict=True))
        )

    @property
    def lengths(self) -> list[int]:
        """Tokens a row, prompt and response."""
        return [len(row.tokens) for row in self.rows]

    @property
    def loss_tokens(self) -> int:
        return sum(int(row.mask.sum()) for row in self.rows)

    @property
    def loss_rows(self) -> int:
        """Rows with a loss token."""
        return sum(bool(row.mask.any()) for row in self.rows)


def choose_rows(
    table: pa.Table, *, without: Sequence[str] = (), only: Sequence[str] = (), max_staleness: int | None = None
) -> list[int]:
    """Indices of the rows that all of the conditions keep, in the batch's order.

    without, only: a row is named by its number in the batch, by `group_id`, or by `group_id/member`; an empty
    `only` keeps all. max_staleness: rows whose `staleness` is above it are dropped.
    Raises ValueError for a name that the batch does not have, and when nothing is left to train on.
    """
    groups, members = table["group_id"].to_pylist(), table["member"].to_pylist()
    named: dict[str, set[int]] = {}
    for i, (group, member) in enumerate(zip(groups, members, strict=True)):
        for name in (group, f"{group}/{member}"):
            named.setdefault(name, set()).add(i)
    for i in range(len(groups)):
        named.setdefault(str(i), {i})  # a group that is called like a number goes first

    def rows(names: Sequence[str]) -> set[int]:
        unknown = [name for name in names if name not in named]
        if unknown:
            raise ValueError(
                f"rows: {unknown[0]!r} is not in this batch; name rows by number (0 to {len(groups) - 1}), by group "
                f"(for example {groups[0]}) or by group and member ({groups[0]}/{members[0]})"
            )
        return {i for name in names for i in named[name]}

    dropped, wanted = rows(without), rows(only) if only else set(range(len(groups)))
    # Rows that no policy of the run made have no age.
    ages = [a if live else 0 for a, live in zip(*(table[c].to_pylist() for c in _AGE), strict=True)]
    kept = [i for i in sorted(wanted - dropped) if max_staleness is None or ages[i] <= max_staleness]
    if not kept:
        raise ValueError(f"rows: none of the batch's {len(groups)} rows is left to train on; drop fewer")
    return kept


def _check_sampling(name: str, sampling: Mapping[str, Any]) -> None:
    """Raise TrainerBadBatch when log-probabilities under these settings can't be compared with the trainer's.

    The trainer computes log-probabilities of the whole distribution at the row's temperature. A distribution that was
    cut is renormalised over the mass that was kept: each of its log-probabilities is higher by minus the log of that
    mass, and each importance weight lower by the mass, differently at each token (TRL #6789, verl #6240).
    """
    temperature, top_p, top_k = sampling["temperature"], sampling["top_p"], sampling["top_k"]
    if not temperature or temperature <= 0:
        raise TrainerBadBatch(
            f"{name}: sampling.temperature is {temperature}; greedy samples have no log-probabilities to train on, "
            "sample with a temperature above 0"
        )
    cut = "biases every importance weight by the mass that was kept; sample from the whole distribution"
    if top_p != 1.0:
        raise TrainerBadBatch(
            f"{name}: sampling.top_p is {top_p}, which {cut} (top_p 1.0) and lower the temperature, which is corrected "
            "for"
        )
    if top_k not in (-1, 0):
        raise TrainerBadBatch(
            f"{name}: sampling.top_k is {top_k}, which {cut} (top_k -1) and lower the temperature, which is corrected "
            "for"
        )
    if sampling["logprobs_mode"] not in (None, "processed") and temperature != 1.0:
        raise TrainerBadBatch(
            f"{name}: sampling.logprobs_mode is {sampling['logprobs_mode']!r} at temperature {temperature}: "
            "log-probabilities from before the temperature can't be compared with the trainer's; have the engine "
            "report processed ones"
        )


def _ages(row: Mapping[str, Any]) -> np.ndarray:
    """[T] int64. Rows that the running policy did not make have no age: they are never too old."""
    if not row["from_live_policy"]:
        return np.zeros(len(row["response_token_ids"]), dtype=np.int64)
    spans = row["version_spans"]
    # An empty response has no span: without the types numpy would take an empty list for floats.
    versions = np.array([span["version"] for span in spans], dtype=np.int64)
    lengths = np.array([span["end"] - span["start"] for span in spans], dtype=np.int64)
    ages: np.ndarray = row["step"] - np.repeat(versions, lengths)
    return ages

"""Which finished groups are trained on, and whether there is anything in them to learn.

Owns: the verdict on a group. Never touches: rows (they are recorded whatever the verdict), the ledger, the store.
Invariant: a verdict is a function of the group's rows and the configuration; the first filter that objects names it.
A crash leaves: nothing; the verdict is staged with the group, so a retry does not judge again.

The zero-variance filter is DAPO's dynamic sampling (arXiv 2503.14476, section 3.2), a group at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from roadstead.config import FilterSection
from roadstead.environments.calls import bounded
from roadstead.environments.loading import load_filter

Rows = Sequence[Mapping[str, Any]]
"""Of one group, by column of the batch schema; `reward_components` as (name, value) pairs."""

_ERROR = "error: "


@dataclass(frozen=True)
class Verdict:
    filtered: str | None = None
    """Why the group is kept out of training."""
    trainable: bool = True
    """False: no member has an advantage."""
    note: str | None = None
    """Why it is not trainable."""


class Filters:
    def __init__(self, section: FilterSection, timeout_s: float) -> None:
        """timeout_s: of one call of a custom filter. Raises ValueError for a path that can't be imported."""
        self._section, self._timeout_s = section, timeout_s
        self._functions: list[tuple[str, Callable[..., Any]]] = [
            (path.rpartition(":")[2], load_filter(path)) for path in section.functions
        ]

    async def judge(self, rows: Rows) -> Verdict:
        """Raises CallFailed when a custom filter does, or returns something else than text or None."""
        note = nothing_to_learn(rows)
        return Verdict(await self._filtered(rows, note), note is None, note)

    async def _filtered(self, rows: Rows, note: str | None) -> str | None:
        limits = self._section
        if limits.zero_variance and note is not None:
            return "zero_variance"
        lengths = [len(row["response_token_ids"]) for row in rows]
        if limits.min_tokens is not None and min(lengths) < limits.min_tokens:
            return f"min_tokens: a response of {min(lengths)} tokens"
        if limits.max_tokens is not None and max(lengths) > limits.max_tokens:
            return f"max_tokens: a response of {max(lengths)} tokens"
        for name, function in self._functions:
            reason = await bounded(f"filter {name}", self._timeout_s, function, [dict(row) for row in rows])
            if reason is not None:
                return f"{name}: {reason}"
        return None


def nothing_to_learn(rows: Rows) -> str | None:
    """Why no member of the group has an advantage, in words; None: some member has one.

    A member counts when its reward is known and some token of it carries loss.
    """
    counted = [row["reward"] for row in rows if row["reward"] is not None]
    if not counted:
        errors = Counter(
            name.removeprefix(_ERROR)
            for row in rows
            for name, _ in row["reward_components"] or ()
            if name.startswith(_ERROR)
        )
        return f"no reward: {errors.most_common(1)[0][0]}" if errors else "no reward"
    if min(counted) == max(counted):
        return f"reward constant {counted[0]:g}"
    mean = sum(counted) / len(counted)
    if not any(row["reward"] not in (None, mean) and any(row["loss_mask"]) for row in rows):
        return "no token that carries loss"
    return None

"""What an audit says: findings, ranked, each with its rows.

Owns: the words of a finding and the order of findings. Never touches: the store, the statistics.
Invariant: findings are ordered by severity, then confidence, then first step; a finding always says why in plain
words and which rows it means.
A crash leaves: nothing, it is pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict

Severity = Literal["critical", "warning", "note"]
"""critical: an invariant of the log is broken, or no gradient can be right. warning: the data look wrong. note: worth
knowing, likely a consequence of something above it."""
_ORDER: dict[str, int] = {"critical": 0, "warning": 1, "note": 2}


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class RowRef(_Frozen):
    """One trajectory of a trained batch."""

    step: int
    slot: int
    group_id: str
    member: int
    prompt_id: str
    engine_id: str
    environment: str


class Finding(_Frozen):
    check: str
    """Name of the check that found it."""
    severity: Severity
    confidence: float
    """0 to 1: how sure the check is that this is a fault and not chance. 1.0: it was computed, not estimated."""
    title: str
    why: str
    """The figures and the reasoning, in plain words."""
    first_step: int | None
    """First bad step; None when the fault belongs to no step."""
    steps: tuple[int, ...] = ()
    engines: tuple[str, ...] = ()
    environments: tuple[str, ...] = ()
    templates: tuple[str, ...] = ()
    """Prompt texts with their numbers replaced by #, or the prompts' first words."""
    prompts: tuple[str, ...] = ()
    """Prompt ids: the dataset's rows."""
    groups: tuple[str, ...] = ()
    rows: tuple[RowRef, ...] = ()
    keys: tuple[str, ...] = ()
    """Objects concerned."""


class Report(_Frozen):
    run_id: str
    steps: tuple[int, ...]
    """Steps that were examined."""
    rows: int
    findings: tuple[Finding, ...]
    checks: tuple[str, ...]
    """Every check that ran, whether it found something or not."""
    notes: tuple[str, ...] = ()
    """What could not be checked, and why."""

    @classmethod
    def ranked(cls, findings: Iterable[Finding], **values: object) -> Self:
        def rank(finding: Finding) -> tuple[int, float, int]:
            first = finding.first_step if finding.first_step is not None else -1
            return (_ORDER[finding.severity], -finding.confidence, first)

        return cls.model_validate({"findings": tuple(sorted(findings, key=rank)), **values})

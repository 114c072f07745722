"""What a chaos run came to: one line a run, a closing table a component, JSON.

Owns: the wording and the arithmetic of the figures. Never touches: processes, S3.
Invariant: every figure is a difference of two times that were seen, or of two counts; what was not seen is "-".
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from tests.chaos.driver import Blow, Outcome
from tests.chaos.verdict import Verdict

_TRAINS_ALL = {"synchronous", "minibatches", "two-engines", "two-ranks"}


@dataclass(frozen=True)
class Result:
    outcome: Outcome
    verdict: Verdict

    @property
    def wrong(self) -> list[str]:
        """Everything that was not as it must be."""
        return [*self.outcome.wrong, *(w for b in self.outcome.blows for w in b.wrong), *self.verdict.violations]

    @property
    def again(self) -> int | None:
        """Tokens generated and not trained: lost with their engine or worker, or staged and never trained.

        Only of runs that train on all they generate: not with members too many, filters, evaluations or discards.
        """
        if self.wrong or not _TRAINS_ALL.issuperset(self.outcome.schedule.features):
            return None
        return max(0, self.outcome.generated - self.verdict.trained_tokens)


def reproduce(result: Result, options: str) -> str:
    seed = result.outcome.schedule.seed
    return f"make chaos N=1 SEED={seed}" + (f" CHAOS='{options}'" if options else "")


def line(result: Result) -> str:
    outcome, verdict = result.outcome, result.verdict
    ends = ", ".join(f"{count} {state}" for state, count in sorted(verdict.terminal.items())) or "nothing on record"
    again = "-" if result.again is None else result.again
    evaluations = f"{verdict.evaluations} evaluated, " if verdict.evaluations else ""
    staleness = f"staleness <= {verdict.max_staleness}"
    return (
        f"seed {outcome.schedule.seed:<4} {'ok  ' if not result.wrong else 'FAIL'} {outcome.seconds:5.0f} s  "
        f"{ends}, {staleness}, {evaluations}{verdict.attempts} attempt(s), {again} tokens again  "
        f"[{outcome.schedule}]  {' + '.join(outcome.schedule.features) or 'plain'}"
    )


# -- figures of one blow, in seconds from it --------------------------------------------------------------


def detection(blow: Blow) -> float | None:
    return _since(blow, blow.detected_at)


def start_up(blow: Blow) -> float | None:
    """From restart to ready: of engine, trainer and machine that is the load of their models."""
    begun = blow.resumed_at or blow.detected_at
    return blow.ready_at - begun if blow.ready_at is not None and begun is not None else None


def admission(blow: Blow) -> float | None:
    return _since(blow, blow.admitted_at)


def trained(blow: Blow) -> float | None:
    return _since(blow, blow.trained_at)


def stall(blow: Blow) -> float | None:
    return blow.stall_s


def orderly_exit(blow: Blow) -> float | None:
    return blow.exit_s


def _since(blow: Blow, moment: float | None) -> float | None:
    return None if moment is None else moment - blow.since


_FIGURES: dict[str, Callable[[Blow], float | None]] = {
    "detected": detection,
    "start-up": start_up,
    "admission": admission,
    "next step": trained,
    "longest stall": stall,
    "orderly exit": orderly_exit,
}


_TITLE = "seconds from the blow, or from the resume after an orderly end: median (maximum)"


def label(blow: Blow) -> str:
    """The row of the table that a blow belongs to."""
    kind = blow.fault.kind
    verb = kind.partition(":")[0]
    if verb in {"before", "after", "before-machine", "after-machine"}:
        return f"kill:{blow.fault.component}" if blow.fault.component != "machine" else "machine"
    return kind


def table(results: Sequence[Result]) -> Table:
    """Seconds from the blow, median and maximum."""
    view = Table(
        title="seconds from the blow, or from the resume after an orderly end: median (maximum)", title_justify="left"
    )
    view.add_column("what was broken")
    for name in ("n", *_FIGURES, "tokens again"):
        view.add_column(name, justify="right")
    rows: dict[str, list[Blow]] = {}
    for result in results:
        for blow in result.outcome.blows:
            rows.setdefault(label(blow), []).append(blow)
    for name, blows in sorted(rows.items()):
        figures = [_spread([f for b in blows if (f := figure(b)) is not None]) for figure in _FIGURES.values()]
        alone = [
            result.again / len(result.outcome.blows)
            for result in results
            if result.again is not None and {label(b) for b in result.outcome.blows} == {name}
        ]
        view.add_row(name, str(len(blows)), *figures, _spread(alone, digits=0))
    return view


def _spread(values: list[float], digits: int = 1) -> str:
    if not values:
        return "-"
    if len(values) == 1:
        return f"{values[0]:.{digits}f}"
    return f"{statistics.median(values):.{digits}f} ({max(values):.{digits}f})"


def to_json(result: Result) -> dict[str, Any]:
    outcome, verdict = result.outcome, result.verdict
    return {
        "seed": outcome.schedule.seed,
        "ok": not result.wrong,
        "wrong": result.wrong,
        "seconds": round(outcome.seconds, 1),
        "steps": outcome.schedule.steps,
        "features": outcome.schedule.features,
        "attempts": verdict.attempts,
        "terminal": verdict.terminal,
        "evaluations": verdict.evaluations,
        "max_staleness": verdict.max_staleness,
        "tokens": {
            "generated": outcome.generated,
            "staged": verdict.staged_tokens,
            "trained": verdict.trained_tokens,
            "again": result.again,
        },
        "blows": [
            {
                "kind": blow.fault.kind,
                "component": blow.fault.component,
                "at": blow.at,
                "for_s": blow.fault.for_s,
                "allowed_s": blow.allowed_s,
                "code": blow.code,
                **{name: None if (f := figure(blow)) is None else round(f, 3) for name, figure in _FIGURES.items()},
            }
            for blow in outcome.blows
        ],
    }

"""All that an audit looks at, read once.

Owns: which objects are read, and how what is proved becomes tables. Never touches: judgement; it writes nothing.
Invariant: rows come from committed batches whose digests were recomputed; a batch that fails is a problem here and
not a row anywhere.
A crash leaves: nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pandas as pd

from roadstead.storage import runs
from roadstead.storage.audit.report import Finding, RowRef, Severity
from roadstead.storage.audit.rows import BatchFrames, frames_of
from roadstead.storage.audit.verify import Problem, StepEvidence, along_the_run, chosen_steps, examine
from roadstead.storage.keys import RunKeys
from roadstead.storage.objects import ObjectStore
from roadstead.storage.runs import AttemptEnd, AttemptRecord, RunRecord

_THREADS = 4


@dataclass
class Evidence:
    run: RunRecord
    attempts: list[AttemptRecord]
    ends: list[AttemptEnd]
    whole: bool
    """The whole run was read, not a window of steps: accounts over the run can be made."""
    steps: list[StepEvidence]
    problems: list[Problem]
    rows: pd.DataFrame
    """See `rows.BatchFrames`; the index is 0 .. R-1 over all steps."""
    spans: pd.DataFrame
    positions: pd.DataFrame
    notes: list[str] = field(default_factory=list)

    def bound(self, attempt: int) -> int:
        """max_staleness that the attempt ran under."""
        bound = self.run.config["staleness"]["max_staleness"]
        for record in self.attempts:
            if record.attempt <= attempt and record.config:
                bound = record.config["staleness"]["max_staleness"]
        return int(bound)

    def finding(
        self,
        check: str,
        severity: Severity,
        confidence: float,
        title: str,
        why: str,
        rows: pd.DataFrame,
        *,
        first_step: int | None = None,
    ) -> Finding:
        """A finding about `rows`, a part of this evidence's rows, most telling first."""
        names = {
            column: tuple(sorted(set(rows[column])))
            for column in ("engine_id", "environment", "template", "prompt_id", "group_id")
        }
        steps = tuple(sorted({int(step) for step in rows["step"]}))
        return Finding(
            check=check,
            severity=severity,
            confidence=round(confidence, 3),
            title=title,
            why=why,
            first_step=first_step if first_step is not None else min(steps, default=None),
            steps=steps,
            engines=names["engine_id"],
            environments=names["environment"],
            templates=names["template"],
            prompts=names["prompt_id"],
            groups=names["group_id"],
            rows=tuple(RowRef.model_validate(row) for row in rows[list(RowRef.model_fields)].to_dict("records")),
        )


def read_evidence(
    store: ObjectStore,
    keys: RunKeys,
    chosen: range | None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Evidence:
    """Raises ObjectMissing without such a run, ValueError without such steps, StoreError when the store is silent."""
    run, attempts = runs.read(store, keys), runs.attempts(store, keys)
    ends = [end for record in attempts if (end := runs.find_end(store, keys, record.attempt))]
    numbers = chosen_steps(store, keys, chosen)
    steps: list[StepEvidence] = []
    parts: list[BatchFrames] = []
    with ThreadPoolExecutor(_THREADS) as pool:
        for evidence, frames in pool.map(partial(_one, store, keys), numbers):
            steps.append(evidence)
            parts += [frames] if frames else []
            progress(len(steps), len(numbers))
    rows, spans, positions = _joined(parts)
    untrained = [e.step for e in steps if e.commit and e.data_rows and e.result is None]
    notes = [f"no train rows at step(s) {untrained}: engine against trainer can't be compared there"] * bool(untrained)
    problems = [p for e in steps for p in e.problems] + along_the_run(store, keys, steps)
    return Evidence(
        run=run,
        attempts=attempts,
        ends=ends,
        whole=chosen is None,
        steps=steps,
        problems=problems,
        rows=rows,
        spans=spans,
        positions=positions,
        notes=notes,
    )


def _one(store: ObjectStore, keys: RunKeys, step: int) -> tuple[StepEvidence, BatchFrames | None]:
    evidence = examine(store, keys, step)
    frames = None if evidence.data is None else frames_of(evidence.data, evidence.train)
    evidence.data_rows = 0 if evidence.data is None else evidence.data.num_rows
    evidence.data = evidence.train = None  # the scalars are what is kept of a long run
    return evidence, frames


def _joined(parts: list[BatchFrames]) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    if not parts:
        return pd.DataFrame(), pd.DataFrame(), pd.DataFrame()
    starts = np.cumsum([0] + [len(part.rows) for part in parts[:-1]])
    rows = pd.concat([part.rows for part in parts], ignore_index=True)

    def shifted(frames: list[pd.DataFrame]) -> pd.DataFrame:
        moved = [f.assign(row=f["row"].astype(int) + s) for f, s in zip(frames, starts, strict=True) if len(f)]
        return pd.concat(moved, ignore_index=True) if moved else frames[0]

    return rows, shifted([p.spans for p in parts]), shifted([p.positions for p in parts])

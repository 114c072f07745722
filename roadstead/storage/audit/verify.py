"""Every digest of a run, computed again.

Owns: the list of what must agree with what in one step and along the run. Never touches: statistics; it writes
nothing.
Invariant: a `Problem` is a fact about stored bytes, never an estimate. A store that does not answer is an error, not
a problem of the run.
A crash leaves: nothing.

One step is whole when: commit and step record are there and name the same batch; data and stats files have the
commit's sha256 and the data its canonical digest; stats are the data's own columns; the rows are the staged groups of
the commit, in slot order, and those have their digests; the train rows belong to exactly these rows and follow from
their logprobs; the record's weights are the manifests of versions k and k+1; the manifest of k+1 names the batch and
its parent.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
import pyarrow as pa
from pydantic import BaseModel, ConfigDict

from roadstead.storage import batches, schema, steps, train_rows, weights
from roadstead.storage.audit.tokens import LossTokens
from roadstead.storage.batches import BatchCommit, StoredFile
from roadstead.storage.digest import table_digest
from roadstead.storage.keys import RunKeys
from roadstead.storage.objects import BrokenRead, ObjectCorrupt, ObjectMissing, ObjectStore, sha256
from roadstead.storage.parquet import decode
from roadstead.storage.steps import StepRecord
from roadstead.storage.train_rows import TrainResult
from roadstead.storage.weights import WeightsManifest

T = TypeVar("T")
Kind = Literal["missing", "unreadable", "sha256", "digest", "schema", "rows", "stats", "groups", "train", "chain"]
_THREADS = 4
"""Steps read at once: reading waits for the store, and digests release the interpreter."""
_IMPORTANCE_TOLERANCE = 1e-3
"""Relative: the trainer averages float32 weights in an order of its own; a wrong row is off by far more."""


class Problem(BaseModel):
    """Something stored is not what it must be."""

    model_config = ConfigDict(frozen=True)

    step: int
    kind: Kind
    key: str
    detail: str
    found: str | None = None
    """Canonical digest of what lies there instead, when it is a whole table."""
    groups: tuple[str, ...] = ()


class Verdict(BaseModel):
    """`problems` empty: the run's log is what was trained."""

    model_config = ConfigDict(frozen=True)

    run_id: str
    steps: int
    unrecorded: tuple[int, ...]
    """Committed batches without a step record after the last one: steps that were under way."""
    objects: int
    bytes: int
    problems: tuple[Problem, ...]

    @property
    def ok(self) -> bool:
        return not self.problems


@dataclass
class StepEvidence:
    """One step as it lies in the store; tables are None when they can't be trusted."""

    step: int
    commit: BatchCommit | None = None
    record: StepRecord | None = None
    result: TrainResult | None = None
    manifest: WeightsManifest | None = None
    """Of the version that the step made."""
    data: pa.Table | None = None
    train: pa.Table | None = None
    problems: list[Problem] = field(default_factory=list)
    objects: int = 0
    bytes: int = 0
    data_rows: int = 0


def step_numbers(store: ObjectStore, keys: RunKeys) -> range:
    """Steps of the run, gaps included: from 0 to the last that has a commit or a record."""
    # The listing finds what lies behind a gap; asking by key finds what a stale listing lacks.
    listed = [int(name.removeprefix("step=")) for name in store.folders(f"{keys.root}/batches/")]
    listed += [int(key.rsplit("=", 1)[1].removesuffix(".json")) for key in store.keys(keys.steps)]
    end = max(listed, default=-1) + 1
    while store.exists(keys.batch_commit(end)) or store.exists(keys.step_record(end)):
        end += 1
    return range(end)


def verify(
    store: ObjectStore,
    keys: RunKeys,
    chosen: range | None = None,
    *,
    with_weights: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Verdict:
    """Recompute the digests of steps `chosen`, default all. `with_weights`: the bytes of the weight files too.

    Raises StoreError when the store does not answer.
    """
    numbers = chosen_steps(store, keys, chosen)
    seen: list[StepEvidence] = []
    with ThreadPoolExecutor(_THREADS) as pool:
        for evidence in pool.map(partial(_examine_light, store, keys, with_weights), numbers):
            seen.append(evidence)
            progress(len(seen), len(numbers))
    problems = [problem for evidence in seen for problem in evidence.problems] + along_the_run(store, keys, seen)
    last = max((e.step for e in seen if e.record), default=-1)
    return Verdict(
        run_id=keys.run_id,
        steps=sum(e.record is not None for e in seen),
        unrecorded=tuple(e.step for e in seen if e.record is None and e.commit is not None and e.step > last),
        objects=sum(e.objects for e in seen),
        bytes=sum(e.bytes for e in seen),
        problems=tuple(sorted(problems, key=lambda p: p.step)),
    )


def chosen_steps(store: ObjectStore, keys: RunKeys, chosen: range | None) -> range:
    """`chosen`, cut to the steps that there are. Raises ValueError when none is left."""
    there = step_numbers(store, keys)
    numbers = there if chosen is None else range(max(0, chosen.start), min(there.stop, chosen.stop))
    if chosen is not None and not numbers:
        raise ValueError(
            f"steps {chosen.start}:{chosen.stop} of run {keys.run_id!r}: none of them is there, it has steps "
            f"0:{there.stop}"
        )
    return numbers


def along_the_run(store: ObjectStore, keys: RunKeys, seen: Iterable[StepEvidence]) -> list[Problem]:
    """What only shows between steps: gaps, and weights that do not follow from one another."""
    problems: list[Problem] = []
    before: StepEvidence | None = None
    last = max((e.step for e in seen if e.record), default=-1)
    for evidence in seen:
        step, record = evidence.step, evidence.record
        if record is None and step < last and not any(p.key == keys.step_record(step) for p in evidence.problems):
            problems.append(_gap(keys.step_record(step), step, f"no step record, but step {last} has one"))
        if evidence.commit is None and not any(p.key == keys.batch_commit(step) for p in evidence.problems):
            problems.append(
                _gap(keys.batch_commit(step), step, "no batch commit, but a later step or its record is there")
            )
        if record and before and before.record and record.weights_in != before.record.weights_out:
            problems.append(
                Problem(
                    step=step,
                    kind="chain",
                    key=keys.step_record(step),
                    detail=f"trained on top of weights {record.weights_in}, but step {before.step} left "
                    f"{before.record.weights_out}",
                )
            )
        before = evidence
    return problems


def examine(store: ObjectStore, keys: RunKeys, step: int, *, with_weights: bool = False) -> StepEvidence:
    """Everything of one step, proved. Raises StoreError when the store does not answer."""
    return _Examination(store, keys, step).run(with_weights)


def _examine_light(store: ObjectStore, keys: RunKeys, with_weights: bool, step: int) -> StepEvidence:
    evidence = examine(store, keys, step, with_weights=with_weights)
    evidence.data = evidence.train = None  # a long run's tables do not fit in memory
    return evidence


def _gap(key: str, step: int, detail: str) -> Problem:
    return Problem(step=step, kind="missing", key=key, detail=detail)


class _Examination:
    def __init__(self, store: ObjectStore, keys: RunKeys, step: int) -> None:
        self._store, self._keys, self._evidence = store, keys, StepEvidence(step)

    def run(self, with_weights: bool) -> StepEvidence:
        here, keys, step = self._evidence, self._keys, self._evidence.step
        here.commit = self._record(keys.batch_commit(step), lambda: batches.find(self._store, keys, step))
        here.record = self._record(keys.step_record(step), lambda: steps.find(self._store, keys, step))
        if here.commit is not None:
            self._batch(here.commit)
            self._train(here.commit)
        if here.record is not None:
            self._weights(here.record, with_weights)
        return here

    # -- the batch ----------------------------------------------------------------------------------------

    def _batch(self, commit: BatchCommit) -> None:
        keys, step, record = self._keys, self._evidence.step, self._evidence.record
        where = keys.batch_commit(step)
        if (commit.step, commit.run_id) != (step, keys.run_id):
            self._problem(
                "digest", where, f"is the commit of step {commit.step} of run {commit.run_id}", found=commit.digest
            )
        if record is not None and record.batch_digest != commit.digest:
            self._problem(
                "chain", where, f"commits batch {commit.digest}, the step record was written for {record.batch_digest}"
            )
        if commit.data.key != keys.batch_data(step, commit.digest):
            self._problem("digest", where, f"names data {commit.data.key}, its digest {commit.digest} has another key")
        data = self._file(commit.data, commit)
        if data is not None and self._data(commit, data):
            self._evidence.data = data
        stats = self._file(commit.stats, commit)
        if data is not None and stats is not None:
            expected = table_digest(data.select([c for c in schema.STATS_COLUMNS if c in data.column_names]))
            if table_digest(stats) != expected:
                self._problem("stats", commit.stats.key, "is not the data's own scalars", found=table_digest(stats))

    def _data(self, commit: BatchCommit, data: pa.Table) -> bool:
        """True when the table is the committed one."""
        key, before = commit.data.key, len(self._evidence.problems)
        if (found := table_digest(data)) != commit.digest:
            self._problem(
                "digest", key, f"canonical digest {found}, the commit says {commit.digest}", found=found, commit=commit
            )
            return False
        try:
            schema.check(data, batch=True)
        except schema.SchemaError as error:
            self._problem("schema", key, str(error))
        if data.num_rows != commit.rows:
            self._problem("rows", key, f"{data.num_rows} rows, the commit says {commit.rows}")
        if set(data["step"].to_pylist()) != {commit.step} or set(data["run_id"].to_pylist()) != {commit.run_id}:
            self._problem("rows", key, "its rows are of another step or run than the commit")
        ages = data.filter(data["from_live_policy"])["staleness"].to_pylist()
        if data.num_rows and max(ages, default=0) != commit.max_staleness:
            self._problem("rows", key, f"oldest row is not of staleness {commit.max_staleness}, as the commit says")
        self._groups(commit, data)
        # Rows that contradict the commit are still exactly what was trained: they stay evidence.
        return all(p.kind != "schema" for p in self._evidence.problems[before:])

    def _groups(self, commit: BatchCommit, data: pa.Table) -> None:
        """The rows are the staged groups, unchanged, in slot order."""
        columns = [name for name in schema.SCHEMA.names if name not in schema.BATCH_ONLY]
        ids = np.asarray(data["group_id"].to_pylist(), dtype=object)
        slots = data["slot"].to_numpy()
        if commit.groups and set(ids) != {group.group_id for group in commit.groups}:
            self._problem("groups", commit.data.key, "holds other groups than the commit names")
        for group in commit.groups:
            key = self._keys.group(group.group_id, group.attempt)
            staged = self._table(key, f"staged group {group.group_id}")
            if staged is None:
                continue
            if (found := table_digest(staged)) != group.digest:
                self._problem(
                    "groups", key, f"canonical digest {found}, the commit says {group.digest}", (group.group_id,)
                )
                continue
            rows = data.filter(pa.array((ids == group.group_id) & (slots == group.slot)))
            if table_digest(rows.select(columns)) != table_digest(staged.select(columns)):
                self._problem(
                    "groups", commit.data.key, f"slot {group.slot} differs from its staged group", (group.group_id,)
                )

    # -- training -----------------------------------------------------------------------------------------

    def _train(self, commit: BatchCommit) -> None:
        here, key = self._evidence, self._keys.train_rows(commit.step, commit.digest)
        here.result = self._record(key, lambda: train_rows.find(self._store, self._keys, commit.step, commit.digest))
        if here.result is None:
            if here.record is not None and not any(p.key == key for p in here.problems):
                self._problem("missing", key, "the step is recorded as trained, its train rows are gone")
            return
        if here.record is not None:
            if here.record.weights_out != here.result.weights.digest:
                self._problem(
                    "chain", key, f"left weights {here.result.weights.digest}, recorded: {here.record.weights_out}"
                )
            if here.record.metrics != here.result.metrics:
                self._problem("train", key, "its metrics differ from the step record's")
        rows = self._table(key, "train rows")
        if rows is None or here.data is None:
            return
        names = list(zip(here.data["group_id"].to_pylist(), here.data["member"].to_pylist(), strict=True))
        if list(zip(rows["group_id"].to_pylist(), rows["member"].to_pylist(), strict=True)) != names:
            self._problem("train", key, f"{rows.num_rows} rows that are not the batch's {len(names)}")
            return
        tokens = LossTokens.of(here.data, rows)
        if tokens is None:
            self._problem("train", key, "its logprobs are not one a response token")
            return
        here.train = rows
        importance, stored = tokens.importance_mean(), rows["importance_mean"].to_numpy()
        off = ~np.isclose(importance, stored, rtol=_IMPORTANCE_TOLERANCE, equal_nan=True) & np.isfinite(importance)
        if off.any():
            first = int(np.argmax(off))
            self._problem(
                "train",
                key,
                f"{int(off.sum())} row(s) whose importance weight does not follow from the logprobs, first "
                f"{names[first][0]} member {names[first][1]}: {stored[first]:.6g}, computed {importance[first]:.6g}",
                tuple(sorted({names[i][0] for i in np.flatnonzero(off)})),
            )

    # -- weights ------------------------------------------------------------------------------------------

    def _weights(self, record: StepRecord, with_bytes: bool) -> None:
        keys, step = self._keys, record.step
        before = self._manifest(step)
        after = self._evidence.manifest = self._manifest(step + 1)
        where = keys.weights_manifest(step + 1)
        if before is not None and before.digest != record.weights_in:
            self._problem("chain", keys.weights_manifest(step), f"is {before.digest}, trained on {record.weights_in}")
        if after is not None:
            if after.digest != record.weights_out:
                self._problem("chain", where, f"is {after.digest}, recorded as made by the step: {record.weights_out}")
            if before is not None and after.parent_digest != before.digest:
                self._problem("chain", where, f"names parent {after.parent_digest}, version {step} is {before.digest}")
            if after.batch_digest != record.batch_digest:
                self._problem("chain", where, f"made from batch {after.batch_digest}, recorded: {record.batch_digest}")
        for manifest in (before if step == 0 else None, after):
            if with_bytes and manifest is not None:
                self._weight_files(manifest)

    def _weight_files(self, manifest: WeightsManifest) -> None:
        key = self._keys.weights_manifest(manifest.version)
        with tempfile.TemporaryDirectory() as scratch:
            try:
                folder = weights.download(self._store, manifest, Path(scratch) / "weights")
                found = weights.tensors_digest(folder)
            except (ObjectMissing, ObjectCorrupt, BrokenRead) as error:
                self._problem("sha256", key, f"a weight file of version {manifest.version}: {error}")
                return
        self._evidence.objects += len(manifest.files)
        self._evidence.bytes += sum(file.bytes for file in manifest.files)
        if found != manifest.digest:
            self._problem("digest", key, f"its tensors' digest is {found}, the manifest says {manifest.digest}")

    def _manifest(self, version: int) -> WeightsManifest | None:
        key = self._keys.weights_manifest(version)
        try:
            manifest = weights.manifest_of(self._store, self._keys, version)
        except ObjectMissing:
            self._problem("missing", key, "the manifest is gone")
            return None
        except (ObjectCorrupt, BrokenRead) as error:
            self._problem("unreadable", key, str(error))
            return None
        self._evidence.objects += 1
        return manifest

    # -- reading ------------------------------------------------------------------------------------------

    def _record(self, key: str, find: Callable[[], T | None]) -> T | None:
        try:
            found = find()
        except (ObjectCorrupt, BrokenRead) as error:
            self._problem("unreadable", key, str(error))
            return None
        self._evidence.objects += found is not None
        return found

    def _file(self, file: StoredFile, commit: BatchCommit) -> pa.Table | None:
        body = self._body(file.key, "the commit names it", commit)
        if body is None:
            return None
        if (found := sha256(body)) != file.sha256:
            table = _readable(body)
            lies = "not readable as Parquet: truncated or overwritten" if table is None else "another whole table"
            self._problem(
                "sha256",
                file.key,
                f"{len(body)} bytes of sha256 {found}, the commit says {file.bytes} bytes of {file.sha256} ({lies})",
                found=None if table is None else table_digest(table),
                commit=commit,
            )
            return None
        table = _readable(body)
        if table is None:
            self._problem("unreadable", file.key, "was committed like this, and is not readable as Parquet")
        return table

    def _table(self, key: str, what: str) -> pa.Table | None:
        body = self._body(key, what)
        if body is None:
            return None
        if (table := _readable(body)) is None:
            self._problem("unreadable", key, f"{what}: {len(body)} bytes that are not readable as Parquet")
        return table

    def _body(self, key: str, what: str, commit: BatchCommit | None = None) -> bytes | None:
        try:
            body = self._store.get(key)
        except ObjectMissing:
            self._problem("missing", key, f"gone: {what}", commit=commit)
            return None
        except BrokenRead as error:
            self._problem("unreadable", key, str(error), commit=commit)
            return None
        self._evidence.objects += 1
        self._evidence.bytes += len(body)
        return body

    def _problem(
        self,
        kind: Kind,
        key: str,
        detail: str,
        groups: tuple[str, ...] = (),
        *,
        found: str | None = None,
        commit: BatchCommit | None = None,
    ) -> None:
        groups = groups or (tuple(group.group_id for group in commit.groups) if commit else ())
        self._evidence.problems.append(
            Problem(step=self._evidence.step, kind=kind, key=key, detail=detail, found=found, groups=groups)
        )


def _readable(body: bytes) -> pa.Table | None:
    try:
        return decode(body)
    except ObjectCorrupt:
        return None

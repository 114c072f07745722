"""What rank 0 does for a question: which steps, which rows, which probes. Imports torch: import it late.

Owns: the order of a replay's and of a bisection's operations, and what is concluded from them.
Never touches: how a step is computed (the trainer's), the search (`bisect`'s); it writes nothing to the store.
Invariant: the state that steps and probes start from is the checkpoint's, moved on by committed batches only; each
step was compared with the record before anything is concluded from it. A probe leaves no weight moved: checked at the
end.
A crash leaves: a scratch folder, which whoever started the group removes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch.distributed as dist

from roadstead.config import TrainingSection
from roadstead.storage import batches, steps, train_rows, weights
from roadstead.storage.batches import BatchCommit, Frozen
from roadstead.storage.checkpoints import CheckpointManifest
from roadstead.storage.keys import RunKeys
from roadstead.storage.objects import ObjectMissing, ObjectStore
from roadstead.storage.train_rows import TrainMetrics, TrainResult
from roadstead.training.batch_rows import TrainingBatch, choose_rows
from roadstead.training.bisect import RECENT_STEPS, default_threshold, smallest_cure
from roadstead.training.differences import compare_updates
from roadstead.training.group import RankGroup
from roadstead.training.replay import (
    BisectAsk,
    BisectReport,
    Counterfactual,
    Metric,
    Phase,
    Probe,
    ReplayAsk,
    ReplayReport,
    RowEffect,
    StepReplay,
    UpdateDifference,
    history_of,
    in_force,
    result_folder,
)
from roadstead.training.service import read_table, stepped_always
from roadstead.training.trainer import Effects, StepOutcome, Trainer, changed_settings

Tell = Callable[[Frozen], None]
"""Sends an event to whoever asked."""


class BatchReader:
    """Committed batches, proved; the last one is kept, because a bisection asks for it again and again."""

    def __init__(self, store: ObjectStore, vocabulary: int) -> None:
        self._store, self._vocabulary = store, vocabulary
        self._held: tuple[str, pa.Table, TrainingBatch] | None = None

    def read(self, record: BatchCommit) -> tuple[pa.Table, TrainingBatch]:
        """Raises TrainerBadBatch, StoreError."""
        if self._held is None or self._held[0] != record.digest:
            table = read_table(self._store, record)
            self._held = (record.digest, table, TrainingBatch.from_table(table, self._vocabulary))
        return self._held[1], self._held[2]


@dataclass(frozen=True)
class Recorded:
    """What the run wrote down when it trained a batch; None where it did not get so far."""

    digest: str | None
    metrics: TrainMetrics | None


class Answers:
    """Rank 0's side of the questions. Its methods run beside the main thread, which serves the group."""

    def __init__(
        self,
        store: ObjectStore,
        keys: RunKeys,
        folder: Path,
        group: RankGroup,
        trainer: Trainer,
        restored: CheckpointManifest | None,
        reader: BatchReader,
        tell: Tell,
    ) -> None:
        """folder: scratch. restored: the checkpoint that `trainer` came up with; None: version 0."""
        self._store, self._keys, self._folder = store, keys, folder
        self._group, self._trainer, self._reader, self.tell = group, trainer, reader, tell
        self._restored = 0 if restored is None else restored.version
        self._notes = () if restored is None else _setting_notes(restored, trainer.settings)
        self._history = history_of(store, keys)
        self._probed_state: str | None = None
        """Manifest of the saved state that probes are trained from; None: they move nothing."""
        self._phase(f"restored version {self._restored}")

    def replay(self, ask: ReplayAsk) -> ReplayReport:
        record = self._committed(ask.last)
        # A bad choice is refused before anything is trained.
        kept = None if ask.rows is None else choose_rows(self._reader.read(record)[0], **ask.rows.model_dump())
        done = self._up_to(ask.last)
        state = None if kept is None else self._save_state(record.step)
        last, effects = self._train(record)
        whole = result_folder(self._folder) if kept is None else self._folder / "whole"
        if kept is not None or last.equal is False or ask.keep is not None:
            self._export(whole)
        counterfactual = None
        if kept is not None and state is not None:
            self._phase(f"going back to version {record.step}")
            self._load_state(state)
            counterfactual = self._some_rows(record, kept, whole)
        return ReplayReport(
            run_id=self._keys.run_id,
            restored_version=self._restored,
            steps=(*done, last),
            rows=tuple(self._row_effects(record, effects.rows)),
            deviation=self._deviation(record, whole) if last.equal is False else None,
            counterfactual=counterfactual,
            equal=all(step.equal is not False for step in (*done, last)),
            notes=self._notes,
            seconds=0.0,
        )

    def bisect(self, ask: BisectAsk) -> BisectReport:
        record = self._committed(ask.step)
        threshold, source = self._threshold(ask)
        notes = [
            f"step {step.step} gave other weights than are on record"
            for step in self._up_to(ask.step)
            if step.equal is False
        ]
        digest = self._group.call({"op": "digest"})
        if self._training(record).minibatches > 1:
            self._probed_state = self._save_state(record.step)
        probes = _Probes(self, record, ask, threshold)
        whole = probes.ask(frozenset())
        effects = self._row_effects(record, whole.rows)
        cure = None
        if probes.is_sick(frozenset()):
            cure = smallest_cure(_suspects_first(effects, ask.metric), probes.cures, ask.budget - 1)
        if self._group.call({"op": "digest"}) != digest:
            raise RuntimeError(f"the probes moved the weights of version {ask.step}; their answers are worth nothing")
        # The removal of the whole batch always cures. It is an answer only when nothing smaller does.
        found = cure is not None and (cure.minimal or len(cure.removed) < len(effects))
        culprits = cure.removed if cure is not None and found else frozenset[int]()
        then = self._recorded(record).metrics
        return BisectReport(
            run_id=self._keys.run_id,
            step=ask.step,
            metric=ask.metric,
            threshold=threshold,
            threshold_source=source,
            value=probes.values[frozenset()],
            reproduced=None if then is None else _same_gradient(whole.metrics, then),
            outcome="healthy" if cure is None else "found" if found else "unfinished",
            culprits=tuple(effect for effect in effects if effect.row in culprits),
            minimal=found and cure is not None and cure.minimal,
            value_without=probes.values.get(culprits) if found else None,
            probes=len(probes.values),
            budget=ask.budget,
            notes=(*self._notes, *notes),
            seconds=0.0,
        )

    def probe(self, record: BatchCommit, kept: Sequence[int]) -> Effects:
        """What training on these rows gives; the version held stays."""
        if self._probed_state is None:
            effects: Effects = self._group.call(self._operation("probe", record, list(kept)))
            return effects
        effects = self._train_rows(record, list(kept))
        self._load_state(self._probed_state)
        return effects

    # -- steps ------------------------------------------------------------------------------------------------

    def _up_to(self, version: int) -> list[StepReplay]:
        """The whole batches from the restored version on, so that the trainer holds `version`."""
        return [self._train(self._committed(step))[0] for step in range(self._restored, version)]

    def _train(self, record: BatchCommit) -> tuple[StepReplay, Effects]:
        """The whole batch of a step, compared with the record."""
        began = time.monotonic()
        outcome = self._train_rows(record, None)
        recorded = self._recorded(record)
        replayed = StepReplay(
            step=record.step,
            batch_digest=record.digest,
            weights_digest=outcome.digest,
            recorded_digest=recorded.digest,
            equal=None if recorded.digest is None else outcome.digest == recorded.digest,
            metrics=outcome.metrics,
            recorded_metrics=recorded.metrics,
            seconds=round(time.monotonic() - began, 4),
        )
        self.tell(replayed)
        return replayed, outcome

    def _train_rows(self, record: BatchCommit, kept: list[int] | None) -> StepOutcome:
        self._reader.read(record)  # a batch that does not verify is refused before any rank enters a collective
        outcome: StepOutcome = self._group.call(self._operation("train", record, kept))
        return outcome

    def _operation(self, op: str, record: BatchCommit, kept: list[int] | None) -> dict[str, Any]:
        result = self._result(record)
        return {
            "op": op,
            "commit": record.model_dump_json(),
            "training": self._training(record).model_dump_json(),
            "kept": kept,
            "always_step": result is not None and stepped_always(result),
        }

    def _training(self, record: BatchCommit) -> TrainingSection:
        """The settings that the step was trained under."""
        result = self._result(record)
        if result is None or result.training is None:
            return in_force(self._history, record.step).config.training
        return TrainingSection.model_validate(result.training)

    def _some_rows(self, record: BatchCommit, kept: list[int], whole: Path) -> Counterfactual:
        self._phase(f"step {record.step} again on {len(kept)} of {record.rows} rows")
        began = time.monotonic()
        outcome = self._train_rows(record, kept)
        seconds = round(time.monotonic() - began, 4)
        self._export(result_folder(self._folder))
        return Counterfactual(
            dropped=tuple(i for i in range(record.rows) if i not in set(kept)),
            kept=tuple(kept),
            metrics=outcome.metrics,
            weights_digest=outcome.digest,
            updates=compare_updates(self._folder / "base", whole, result_folder(self._folder)),
            seconds=seconds,
        )

    def _save_state(self, version: int) -> str:
        """State and weights of `version` into the scratch folder; the state's manifest."""
        folder = self._folder / "state"
        folder.mkdir()
        digest = self._export(self._folder / "base")
        self._group.call({"op": "save", "folder": str(folder)})
        return CheckpointManifest(
            version=version,
            weights_digest=digest,
            world_size=dist.get_world_size(),
            settings=self._trainer.settings,
            files=(),
        ).model_dump_json()

    def _load_state(self, manifest: str) -> None:
        self._group.call({"op": "load", "folder": str(self._folder / "state"), "manifest": manifest})

    def _phase(self, text: str) -> None:
        self.tell(Phase(text=text))

    def _export(self, folder: Path) -> str:
        """The weights held, as `folder`; their digest."""
        return str(self._group.call({"op": "digest", "folder": str(folder)}))

    # -- the record -------------------------------------------------------------------------------------------

    def _committed(self, step: int) -> BatchCommit:
        record = batches.find(self._store, self._keys, step)
        if record is None:
            raise ObjectMissing(f"{self._store.url(self._keys.batch_commit(step))}: step {step} has no committed batch")
        return record

    def _recorded(self, record: BatchCommit) -> Recorded:
        if (done := steps.find(self._store, self._keys, record.step)) is not None:
            return Recorded(done.weights_out, done.metrics)
        result = self._result(record)
        return Recorded(None, None) if result is None else Recorded(result.weights.digest, result.metrics)

    def _result(self, record: BatchCommit) -> TrainResult | None:
        return train_rows.find(self._store, self._keys, record.step, record.digest)

    def _row_effects(self, record: BatchCommit, rows: Sequence[dict[str, Any]]) -> list[RowEffect]:
        table, batch = self._reader.read(record)
        batch = batch.without_older_than(self._training(record).mask_older_than)
        try:
            before = train_rows.read(self._store, self._keys, record)["trainer_logprobs"].to_pylist()
        except ObjectMissing:
            before = [None] * len(rows)
        names = ("importance_mean", "importance_max", "capped_share", "kl_to_behavior", "loss")
        return [
            RowEffect(
                row=i,
                group_id=row["group_id"],
                member=row["member"],
                staleness=staleness,
                reward=reward,
                advantage=float(batch.rows[i].advantage),
                loss_tokens=int(batch.rows[i].mask.sum()),
                logprob_gap=None if then is None else _gap(row["trainer_logprobs"], then),
                **{name: row[name] for name in names},
            )
            for i, (row, staleness, reward, then) in enumerate(
                zip(rows, table["staleness"].to_pylist(), table["reward"].to_pylist(), before, strict=True)
            )
        ]

    def _deviation(self, record: BatchCommit, replayed: Path) -> UpdateDifference | None:
        """Recorded and replayed update; None when the recorded weights are no longer stored."""
        self._phase("comparing with the recorded weights")
        folders = {}
        for version in (record.step, record.step + 1):
            try:
                manifest = weights.manifest_of(self._store, self._keys, version)
                folders[version] = weights.download(self._store, manifest, self._folder / f"published-v{version}")
            except ObjectMissing:
                return None
        return compare_updates(folders[record.step], folders[record.step + 1], replayed)

    def _threshold(self, ask: BisectAsk) -> tuple[float | None, str]:
        if ask.metric == "nan":
            return None, "sick: the gradient is not finite, the optimizer skips the step"
        if ask.threshold is not None:
            return ask.threshold, "given"
        self._phase("reading the metrics of recent steps")
        values = []
        for step in range(max(0, ask.step - RECENT_STEPS), ask.step):
            metrics = self._recorded(self._committed(step)).metrics
            value = None if metrics is None else metric_value(metrics, ask.metric)
            values += [] if value is None else [value]
        return default_threshold(values), (
            f"median + 6 x 1.4826 x MAD, at least 2 x median, of {len(values)} earlier step(s)"
        )


class _Probes:
    """The sick step, asked without some of its rows."""

    def __init__(self, answers: Answers, record: BatchCommit, ask: BisectAsk, threshold: float | None) -> None:
        self._answers, self._record, self._ask, self._threshold = answers, record, ask, threshold
        self.values: dict[frozenset[int], float | None] = {}
        """Rows removed to the metric without them; None: not finite."""

    def cures(self, removed: frozenset[int]) -> bool:
        self.ask(removed)
        return not self.is_sick(removed)

    def is_sick(self, removed: frozenset[int]) -> bool:
        value = self.values[removed]
        return value is None or (self._threshold is not None and value > self._threshold)

    def ask(self, removed: frozenset[int]) -> Effects:
        began = time.monotonic()
        kept = [i for i in range(self._record.rows) if i not in removed]
        effects = self._answers.probe(self._record, kept)
        self.values[removed] = metric_value(effects.metrics, self._ask.metric)
        self._answers.tell(
            Probe(
                number=len(self.values),
                budget=self._ask.budget,
                removed=tuple(sorted(removed)),
                remaining=len(kept),
                value=self.values[removed],
                sick=self.is_sick(removed),
                seconds=round(time.monotonic() - began, 4),
            )
        )
        return effects


def metric_value(metrics: TrainMetrics, metric: Metric) -> float | None:
    """Magnitude of the metric; None: not finite. For `nan`: the gradient norm."""
    match metric:
        case "kl":
            return abs(metrics.kl_to_behavior)
        case "loss":
            return abs(metrics.loss)
    return metrics.grad_norm


def _suspects_first(effects: list[RowEffect], metric: Metric) -> list[list[int]]:
    """Rows by group; groups and members with the largest share of the metric first. It costs probes, not truth."""

    def suspicion(effect: RowEffect) -> float:
        share = effect.kl_to_behavior if metric == "kl" else effect.loss
        return math.inf if share is None else abs(share)

    groups: dict[str, list[int]] = {}
    for effect in sorted(effects, key=suspicion, reverse=True):
        groups.setdefault(effect.group_id, []).append(effect.row)
    return list(groups.values())


def _same_gradient(now: TrainMetrics, then: TrainMetrics) -> bool:
    names = ("loss", "grad_norm", "kl_to_behavior", "loss_tokens")
    return all(getattr(now, name) == getattr(then, name) for name in names)


def _gap(now: np.ndarray, then: list[float]) -> float:
    """Tokens that are not finite in both are equal."""
    gaps = np.abs(now.astype(np.float64) - np.array(then))
    return float(np.where(np.isnan(now) & np.isnan(then), 0.0, gaps).max(initial=0.0))


def _setting_notes(manifest: CheckpointManifest, now: dict[str, Any]) -> tuple[str, ...]:
    return tuple(
        f"checkpoint v={manifest.version} was saved with {name} {then}, this replay has {here}"
        for name, (then, here) in changed_settings(manifest, now).items()
    )

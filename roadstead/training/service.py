"""What rank 0 does for a command: find out whether the step was done, catch up, train, write the result.

Owns: idempotence of `train`, the order of reads and writes on S3, replay, the status.
Never touches: torch, the socket, what happens inside an operation of the group.
Invariant: a step's result is on S3 before its checkpoint is, and both before `train` is answered; so a state that
comes back from a checkpoint of version v has the results of all steps below v. At most one step is in flight.
A crash leaves: a step without its result (trained again from a checkpoint, by replay) or with it (answered).
Orphan weight files of an unfinished step are adopted or ignored by their digest.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa

from roadstead.config import RunConfig, TrainingSection
from roadstead.storage import batches, checkpoints, train_rows, weights
from roadstead.storage.batches import BatchCommit
from roadstead.storage.checkpoints import CheckpointManifest
from roadstead.storage.keys import RunKeys
from roadstead.storage.objects import ObjectCorrupt, ObjectMissing, ObjectStore
from roadstead.storage.schema import SchemaError
from roadstead.storage.train_rows import TrainResult
from roadstead.training.batch_rows import TrainingBatch
from roadstead.training.protocol import (
    ReplayMismatch,
    Status,
    TrainerBadBatch,
    TrainerConflict,
    TrainerOutOfOrder,
)

if TYPE_CHECKING:
    from roadstead.training.trainer import StepOutcome

log = logging.getLogger(__name__)

_BOOT_S = 900.0
"""A command that arrives during boot waits this long; a large model's download and load fit in."""
_STEP_S = 24 * 3600.0
"""No step takes longer; the caller has its own, shorter deadline."""


class Group(Protocol):
    """The part of `RankGroup` that is used here."""

    def call(self, operation: dict[str, Any], local: Any = None) -> Any: ...

    def quit(self) -> None: ...


class TrainerState:
    """What `status` tells; written by rank 0's threads, read by its socket threads."""

    def __init__(
        self,
        incarnation: int,
        last_failure: str | None,
        silence: Callable[[float], dict[str, float]] = lambda began: {},
    ) -> None:
        """silence: of the ranks, given the Unix seconds at which this one began."""
        self._began = time.time()
        self._silence = silence
        self._lock = threading.Lock()
        self._status = Status(
            version=None,
            busy_step=None,
            phase="boot",
            since=self._began,
            pid=os.getpid(),
            incarnation=incarnation,
            boot_seconds=None,
            last_failure=last_failure,
            silence={},
        )

    def enter(self, phase: str) -> None:
        with self._lock:
            self._status["phase"], self._status["since"] = phase, time.time()

    def busy(self, step: int | None) -> None:
        with self._lock:
            self._status["busy_step"] = step

    def ready(self, version: int) -> None:
        with self._lock:
            self._status["boot_seconds"] = round(time.time() - self._began, 3)
            self._status["version"] = version

    def moved(self, version: int) -> None:
        with self._lock:
            self._status["version"] = version

    def read(self) -> Status:
        silence = self._silence(self._began)
        with self._lock:
            return Status(**{**self._status, "silence": silence})


@dataclass
class _Job:
    step: int
    what: str
    """Digest of the batch to train, or "checkpoint"."""
    work: Callable[[_Ready], dict[str, Any]]
    future: Future[dict[str, Any]] = field(default_factory=Future)


@dataclass(frozen=True)
class _Ready:
    """Known once the group has booted."""

    group: Group
    vocabulary: int
    ranks: int
    settings: dict[str, Any]


class TrainService:
    """Thread-safe. Answers before the group is ready: status at once, commands when it is."""

    def __init__(
        self,
        config: RunConfig,
        store: ObjectStore,
        keys: RunKeys,
        folder: Path,
        state: TrainerState,
        fail_stop: Callable[[BaseException], None],
    ) -> None:
        """folder: scratch of this group. fail_stop: ends the process, for errors after the weights moved."""
        self._config, self._store, self._keys = config, store, keys
        self._folder, self._state, self._fail_stop = folder, state, fail_stop
        self._version = 0
        self._ready: Future[_Ready] = Future()
        self._lock = threading.Lock()
        self._job: _Job | None = None
        self._mismatch: str | None = None

    def ready(self, group: Group, *, version: int, vocabulary: int, ranks: int, settings: dict[str, Any]) -> None:
        """The group holds policy version `version` and serves calls."""
        self._version = version
        self._state.ready(version)
        self._state.enter("idle")
        self._ready.set_result(_Ready(group, vocabulary, ranks, settings))

    def quit(self) -> None:
        self._await_ready().group.quit()

    def train(self, step: int, digest: str) -> dict[str, Any]:
        """Train version `step` on the batch of that digest, once. Returns {"result", "seconds"}.

        Joins the step if it is in flight. Raises TrainerConflict, TrainerOutOfOrder, TrainerBadBatch,
        ReplayMismatch; StoreError and TimeoutError may be tried again.
        """
        return self._once(step, digest, lambda ready: self._train(step, digest, ready))

    def checkpoint(self, version: int) -> dict[str, Any]:
        """Have a complete checkpoint of a published version, saved now or before. Returns {"version"}.

        Raises TrainerOutOfOrder when the trainer is past it, ObjectMissing when it was not published.
        """
        return self._once(version, "checkpoint", lambda ready: self._save(version, ready))

    def _once(self, step: int, what: str, work: Callable[[_Ready], dict[str, Any]]) -> dict[str, Any]:
        """Do `work`, or join it while it is in flight. One thing at a time."""
        with self._lock:
            job = self._job
            if job is None:
                job = self._job = _Job(step, what, work)
                threading.Thread(target=self._run, args=(job,), name=f"step-{step}", daemon=True).start()
            elif job.step != step:
                raise TrainerOutOfOrder(f"step {step}: step {job.step} is in flight; ask again when it is done")
            elif job.what != what:
                raise TrainerConflict(f"step {step} is in flight with batch {job.what}; refused batch {what}")
        return job.future.result(timeout=_STEP_S)

    def _run(self, job: _Job) -> None:
        try:
            ready = self._await_ready()
            self._state.busy(job.step)
            answer = job.work(ready)
        except Exception as error:  # whatever it is, the commander must hear it
            self._finish()
            job.future.set_exception(error)
        else:
            self._finish()
            job.future.set_result(answer)

    def _await_ready(self) -> _Ready:
        try:
            return self._ready.result(timeout=_BOOT_S)
        except TimeoutError as error:
            status = self._state.read()
            raise TimeoutError(
                f"the trainer did not finish booting within {_BOOT_S:.0f} s; it is at {status['phase']!r} since "
                f"{time.time() - status['since']:.0f} s"
            ) from error

    def _finish(self) -> None:
        self._state.busy(None)
        if self._ready.done():
            self._state.enter("idle")
        with self._lock:
            self._job = None

    def _train(self, step: int, digest: str, ready: _Ready) -> dict[str, Any]:
        watch = _Watch(self._state)
        watch.enter("read")
        record = self._committed(step)
        if record.digest != digest:
            raise TrainerConflict(
                f"{self._store.url(self._keys.batch_commit(step))}: step {step} is committed with batch "
                f"{record.digest}; refused batch {digest}"
            )
        if self._mismatch is not None:
            raise ReplayMismatch(self._mismatch)
        result = train_rows.find(self._store, self._keys, step, digest)
        if result is not None:
            self._catch_up(step + 1, ready, watch)
        else:
            if self._version > step:
                raise TrainerOutOfOrder(
                    f"step {step} was asked for, the trainer holds version {self._version} and "
                    f"{self._store.url(self._keys.train_rows(step, digest))} does not exist; restart the trainer "
                    "after removing the checkpoints above that step, if its result was deleted on purpose"
                )
            batch = self._batch(record, ready)
            self._catch_up(step, ready, watch)
            result = self._first_time(record, batch, ready, watch)
        return {"result": result.model_dump(mode="json"), "seconds": watch.seconds()}

    def _save(self, version: int, ready: _Ready) -> dict[str, Any]:
        there = checkpoints.newest(self._store, self._keys, version)
        if there is None or there.version != version:
            digest = weights.manifest_of(self._store, self._keys, version).digest
            watch = _Watch(self._state)
            self._catch_up(version, ready, watch)
            if self._version != version:
                raise TrainerOutOfOrder(f"a checkpoint of version {version} is wanted, version {self._version} is held")
            watch.enter("checkpoint")
            self._checkpoint(version, digest, ready)
        return {"version": version}

    def _first_time(self, record: BatchCommit, batch: TrainingBatch, ready: _Ready, watch: _Watch) -> TrainResult:
        folder = self._folder / "export"
        shutil.rmtree(folder, ignore_errors=True)
        try:
            watch.enter("train")
            outcome = self._step(record, batch, ready, folder, self._config.training)
            watch.enter("upload")
            version = record.step + 1
            files = tuple(
                weights.upload_file(self._store, self._keys, version, path) for path in sorted(folder.iterdir())
            )
            ref = weights.WeightsRef(version=version, digest=outcome.digest, files=files)
            result = TrainResult(
                step=record.step,
                batch_digest=record.digest,
                weights=ref,
                metrics=outcome.metrics,
                training=self._config.training.model_dump(mode="json"),
            )
            result = train_rows.write(self._store, self._keys, outcome.rows, result)
            if version % self._config.training.checkpoint_every == 0 or version == self._config.training.steps:
                watch.enter("checkpoint")
                self._checkpoint(version, outcome.digest, ready)
        except Exception as error:
            # The weights may have moved, their result may be missing: start over from what S3 holds.
            self._fail_stop(error)
            raise
        shutil.rmtree(folder)
        return result

    def _catch_up(self, wanted: int, ready: _Ready, watch: _Watch) -> None:
        """Replay committed batches until the trainer holds version `wanted`."""
        while self._version < wanted:
            step = self._version
            watch.enter(f"replay of step {step} on the way to version {wanted}")
            if batches.find(self._store, self._keys, step) is None:
                raise TrainerOutOfOrder(
                    f"version {wanted} is needed, the trainer holds version {step}, and step {step} has no "
                    f"committed batch to replay ({self._store.url(self._keys.batch_commit(step))}); train it first"
                )
            record = self._committed(step)
            recorded = train_rows.find(self._store, self._keys, step, record.digest)
            # A resume may have changed the settings since; the weights to come out are those of then.
            then = recorded.training if recorded is not None else None
            training = self._config.training if then is None else TrainingSection.model_validate(then)
            always = recorded is not None and stepped_always(recorded)
            outcome = self._step(record, self._batch(record, ready), ready, None, training, always)
            if recorded is None or recorded.weights.digest == outcome.digest:
                continue
            text = (
                f"replay of step {step} (batch {record.digest}) gave weights {outcome.digest}, the first run gave "
                f"{recorded.weights.digest}"
            )
            if self._config.engine.device == "cuda":
                log.warning("%s; kernels on this device are not deterministic, training goes on", text)
                continue
            self._mismatch = (
                f"{text}; on CPU both must agree: compare threads, ranks and library versions with "
                f"{self._store.url(self._keys.checkpoints)}, then restart the trainer"
            )
            raise ReplayMismatch(self._mismatch)

    def _step(
        self,
        record: BatchCommit,
        batch: TrainingBatch,
        ready: _Ready,
        folder: Path | None,
        training: TrainingSection,
        always_step: bool = False,
    ) -> StepOutcome:
        operation = {
            "op": "train",
            "commit": record.model_dump_json(),
            "training": training.model_dump_json(),
            "folder": None if folder is None else str(folder),
            "always_step": always_step,
        }
        outcome: StepOutcome = ready.group.call(operation, batch)
        self._version = record.step + 1
        self._state.moved(self._version)
        return outcome

    def _checkpoint(self, version: int, digest: str, ready: _Ready) -> None:
        folder = self._folder / "checkpoint"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        ready.group.call({"op": "save", "folder": str(folder)})
        manifest = CheckpointManifest(
            version=version,
            weights_digest=digest,
            world_size=ready.ranks,
            settings=ready.settings,
            files=checkpoints.upload(self._store, self._keys, version, folder),
        )
        checkpoints.complete(self._store, self._keys, manifest)
        shutil.rmtree(folder)

    def _committed(self, step: int) -> BatchCommit:
        try:
            record = batches.find(self._store, self._keys, step)
        except ObjectCorrupt as error:
            raise TrainerBadBatch(str(error)) from error
        if record is None:
            raise TrainerBadBatch(
                f"{self._store.url(self._keys.batch_commit(step))}: no batch is committed for step {step}; persist it "
                "first"
            )
        return record

    def _batch(self, record: BatchCommit, ready: _Ready) -> TrainingBatch:
        return read_batch(self._store, record, ready.vocabulary)


def stepped_always(result: TrainResult) -> bool:
    """The result is of a release that stepped the optimizer also without a gradient, which moves the weights by Adam's
    momentum and weight decay: a replay must do the same."""
    return result.metrics.trainable_rows is None


def read_table(store: ObjectStore, record: BatchCommit) -> pa.Table:
    """The committed batch, proved. Raises TrainerBadBatch; StoreError when the store does not answer."""
    try:
        return batches.read(store, record)
    except (ObjectCorrupt, ObjectMissing, SchemaError) as error:
        raise TrainerBadBatch(f"batch of step {record.step}: {error}") from error


def read_batch(store: ObjectStore, record: BatchCommit, vocabulary: int) -> TrainingBatch:
    """The committed batch as the trainer takes it. Raises as `read_table` does."""
    return TrainingBatch.from_table(read_table(store, record), vocabulary)


class _Watch:
    """Seconds a phase; entering one shows it in the status."""

    def __init__(self, state: TrainerState) -> None:
        self._state = state
        self._spent: dict[str, float] = {}
        self._phase, self._since = "", time.monotonic()

    def enter(self, phase: str) -> None:
        self._state.enter(phase)
        self._close()
        self._phase = phase.split(" ")[0]

    def seconds(self) -> dict[str, float]:
        """Phase to seconds; replays are one phase."""
        self._close()
        return {phase: round(seconds, 4) for phase, seconds in self._spent.items()}

    def _close(self) -> None:
        now = time.monotonic()
        if self._phase:
            self._spent[self._phase] = self._spent.get(self._phase, 0.0) + now - self._since
        self._since = now

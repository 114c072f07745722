"""Training steps again, from the log: what is asked, what comes back, and the process group that answers.

    replay(ReplayAsk(run="arithmetic", storage=..., first=17, last=17))     -> ReplayReport
    bisect(BisectAsk(run="arithmetic", storage=..., step=17, metric="nan")) -> BisectReport
    python -m roadstead.training.replay < ask.json                          the same, events as JSON lines on stdout

Owns: the questions and answers, the choice of the configuration that was in force, the life of the group.
Never touches: torch, the run's own trainer, its scratch or its keys: nothing is written to the store.
Invariant: every answer comes from a process group of its own, in an empty folder that goes away with it, on the
run's ranks, ZeRO stage, dtype, token budget and one thread a rank.
A crash leaves: a temporary folder; the group dies with whoever asked.
"""

from __future__ import annotations

import importlib.metadata
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, TypeAdapter

from roadstead.config import RunConfig, StorageSection, parse
from roadstead.process import die_with_parent
from roadstead.storage import batches, runs
from roadstead.storage.batches import Frozen
from roadstead.storage.keys import RunKeys
from roadstead.storage.objects import ObjectCorrupt, ObjectMissing, ObjectStore, StoreAddress, StoreError
from roadstead.storage.train_rows import TrainMetrics
from roadstead.training.protocol import TrainerBadBatch, TrainerError

_QUIET_S = 3600.0
"""A group that reports nothing for so long hangs: one download or one step of a large model is the longest."""
_END_S = 60.0
"""A group that has answered is given this long to end by itself."""
_POLL_S = 0.05
_WEIGHTS = (".safetensors", ".safetensors.index.json")


class ReplayFailed(TrainerError):
    """The question was not answered; the text says why."""


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


Number = Annotated[float | None, BeforeValidator(_finite)]
"""Null: not finite. JSON has no NaN."""

# -- questions ------------------------------------------------------------------------------------------------


class Rows(Frozen):
    """Which rows of the last step are trained. Names: row number, `group_id` or `group_id/member`."""

    without: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    max_staleness: Annotated[int, Field(ge=0)] | None = None


class ReplayAsk(Frozen):
    kind: Literal["replay"] = "replay"
    run: str
    storage: StorageSection
    first: Annotated[int, Field(ge=0)]
    """First step reported on; the checkpoint is the newest of a version <= `first`."""
    last: Annotated[int, Field(ge=0)]
    """Last step replayed, `first` at least."""
    rows: Rows | None = None
    """Also train the last step on these rows of its batch only, from the same state."""
    keep: str | None = None
    """A folder to make, for the resulting weights as a Hugging Face directory: with `rows`, those trained on them."""


Metric = Literal["grad_norm", "kl", "loss", "nan"]


class BisectAsk(Frozen):
    kind: Literal["bisect"] = "bisect"
    run: str
    storage: StorageSection
    step: Annotated[int, Field(ge=0)]
    metric: Metric
    threshold: Annotated[float, Field(gt=0)] | None = None
    """The step is sick when the metric's magnitude is above it; null: from the recent steps. Not for `nan`."""
    budget: Annotated[int, Field(ge=2)] = 100
    """Most probes; the first is the whole batch."""


# -- answers --------------------------------------------------------------------------------------------------


class Phase(Frozen):
    """What goes on, for people."""

    kind: Literal["phase"] = "phase"
    text: str


class StepReplay(Frozen):
    """One step, trained again."""

    kind: Literal["step"] = "step"
    step: int
    batch_digest: str
    weights_digest: str
    recorded_digest: str | None
    """Null: the step was never finished, there is nothing to compare with."""
    equal: bool | None
    metrics: TrainMetrics
    recorded_metrics: TrainMetrics | None
    seconds: float


class RowEffect(Frozen):
    """What one row did in a step."""

    row: int
    group_id: str
    member: int
    staleness: int
    reward: Number
    """Null: the reward failed, the row carries no loss."""
    advantage: Number
    loss_tokens: int
    importance_mean: Number
    importance_max: Number
    capped_share: Number
    kl_to_behavior: Number
    loss: Number
    """This row's share of the step's loss."""
    logprob_gap: Number = None
    """Largest |replayed - recorded| trainer log-probability of its tokens, nats; null: nothing recorded."""


class UpdateDifference(Frozen):
    """Two updates of the same weights, as exported; norms are L2 over all parameters."""

    first_norm: float
    second_norm: float
    cosine: float | None
    """Null: one of them moved nothing."""
    difference_norm: float
    largest_difference: float


class Counterfactual(Frozen):
    """The last step, trained from the same state on some of its rows."""

    dropped: tuple[int, ...]
    kept: tuple[int, ...]
    metrics: TrainMetrics
    weights_digest: str
    updates: UpdateDifference
    """First: the whole batch; second: the rows that were kept."""
    seconds: float


class ReplayReport(Frozen):
    kind: Literal["replay"] = "replay"
    run_id: str
    restored_version: int
    steps: tuple[StepReplay, ...]
    """All that were replayed, those between the checkpoint and the first asked for included."""
    rows: tuple[RowEffect, ...]
    """Of the last step, on its whole batch."""
    deviation: UpdateDifference | None
    """When the last step's weights differ from the recorded ones. First: the recorded update; second: the replayed."""
    counterfactual: Counterfactual | None
    equal: bool
    """No step gave other weights than are on record."""
    notes: tuple[str, ...]
    """What is not as it was when the run trained these steps."""
    seconds: float


class Probe(Frozen):
    """One question of a bisection: the metric of the step without some rows."""

    kind: Literal["probe"] = "probe"
    number: int
    budget: int
    removed: tuple[int, ...]
    remaining: int
    value: Number
    """Null: not finite."""
    sick: bool
    seconds: float


class BisectReport(Frozen):
    kind: Literal["bisect"] = "bisect"
    run_id: str
    step: int
    metric: Metric
    threshold: float | None
    threshold_source: str
    value: Number
    """Of the whole batch."""
    reproduced: bool | None
    """The whole batch gave loss, gradient norm and KL as recorded, bit for bit; null: nothing recorded."""
    outcome: Literal["found", "healthy", "unfinished"]
    """unfinished: the budget ended before any set smaller than the batch was known to cure."""
    culprits: tuple[RowEffect, ...]
    minimal: bool
    """Putting any single culprit back makes the step sick again."""
    value_without: Number
    """Of the batch without the culprits; null also when nothing was found, or nothing remains without them."""
    probes: int
    budget: int
    notes: tuple[str, ...]
    seconds: float


class Failure(Frozen):
    kind: Literal["failure"] = "failure"
    type: str
    message: str


Ask = Annotated[ReplayAsk | BisectAsk, Field(discriminator="kind")]
Event = Annotated[
    Phase | StepReplay | Probe | ReplayReport | BisectReport | Failure,
    Field(discriminator="kind"),
]
ASK: TypeAdapter[ReplayAsk | BisectAsk] = TypeAdapter(Ask)
_EVENT: TypeAdapter[Any] = TypeAdapter(Event)
OnEvent = Callable[[Phase | StepReplay | Probe], None]

_TYPES: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (TrainerBadBatch, ObjectMissing, ObjectCorrupt, StoreError, ValueError)
}
"""Errors of the group that keep their type; any other becomes ReplayFailed."""

# -- asking ---------------------------------------------------------------------------------------------------


def replay(ask: ReplayAsk, on_event: OnEvent = lambda event: None) -> ReplayReport:
    """Train steps `first` to `last` again from the log and compare. Blocks; minutes for a large model.

    Credentials come from the usual AWS chain. Raises ValueError, ObjectMissing, TrainerBadBatch (a batch that does
    not verify), StoreError, ReplayFailed.
    """
    if ask.last < ask.first:
        raise ValueError(f"steps: {ask.first}:{ask.last} ends before it begins")
    keep = None if ask.keep is None else Path(ask.keep)
    if keep is not None and keep.exists():
        raise ValueError(f"keep: {keep} exists; name a folder that is to be made")
    with tempfile.TemporaryDirectory(prefix="roadstead-replay-", ignore_cleanup_errors=True) as scratch:
        report = _answer(ask, ask.last, Path(scratch), on_event)
        assert isinstance(report, ReplayReport)
        if keep is not None:
            _keep(Path(scratch), keep)
    return report


def bisect(ask: BisectAsk, on_event: OnEvent = lambda event: None) -> BisectReport:
    """Find the rows that made a step sick. Blocks: up to `budget` times a step. Raises as `replay` does."""
    with tempfile.TemporaryDirectory(prefix="roadstead-bisect-", ignore_cleanup_errors=True) as scratch:
        report = _answer(ask, ask.step, Path(scratch), on_event)
    assert isinstance(report, BisectReport)
    return report


@dataclass(frozen=True)
class InForce:
    """What holds from a version on, until a later attempt changes it."""

    from_version: int
    config: RunConfig
    versions: dict[str, str]


def history_of(store: ObjectStore, keys: RunKeys) -> list[InForce]:
    """Configurations of the run and its attempts, in order; addresses are left open. Raises ObjectMissing."""
    record = runs.read(store, keys)
    history = [InForce(0, parse(record.config, store.url(keys.run)), record.versions)]
    for attempt in runs.attempts(store, keys):
        last = history[-1]
        config = (
            last.config if attempt.config is None else parse(attempt.config, store.url(keys.attempt(attempt.attempt)))
        )
        history.append(InForce(attempt.from_version, config, attempt.versions or last.versions))
    return history


def in_force(history: Sequence[InForce], step: int) -> InForce:
    """What step `step` was trained under."""
    return next(entry for entry in reversed(history) if entry.from_version <= step)


def result_folder(scratch: Path) -> Path:
    """Where the group leaves the weights that `keep` asks for."""
    return scratch / "result"


def events_file(scratch: Path) -> Path:
    """Where rank 0 writes its events, a JSON line each."""
    return scratch / "events.jsonl"


def _other_versions(then: InForce) -> list[str]:
    now = {name: importlib.metadata.version(name) for name in ("torch", "deepspeed", "transformers")}
    return [
        f"{name} was {then.versions[name]}, is {now[name]}"
        for name in now
        if then.versions.get(name, now[name]) != now[name]
    ]


def _answer(ask: ReplayAsk | BisectAsk, step: int, scratch: Path, on_event: OnEvent) -> ReplayReport | BisectReport:
    began = time.monotonic()
    s = ask.storage
    store = ObjectStore(StoreAddress(bucket=s.bucket, endpoint_url=s.endpoint_url, region=s.region))
    keys = RunKeys(s.prefix, ask.run)
    then = in_force(history_of(store, keys), step)
    config = then.config.model_copy(update={"storage": s})
    if batches.find(store, keys, step) is None:
        raise ObjectMissing(f"{store.url(keys.batch_commit(step))}: step {step} has no committed batch")
    config_file, ask_file = scratch / "config.yaml", scratch / "ask.json"
    config_file.write_text(config.dump())
    ask_file.write_text(ask.model_dump_json())
    events_file(scratch).touch()
    on_event(Phase(text=f"starting {config.training.ranks} rank(s) on {config.engine.device}"))
    log = scratch / "ranks.log"
    with log.open("wb") as output, events_file(scratch).open() as events:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "roadstead.training.launcher", "--config", str(config_file)),
                *("--ask", str(ask_file), "--folder", str(scratch)),
            ],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
        try:
            for event in _events(process, events, log):
                if isinstance(event, Failure):
                    raise _TYPES.get(event.type, ReplayFailed)(
                        event.message if event.type in _TYPES else f"{event.type}: {event.message}"
                    )
                if isinstance(event, ReplayReport | BisectReport):
                    process.wait(_END_S)
                    seconds = round(time.monotonic() - began, 3)
                    return event.model_copy(
                        update={"notes": (*_other_versions(then), *event.notes), "seconds": seconds}
                    )
                on_event(event)
        except subprocess.TimeoutExpired as error:
            raise ReplayFailed(f"the group answered but did not end within {_END_S:.0f} s") from error
        finally:
            process.kill()  # its ranks ask the kernel to die with it
            process.wait(_END_S)
    raise AssertionError("the events end with an answer or an error")


def _events(process: subprocess.Popen[bytes], file: IO[str], log: Path) -> Iterator[Any]:
    """Events as they come. Raises ReplayFailed when the group ends without an answer, or reports nothing."""
    heard, phase, line = time.monotonic(), "starting", ""
    while True:
        ended = process.poll() is not None  # asked before the file is read, so that nothing it wrote is missed
        line += file.readline()
        if line.endswith("\n"):
            event = _EVENT.validate_json(line)
            heard, line = time.monotonic(), ""
            phase = event.text if isinstance(event, Phase) else event.kind
            yield event
        elif ended:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
            raise ReplayFailed(
                f"the group ended with {process.returncode} during {phase!r}, without an answer:\n{tail}"
            )
        elif time.monotonic() - heard > _QUIET_S:
            raise ReplayFailed(f"the group has reported nothing for {_QUIET_S:.0f} s; its last phase was {phase!r}")
        else:
            time.sleep(_POLL_S)


def _keep(scratch: Path, folder: Path) -> None:
    """The new weights with the model's other files, as `folder`, which appears whole or not at all."""
    result = result_folder(scratch)
    for path in (scratch / "weights-v0").iterdir():
        if not path.name.endswith(_WEIGHTS) and path.name != "manifest.json":
            shutil.copy2(path, result / path.name)
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    try:
        shutil.move(result, part)
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def main() -> None:
    """Read a question from stdin, write events to stdout. Exit code 0: the last line is an answer; 1: a failure."""
    die_with_parent()
    # As an exception, so that the group is ended and the scratch folder removed.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))

    def tell(event: Frozen) -> None:
        print(event.model_dump_json(), flush=True)

    try:
        ask = ASK.validate_json(sys.stdin.read())
        tell(replay(ask, tell) if isinstance(ask, ReplayAsk) else bisect(ask, tell))
    except Exception as error:  # whatever it is, whoever asked must hear it
        tell(Failure(type=type(error).__name__, message=str(error)))
        sys.exit(1)


if __name__ == "__main__":
    main()

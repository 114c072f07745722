"""Replay and bisection whole: runs that a real trainer trained, replayed by process groups of their own."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from roadstead.cli import replay as command_line
from roadstead.storage import batches, checkpoints, runs, train_rows, weights
from roadstead.storage.batches import BatchCommit
from roadstead.storage.parquet import encode
from roadstead.storage.runs import AttemptRecord, RunRecord
from roadstead.storage.schema import table_from_rows
from roadstead.storage.train_rows import TrainResult
from roadstead.training.replay import (
    BisectAsk,
    BisectReport,
    Phase,
    Probe,
    ReplayAsk,
    ReplayReport,
    Rows,
    StepReplay,
    bisect,
    replay,
)
from tests.integration.conftest import Servers
from tests.integration.test_training import Run, make_model, make_rows

pytestmark = pytest.mark.slow

POISONED, TWICE_POISONED, UNDEFINED = 4, 5, 6
"""Steps of the long run, of 32 rows each."""
CHANGED = 3
"""Last step of the run on two ranks, of 32 rows; its settings are said to have changed then."""
CULPRIT, CULPRITS, UNDEFINED_ROW = 13, (6, 25), 30


def large_rows(run: str, step: int) -> list[dict[str, Any]]:
    """8 groups of 4."""
    rows = []
    for part in range(4):
        for row in make_rows(run, 100 * (part + 1) + step):
            version = max(0, step - 1 - part % 2)
            rows.append(
                row
                | {
                    "step": step,
                    "slot": 2 * part + row["slot"],
                    "group_id": f"s{step}-g{2 * part + row['slot']}",
                    **dict.fromkeys(("v_traj", "head_version", "tail_version"), version),
                    "staleness": step - version,
                    "version_spans": [{"version": version, "start": 0, "end": len(row["loss_mask"])}],
                }
            )
    return rows


def plant_advantage(row: dict[str, Any]) -> None:
    row["reward"], row["advantage"], row["loss_mask"] = 1.0, 3e4, [True] * len(row["loss_mask"])


def plant_nan(row: dict[str, Any]) -> None:
    row["reward"], row["loss_mask"] = 1.0, [True] * len(row["loss_mask"])
    row["behavior_logprobs"] = [*row["behavior_logprobs"][:-1], math.nan]


def commit(run: Run, step: int, rows: list[dict[str, Any]]) -> BatchCommit:
    return batches.commit(run.store, run.keys, table_from_rows(rows, batch=True), attempt=1, groups=())


def record_run(run: Run) -> None:
    config = run.config.model_dump(mode="json")
    config["storage"].pop("endpoint_url")  # a run's record leaves addresses open
    runs.create(
        run.store,
        run.keys,
        RunRecord(
            run_id=run.keys.run_id,
            config=config,
            versions={},
            model_digest="",
            dataset_digest="",
            dataset_rows=1,
            created_at="",
        ),
    )


def record_change(run: Run, results: list[TrainResult]) -> None:
    """An attempt with other settings from version CHANGED on, and all weights published."""
    manifest = weights.manifest_of(run.store, run.keys, 0)
    for result in results:
        manifest = weights.publish(
            run.store, run.keys, result.weights, parent=manifest, batch_digest=result.batch_digest
        )
    config = run.config.model_dump(mode="json")
    # DeepSpeed restores both from a checkpoint, whatever the configuration says.
    config["training"] |= {"learning_rate": 3 * run.config.training.learning_rate, "max_grad_norm": 1e-6}
    for attempt, version, changed in ((1, 0, None), (2, CHANGED, config)):
        runs.open_attempt(
            run.store,
            run.keys,
            AttemptRecord(
                run_id=run.keys.run_id,
                attempt=attempt,
                reason="test",
                from_version=version,
                fencing_token="",
                started_at="",
                config=changed,
            ),
        )


@dataclass(frozen=True)
class History:
    """Two runs that were trained, and ended."""

    long: Run
    two_ranks: Run
    results: dict[str, list[TrainResult]]

    def ask(self, run: Run, first: int, last: int | None = None, **more: Any) -> ReplayReport:
        ask = ReplayAsk(
            run=run.keys.run_id,
            storage=run.config.storage,
            first=first,
            last=first if last is None else last,
            **more,
        )
        return unwritten(run, lambda: replay(ask, print_event))

    def bisect(self, run: Run, step: int, **more: Any) -> tuple[BisectReport, list[Probe]]:
        probes: list[Probe] = []

        def on_event(event: Phase | StepReplay | Probe) -> None:
            print_event(event)
            if isinstance(event, Probe):
                probes.append(event)

        ask = BisectAsk(run=run.keys.run_id, storage=run.config.storage, step=step, **more)
        return unwritten(run, lambda: bisect(ask, on_event)), probes


def print_event(event: Phase | StepReplay | Probe) -> None:
    print(event.text if isinstance(event, Phase) else event.model_dump_json(exclude={"metrics", "recorded_metrics"}))


def unwritten(run: Run, work: Callable[[], Any]) -> Any:
    """Whatever is asked, the run's keys are what they were."""
    before = list(run.store.keys(run.keys.root))
    report = work()
    assert list(run.store.keys(run.keys.root)) == before
    print(report.seconds, "s")
    return report


@pytest.fixture(scope="module")
async def history(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> History:
    endpoint = servers.s3.endpoint_url
    assert endpoint is not None
    folder = tmp_path_factory.mktemp("replay")
    long = Run("replay-long", endpoint, folder, checkpoint_every=3)
    two = Run("replay-two-ranks", endpoint, folder, ranks=2, zero_stage=3, checkpoint_every=2)
    with ExitStack() as stack:
        for run in (long, two):
            stack.enter_context(run.trainer())
        make_model(folder / "model")
        for run in (long, two):
            run.publish(folder / "model")
            record_run(run)
        for step in range(4):
            long.commit(step)
        for step, plant, rows in (
            (POISONED, plant_advantage, (CULPRIT,)),
            (TWICE_POISONED, plant_advantage, CULPRITS),
            (UNDEFINED, plant_nan, (UNDEFINED_ROW,)),
        ):
            batch = large_rows("replay-long", step)
            for row in rows:
                plant(batch[row])
            commit(long, step, batch)
        for step in range(CHANGED):
            two.commit(step)
        batch = large_rows("replay-two-ranks", CHANGED)
        plant_advantage(batch[CULPRIT])
        commit(two, CHANGED, batch)
        results = await asyncio.gather(trained(long, UNDEFINED + 1), trained(two, CHANGED + 1))
        record_change(two, results[1])
    return History(long, two, {"long": results[0], "two": results[1]})


async def trained(run: Run, steps: int) -> list[TrainResult]:
    results = []
    for step in range(steps):
        record = batches.find(run.store, run.keys, step)
        assert record is not None
        results.append(await run.train(record))
    return results


async def test_every_step_gives_the_recorded_weights(history: History) -> None:
    """From version 0, the checkpoints at 3 and 6 passed by; the last step is one that was skipped."""
    report = history.ask(history.long, 0, UNDEFINED)
    want = history.results["long"]
    assert report.restored_version == 0
    assert [step.step for step in report.steps] == list(range(UNDEFINED + 1))
    assert [step.weights_digest for step in report.steps] == [result.weights.digest for result in want]
    assert [step.metrics for step in report.steps] == [result.metrics for result in want]
    assert report.equal and all(step.equal for step in report.steps)
    assert not report.steps[-1].metrics.applied
    assert report.deviation is None and report.counterfactual is None and report.notes == ()
    effects = {(row.group_id, row.member): row for row in report.rows}
    assert len(effects) == 32
    assert [row.row for row in report.rows if row.loss is None] == [UNDEFINED_ROW]
    assert {row.logprob_gap for row in report.rows} == {0.0}


async def test_without_a_row(history: History, tmp_path: Path) -> None:
    """From the checkpoint of version 3, which does not divide step 4; the gradient is computed here once more."""
    run = history.long
    rows = Rows(without=(f"s{POISONED}-g{CULPRIT // 4}/{CULPRIT % 4}",))
    report = history.ask(run, POISONED, rows=rows, keep=str(tmp_path / "kept"))
    assert report.restored_version == 3
    assert [step.step for step in report.steps] == [3, 4]
    assert report.equal
    other = report.counterfactual
    assert other is not None
    assert other.dropped == (CULPRIT,)
    with_it, without_it = (
        independent_gradient(history, POISONED, set()),
        independent_gradient(history, POISONED, {CULPRIT}),
    )
    assert report.steps[-1].metrics.grad_norm == pytest.approx(norm(with_it), rel=1e-4)
    assert other.metrics.grad_norm == pytest.approx(norm(without_it), rel=1e-4)
    assert norm(without_it) < norm(with_it) / 100
    shown = io.StringIO()
    command_line._show_replay(json.loads(report.model_dump_json()), Console(file=shown, width=200))
    assert re.search(r"loss_tokens +│ +\d+ +│ +\d+", shown.getvalue())
    assert "cosine of the two updates" in shown.getvalue()
    print(shown.getvalue())
    # The weights that were kept are a model of their own, and what the report says about them is so.
    import torch
    import transformers

    assert weights.tensors_digest(tmp_path / "kept") == other.weights_digest
    kept = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "kept", dtype=torch.float32).state_dict()
    base = run.weights_of(history.results["long"][POISONED - 1])
    whole = run.weights_of(history.results["long"][POISONED])
    first = torch.cat([(whole[name] - base[name]).double().flatten() for name in base])
    second = torch.cat([(kept[name] - base[name]).double().flatten() for name in base])
    updates = other.updates
    assert updates.first_norm == pytest.approx(float(first.norm()), rel=1e-4)
    assert updates.second_norm == pytest.approx(float(second.norm()), rel=1e-4)
    assert updates.cosine == pytest.approx(float(torch.dot(first, second) / (first.norm() * second.norm())), rel=1e-3)
    assert updates.difference_norm == pytest.approx(float((first - second).norm()), rel=1e-3)


def norm(gradient: Any) -> float:
    return float(np.linalg.norm(gradient))


def independent_gradient(history: History, step: int, dropped: set[int]) -> Any:
    """Of the mean token loss over the rows that are left, by plain torch, row after row."""
    import torch
    import transformers

    run = history.long
    policy = transformers.AutoModelForCausalLM.from_pretrained(run.folder.parent / "model", dtype=torch.float32).eval()
    policy.load_state_dict(run.weights_of(history.results["long"][step - 1]))
    record = batches.find(run.store, run.keys, step)
    assert record is not None
    rows = [row for i, row in enumerate(batches.read(run.store, record).to_pylist()) if i not in dropped]
    masks = [np.array(row["loss_mask"]) & (row["reward"] is not None) for row in rows]
    for row, mask in zip(rows, masks, strict=True):
        ids = torch.tensor([row["prompt_token_ids"] + row["response_token_ids"]])
        begin = len(row["prompt_token_ids"])
        logits = policy(input_ids=ids).logits[0, begin - 1 : -1] / row["sampling"]["temperature"]
        logprobs = torch.log_softmax(logits, -1)[torch.arange(len(mask)), ids[0, begin:]]
        ratio = torch.exp(logprobs.detach() - torch.tensor(row["behavior_logprobs"]))
        weight = ratio.clamp(max=run.config.training.importance_cap)
        loss = -(row["advantage"] * weight * logprobs)[torch.tensor(mask)].sum() / sum(int(m.sum()) for m in masks)
        loss.backward()
    return torch.cat([p.grad.double().flatten() for p in policy.parameters()]).numpy()


async def test_two_ranks_and_settings_of_a_later_attempt(history: History) -> None:
    """Results that do not say their settings (older ones) are replayed under those of the attempt. Here these are not
    what step 3 was trained with, and that shows; a result that says its settings is replayed under them.

    Also that the state is put back whole: all rows, trained a second time, give the same weights again.
    """
    run, want = history.two_ranks, history.results["two"]
    saved = checkpoints.newest(run.store, run.keys, CHANGED)
    assert saved is not None and (saved.version, saved.world_size) == (2, 2)
    record = batches.find(run.store, run.keys, CHANGED)
    assert record is not None
    assert history.ask(run, 0, CHANGED).equal, "under the settings of then, whatever the attempt says"
    without = want[CHANGED].model_copy(update={"training": None})
    told = {train_rows._RESULT.decode(): without.model_dump_json()}
    run.store.put_hint(
        run.keys.train_rows(CHANGED, record.digest), encode(train_rows.read(run.store, run.keys, record), told)
    )
    report = history.ask(run, 0, CHANGED, rows=Rows(max_staleness=2))
    digests = [step.weights_digest for step in report.steps]
    assert digests[:CHANGED] == [result.weights.digest for result in want[:CHANGED]]
    assert [step.equal for step in report.steps] == [True, True, True, False]
    assert not report.equal
    last = report.steps[CHANGED]
    assert last.metrics.learning_rate == 3 * run.config.training.learning_rate
    assert last.metrics.grad_norm == want[CHANGED].metrics.grad_norm, "before clipping"
    again = report.counterfactual
    assert again is not None and again.dropped == ()
    assert (again.weights_digest, again.metrics) == (last.weights_digest, last.metrics)
    assert (again.updates.difference_norm, again.updates.largest_difference) == (0, 0)
    off = report.deviation
    assert off is not None
    base, recorded = (run.weights_of(result) for result in want[CHANGED - 1 :])
    moved = math.sqrt(sum(float((recorded[name] - base[name]).double().square().sum()) for name in base))
    assert off.first_norm == pytest.approx(moved, rel=1e-6)
    assert off.second_norm == pytest.approx(again.updates.first_norm, rel=1e-12)
    assert 0 < off.largest_difference <= off.difference_norm < off.first_norm + off.second_norm


async def test_one_culprit_on_two_ranks(history: History) -> None:
    """Probes of all sizes, down to those that leave a rank without a row."""
    report, probes = history.bisect(history.two_ranks, CHANGED, metric="grad_norm", threshold=20.0)
    assert (report.outcome, report.minimal) == ("found", True)
    assert [row.row for row in report.culprits] == [CULPRIT]
    assert report.reproduced is True
    assert report.value == history.results["two"][CHANGED].metrics.grad_norm
    assert report.value_without is not None and report.value_without < 20
    assert [probe.number for probe in probes] == list(range(1, report.probes + 1))
    assert report.probes <= 6
    print(report.probes, "probes")


async def test_two_culprits_by_the_threshold_of_the_steps_before(history: History) -> None:
    report, probes = history.bisect(history.long, TWICE_POISONED, metric="grad_norm")
    earlier = [result.metrics.grad_norm for result in history.results["long"][:TWICE_POISONED]]
    assert report.threshold is not None
    assert max(norm for norm in earlier[:POISONED] if norm is not None) < report.threshold < 100
    assert "of 5 earlier step(s)" in report.threshold_source
    assert (report.outcome, report.minimal) == ("found", True)
    assert [row.row for row in report.culprits] == list(CULPRITS)
    shown = io.StringIO()
    command_line._show_bisect(json.loads(report.model_dump_json()), Console(file=shown, width=200))
    assert "without 2 row(s) it is well; each of them is needed" in shown.getvalue()
    print(shown.getvalue())
    alone = norm(independent_gradient(history, TWICE_POISONED, set(CULPRITS)))
    assert report.value_without == pytest.approx(alone, rel=1e-4)
    assert not any(probe.sick for probe in probes if set(probe.removed) >= set(CULPRITS))
    assert all(probe.sick for probe in probes if not set(probe.removed) >= set(CULPRITS))
    print(report.probes, "probes")


# -- the command ----------------------------------------------------------------------------------------------


@pytest.fixture
def data(history: History, tmp_path: Path) -> Path:
    """A data directory that knows the run; TMPDIR of its commands is beside it."""
    given = tmp_path / "data" / "runs" / history.long.keys.run_id / "given.yaml"
    given.parent.mkdir(parents=True)
    given.write_text(history.long.config.dump())
    (tmp_path / "tmp").mkdir()
    return tmp_path / "data"


def command(data: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "roadstead.cli.main", *words, "--data", str(data)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(data.parent / "tmp")},
    )


def test_bisect_command_finds_what_is_not_finite(history: History, data: Path) -> None:
    process = command(data, "bisect", "replay-long", str(UNDEFINED), "--metric", "nan", "--json")
    out, progress = process.communicate(timeout=120)
    print(progress)
    assert process.returncode == 0
    report = json.loads(out)
    assert [row["row"] for row in report["culprits"]] == [UNDEFINED_ROW]
    assert (report["outcome"], report["minimal"]) == ("found", True)
    assert report["value"] is None and report["value_without"] > 0
    assert f"probe   {report['probes']} of at most 100" in progress
    assert list((data.parent / "tmp").glob("roadstead-*")) == []


def test_replay_command_refuses_a_batch_that_was_tampered_with(history: History, data: Path) -> None:
    run = history.long
    record = batches.find(run.store, run.keys, POISONED)
    assert record is not None
    body = run.store.get(record.data.key)
    middle = len(body) // 2
    run.store.put_hint(record.data.key, body[:middle] + bytes([body[middle] ^ 1]) + body[middle + 1 :])
    try:
        process = command(data, "replay", "replay-long", f"3:{POISONED + 1}")
        out, progress = process.communicate(timeout=120)
    finally:
        run.store.put_hint(record.data.key, body)
    assert (process.returncode, out) == (1, "")
    assert re.search(r"error: TrainerBadBatch: batch of step 4: .*sha256", progress)
    assert re.search(r"step +3  equal", progress), "what came before it was replayed"


def test_command_that_is_ended_leaves_nothing(data: Path) -> None:
    process = command(data, "replay", "replay-long", "0")
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("boot: building"):
            break
    scratch = list((data.parent / "tmp").glob("roadstead-replay-*"))
    assert len(scratch) == 1
    assert processes_in(scratch[0]) >= 2, "the agent and its rank"
    process.send_signal(signal.SIGTERM)
    out, progress = process.communicate(timeout=30)
    assert (process.returncode, out) == (130, "")
    assert "interrupted" in progress
    assert not scratch[0].exists()
    deadline = time.monotonic() + 10
    while processes_in(scratch[0]):
        assert time.monotonic() < deadline, "a rank outlived the command"
        time.sleep(0.05)


def processes_in(folder: Path) -> int:
    """Processes that name `folder` on their command line."""
    found = 0
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found += str(folder).encode() in path.read_bytes()
    return found


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("replay", "replay-long", "7"), "step 7 has no committed batch"),
        (("replay", "no-such-run", "0"), "no-such-run"),
    ],
)
def test_bad_input_is_named_at_once(data: Path, words: tuple[str, ...], message: str) -> None:
    given = data / "runs" / words[1] / "given.yaml"
    given.parent.mkdir(exist_ok=True)
    given.write_text((data / "runs" / "replay-long" / "given.yaml").read_text())
    process = command(data, *words)
    out, progress = process.communicate(timeout=60)
    assert (process.returncode, out) == (2, "")
    assert message in progress
    assert "boot" not in progress


def test_ranges_of_steps_are_those_of_audit() -> None:
    assert [command_line._steps(text) for text in ("0", "17", "10:18", "3:4")] == [(0, 0), (17, 17), (10, 17), (3, 3)]
    for text in ("x", "3:", ":4", "", "1:2:3"):
        with pytest.raises(ValueError, match=f"'{text}' is neither a step"):
            command_line._steps(text)
    for text in ("3:3", "3:1", "-1", "-1:2"):
        with pytest.raises(ValueError, match=f"'{text}' holds no step"):
            command_line._steps(text)

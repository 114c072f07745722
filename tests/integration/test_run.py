"""Whole runs on real parts: Temporal, S3, vLLM, DeepSpeed, every worker a process of its own.

Everything is checked on the Parquet that came out, the weights and the records; nothing on progress counters.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import pytest

from roadstead.infra.s3_server import credentials
from roadstead.infra.stack import endpoints
from roadstead.storage import batches, groups, runs, steps, train_rows, weights
from roadstead.storage.digest import table_digest
from roadstead.storage.keys import RunKeys
from roadstead.storage.objects import ObjectStore, StoreAddress
from roadstead.storage.steps import StepRecord
from tests.support import tiny
from tests.support.forward import reference_logprobs

LIMIT_S = 280
pytestmark = pytest.mark.timeout(LIMIT_S + 60)


class Workplace:
    """A data directory, a stack that stays up for the module, and the command line on it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.data = folder, folder / "data"

    def roadstead(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        answer = subprocess.run(
            [sys.executable, "-m", "roadstead.cli.main", *arguments, "--data", str(self.data)],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        if check:
            assert answer.returncode == 0, answer.stdout + answer.stderr
        return answer

    def start(self, name: str, **changes: Any) -> subprocess.Popen[str]:
        file = self.folder / f"{name}.yaml"
        file.write_text(tiny.config(self.folder, name, **changes).dump())
        return subprocess.Popen(
            [sys.executable, "-m", "roadstead.cli.main", "run", str(file), "--data", str(self.data)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, name: str, **changes: Any) -> str:
        process = self.start(name, **changes)
        output, _ = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, output
        return output

    def store(self, name: str) -> tuple[ObjectStore, RunKeys]:
        found, keys = endpoints(self.data), credentials(self.data)
        assert found is not None
        address = StoreAddress("roadstead", found.s3, access_key=keys.access_key, secret_key=keys.secret_key)
        return ObjectStore(address), RunKeys("runs", name)

    def processes(self) -> list[str]:
        """Command lines of everything that runs on this data directory, or for a run in it."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                try:
                    line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                except OSError:
                    continue  # it ended while we looked
                if str(self.folder) in line:
                    found.append(f"{entry.name} {line}")
        return found


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Any:
    place = Workplace(tmp_path_factory.mktemp("run"))
    tiny.build_model(place.folder / "model")
    place.roadstead("up")
    try:
        yield place
    finally:
        place.roadstead("down")
        assert place.processes() == [], "nothing may be left running"


def check_run(place: Workplace, name: str, *, steps_: int, bound: int) -> list[StepRecord]:
    """Everything that must hold for any finished run of the tiny configuration."""
    store, keys = place.store(name)
    run, records = runs.read(store, keys), steps.all_of(store, keys)
    group_size, per_batch = run.config["rollout"]["group_size"], run.config["staleness"]["groups_per_batch"]
    assert [record.step for record in records] == list(range(steps_))
    trained: list[str] = []
    for record in records:
        commit = batches.find(store, keys, record.step)
        assert commit is not None and commit.digest == record.batch_digest
        table = batches.read(store, commit)
        assert table.num_rows == per_batch * group_size
        rows = table.to_pylist()
        for row in rows:
            oldest = min(span["version"] for span in row["version_spans"])
            assert row["head_version"] == oldest, "the version that counts is the engine's own, of the oldest token"
            assert 0 <= row["staleness"] == record.step - oldest <= bound
            assert row["v_traj"] <= oldest and row["run_id"] == name and row["step"] == record.step
        for slot, group in enumerate(commit.groups):
            members = [row for row in rows if row["slot"] == slot]
            assert [row["member"] for row in members] == list(range(group_size))
            assert {row["group_id"] for row in members} == {group.group_id}
            assert abs(sum(row["advantage"] for row in members)) < 1e-4, "advantages are relative to the group"
            staged = groups.read(store, keys, group.group_id, group.attempt, group.digest)
            assert staged["response_token_ids"].to_pylist() == [row["response_token_ids"] for row in members]
            trained.append(group.group_id)
        result = train_rows.find(store, keys, record.step, record.batch_digest)
        assert result is not None and result.weights.digest == record.weights_out
        assert train_rows.read(store, keys, commit).num_rows == table.num_rows
        manifest = weights.manifest_of(store, keys, record.step + 1)
        assert (manifest.digest, manifest.batch_digest) == (record.weights_out, record.batch_digest)
        assert manifest.parent_digest == record.weights_in
    for earlier, later in itertools.pairwise(records):
        assert earlier.weights_out == later.weights_in, "the digests chain"
    assert records[0].weights_in == run.model_digest
    assert len({record.weights_out for record in records}) == steps_, "every step moved the weights"
    assert len(trained) == len(set(trained)), "no group is trained twice"
    ended = Counter(state for record in records for state in record.terminal.values())
    assert ended == {"trained": len(trained)}
    assert sorted(trained) == [f"g{i:08d}" for i in range(len(trained))], "no prompt is skipped"
    return records


@pytest.fixture(scope="module")
def finished(workplace: Workplace) -> str:
    output = workplace.run("finished")
    assert "24 admitted = 24 trained" in output, output
    return "finished"


def test_a_run_leaves_one_whole_chained_batch_a_step(workplace: Workplace, finished: str) -> None:
    check_run(workplace, finished, steps_=6, bound=2)


def test_rollouts_overlap_training(workplace: Workplace, finished: str) -> None:
    """Groups generated under version v are trained later than v: generation did not wait for the trainer."""
    store, keys = workplace.store(finished)
    ages = Counter()
    for record in steps.all_of(store, keys):
        commit = batches.find(store, keys, record.step)
        assert commit is not None
        ages.update(batches.read(store, commit)["staleness"].to_pylist())
    assert ages[1] + ages[2] > ages[0]


def test_stored_logprobs_are_those_of_the_stamped_versions(workplace: Workplace, finished: str, tmp_path: Path) -> None:
    """Float32: 1e-4 nats between the engine's logprobs and a Hugging Face forward pass, span by span."""
    store, keys = workplace.store(finished)
    sampled = []
    for record in steps.all_of(store, keys):
        commit = batches.find(store, keys, record.step)
        assert commit is not None
        rows = batches.read(store, commit).to_pylist()
        sampled += [row for row in rows if len(row["version_spans"]) > 1][:3] + rows[:2]
    versions = {span["version"] for row in sampled for span in row["version_spans"]}
    folders = {
        version: str(weights.download(store, weights.manifest_of(store, keys, version), tmp_path / f"v{version}"))
        for version in versions
    }
    reference = reference_logprobs(
        folders,
        [
            {
                "prompt": row["prompt_token_ids"],
                "response": row["response_token_ids"],
                "temperature": row["sampling"]["temperature"],
                "spans": [[s["version"], s["start"], s["end"]] for s in row["version_spans"]],
            }
            for row in sampled
        ],
    )
    for row, expected in zip(sampled, reference, strict=True):
        assert row["behavior_logprobs"] == pytest.approx(expected, abs=1e-4), (row["group_id"], row["version_spans"])


def test_exported_batches_are_plain_parquet(workplace: Workplace, finished: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    workplace.roadstead("batch", "export", finished, "--to", str(out))
    store, keys = workplace.store(finished)
    files = sorted(out.iterdir())
    assert [f.name for f in files] == [f"batch-{step:08d}.parquet" for step in range(6)]
    counted = duckdb.sql(f"select count(*), count(distinct group_id), max(staleness) from '{out}/*.parquet'").fetchone()
    assert counted is not None and counted[0] == 6 * 4 * 4 and counted[1] == 24 and counted[2] <= 2
    frame = pd.read_parquet(files[3])
    assert len(frame) == 16 and set(frame["step"]) == {3}
    for record, file in zip(steps.all_of(store, keys), files, strict=True):
        from roadstead.storage.parquet import decode

        assert table_digest(decode(file.read_bytes())) == record.batch_digest


def test_status_and_batch_commands_answer_in_json(workplace: Workplace, finished: str) -> None:
    status = json.loads(workplace.roadstead("status", finished, "--json").stdout)["recorded"]
    assert (status["steps"], status["trained_trajectories"], status["left"]) == (6, 96, 0)
    listed = json.loads(workplace.roadstead("batch", "list", finished, "--json").stdout)
    assert [batch["step"] for batch in listed] == list(range(6)) and all(batch["recorded"] for batch in listed)
    rows = json.loads(workplace.roadstead("batch", "show", finished, "2", "--json").stdout)
    assert len(rows) == 16 and {row["step"] for row in rows} == {2}


def test_bad_input_is_named_and_nothing_is_left_running(workplace: Workplace, finished: str) -> None:
    unknown = workplace.roadstead("status", "no-such-run", check=False)
    assert unknown.returncode == 2 and "no-such-run" in unknown.stderr and "finished" in unknown.stderr
    missing = workplace.roadstead("batch", "show", finished, "99", check=False)
    assert missing.returncode == 2 and "99" in missing.stderr
    again = workplace.roadstead("run", str(workplace.folder / "finished.yaml"), check=False)
    assert again.returncode == 1 and "completed" in again.stderr and "new `name`" in again.stderr
    file = workplace.folder / "bad.yaml"
    file.write_text(tiny.config(workplace.folder, "bad", model={"path": "/nowhere"}).dump())
    bad = workplace.roadstead("run", str(file), check=False)
    assert bad.returncode == 2 and "model.path" in bad.stderr and "/nowhere" in bad.stderr


def test_killing_workers_engine_and_trainer_in_mid_run_changes_no_total(workplace: Workplace) -> None:
    """SIGKILL to the orchestrator worker, the engine and the others, one after another while the run goes on."""
    process = workplace.start("killed", training__steps=14)
    store, keys = workplace.store("killed")
    victims = ["workers.orchestrator", "inference.launcher", "workers.rollout", "training.rank", "workers.ledger"]
    for number, victim in enumerate(victims):
        wait_for_step(store, keys, 2 * number + 1, process)
        found = [line for line in workplace.processes() if f"roadstead.{victim} " in line and "runs/killed" in line]
        # torchrun's agent names the rank's module in its own command line: the rank is what is killed.
        pids = [int(line.split()[0]) for line in found if "torch.distributed.run" not in line]
        assert pids, (victim, workplace.processes())
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
    live = json.loads(workplace.roadstead("status", "killed", "--json").stdout)["live"]
    assert live is None or (live["phase"] in {"running", "finished"} and live["version"] >= 10)
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, output
    assert "orchestrator-worker ended with -9; starting it again" in output
    check_run(workplace, "killed", steps_=14, bound=2)
    assert "56 admitted = 56 trained" in output, output


def test_a_synchronous_run_is_interrupted_resumed_and_trains_on_nothing_stale(workplace: Workplace) -> None:
    process = workplace.start("synchronous", staleness={"max_staleness": 0, "groups_per_batch": 4}, training__steps=12)
    store, keys = workplace.store("synchronous")
    wait_for_step(store, keys, 2, process)
    second = workplace.roadstead("run", str(workplace.folder / "synchronous.yaml"), check=False)
    assert second.returncode == 1 and f"hosted by process {process.pid}" in second.stderr
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert not [line for line in workplace.processes() if "runs/synchronous" in line], "Ctrl-C leaves no process"
    assert len(steps.all_of(store, keys)) < 12
    resumed = workplace.roadstead("resume", "synchronous")
    assert "run synchronous goes on" in resumed.stdout
    check_run(workplace, "synchronous", steps_=12, bound=0)
    for record in steps.all_of(store, keys):
        commit = batches.find(store, keys, record.step)
        assert commit is not None
        spans = batches.read(store, commit)["version_spans"].to_pylist()
        assert {span["version"] for row in spans for span in row} == {record.step}, "every single token"


def wait_for_step(store: ObjectStore, keys: RunKeys, step: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while steps.find(store, keys, step) is None:
        if process.poll() is not None or time.monotonic() > deadline:
            output, _ = process.communicate(timeout=10) if process.poll() is not None else ("it hangs", "")
            pytest.fail(f"no record of step {step}: {output}")
        time.sleep(0.05)


async def test_the_local_store_starts_for_a_command_when_nothing_is_up(tmp_path: Path) -> None:
    """Data is never out of reach, and a stack that a command started is gone with it."""
    place = Workplace(tmp_path)
    answer = await asyncio.to_thread(place.roadstead, "batch", "list", "nothing", check=False)
    assert answer.returncode == 2 and "there is no run yet" in answer.stderr
    assert "starting s3" in answer.stderr
    assert place.processes() == []

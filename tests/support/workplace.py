"""A data directory with runs in it, the command line on it, and what must hold for any run that it finished."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from roadstead.infra.s3_server import credentials
from roadstead.infra.stack import endpoints
from roadstead.storage import batches, groups, runs, steps, train_rows, weights
from roadstead.storage.keys import RunKeys
from roadstead.storage.objects import ObjectStore, StoreAddress
from roadstead.storage.steps import StepRecord
from tests.support import tiny

LIMIT_S = 280


class Workplace:
    """A data directory, a stack that stays up for the module, and the command line on it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.data = folder, folder / "data"

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "roadstead.cli.main", *arguments, "--data", str(self.data)]

    def roadstead(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        answer = subprocess.run(self.command(*arguments), capture_output=True, text=True, timeout=LIMIT_S)
        if check:
            assert answer.returncode == 0, answer.stdout + answer.stderr
        return answer

    def begin(self, *arguments: str) -> subprocess.Popen[str]:
        """A command that goes on; both streams come out of its stdout."""
        return subprocess.Popen(self.command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def start(self, name: str, **changes: Any) -> subprocess.Popen[str]:
        file = self.folder / f"{name}.yaml"
        file.write_text(tiny.config(self.folder, name, **changes).dump())
        return self.begin("run", str(file))

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
    for attempt in runs.attempts(store, keys):
        end = runs.find_end(store, keys, attempt.attempt)
        ended.update([*attempt.terminal.values(), *(end.terminal.values() if end else ())])
    assert ended == {"trained": len(trained)}, "nothing was lost, expired or dropped"
    assert sorted(trained) == [f"g{i:08d}" for i in range(len(trained))], "no prompt is skipped"
    return records


def wait_for_step(store: ObjectStore, keys: RunKeys, step: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while steps.find(store, keys, step) is None:
        if process.poll() is not None or time.monotonic() > deadline:
            output, _ = process.communicate(timeout=10) if process.poll() is not None else ("it hangs", "")
            pytest.fail(f"no record of step {step}: {output}")
        time.sleep(0.05)

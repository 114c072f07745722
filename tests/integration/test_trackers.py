"""The orchestrator worker with a tracker, on real servers: points arrive beside the run, the last ones at its end."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from roadstead.storage.keys import RunKeys
from roadstead.storage.objects import ObjectStore
from tests.integration.conftest import Servers
from tests.support import tiny
from tests.support.audit_run import SyntheticRun
from tests.unit.trackers.read_back import tensorboard_of


def test_a_worker_sends_what_is_recorded_and_the_rest_when_it_is_stopped(
    servers: Servers, store: ObjectStore, tmp_path: Path
) -> None:
    name = f"tracked-{uuid.uuid4().hex[:8]}"
    keys, place = RunKeys("runs", name), tmp_path / "tb"
    SyntheticRun(store, keys).write(3)
    config = tiny.config(
        tmp_path,
        name,
        storage={"bucket": store.address.bucket, "endpoint_url": store.address.endpoint_url},
        temporal={"address": servers.temporal},
        trackers=[{"kind": "tensorboard", "folder": str(place)}],
    )
    file = tmp_path / "run.yaml"
    file.write_text(config.dump())
    worker = subprocess.Popen(
        [sys.executable, "-m", "roadstead.workers.orchestrator", "--config", str(file), "--folder", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        _until(lambda: [step for step, _ in tensorboard_of(place).get("train/loss", [])] == [0, 1, 2])
        store.create(keys.step_record(3), store.get(keys.step_record(2)).replace(b'"step":2', b'"step":3'))
        worker.send_signal(signal.SIGTERM)
        output, _ = worker.communicate(timeout=30)
    finally:
        worker.kill()
    assert worker.returncode == 0, output
    assert [step for step, _ in tensorboard_of(place)["train/loss"]] == [0, 1, 2, 3]
    assert "warning" not in output


def _until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 90
    while not what():
        assert time.monotonic() < deadline, "no points in 90 s"
        time.sleep(0.2)

"""What rank 0 decides, over a store in memory and a group that computes nothing."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from roadstead.config import RunConfig, TrainingSection
from roadstead.storage import batches, checkpoints, train_rows, weights
from roadstead.storage.batches import BatchCommit
from roadstead.storage.keys import RunKeys
from roadstead.storage.objects import ObjectMissing, ObjectStore, Put, StoreAddress, StoreError
from roadstead.storage.schema import table_from_rows
from roadstead.storage.train_rows import TrainMetrics, TrainResult
from roadstead.training.protocol import ReplayMismatch, TrainerBadBatch, TrainerConflict, TrainerOutOfOrder
from roadstead.training.service import TrainerState, TrainService

KEYS = RunKeys("runs", "r")
NOW = datetime(2025, 1, 1, tzinfo=UTC)
METRICS = TrainMetrics(
    loss=0.0,
    grad_norm=1.0,
    grad_clipped=False,
    applied=True,
    learning_rate=1e-6,
    loss_tokens=1,
    importance_mean=1.0,
    importance_max=1.0,
    capped_share=0.0,
    kl_to_behavior=0.0,
)


class MemoryStore(ObjectStore):
    def __init__(self) -> None:
        self.address = StoreAddress(bucket="memory")
        self.objects: dict[str, bytes] = {}
        self.broken = ""
        """Writing a key that contains this fails."""

    def create(self, key: str, body: bytes) -> Put:
        if self.broken and self.broken in key:
            raise StoreError(f"can't write {key}")
        if key in self.objects:
            return Put.ALREADY
        self.objects[key] = body
        return Put.CREATED

    def put_file_once(self, key: str, path: Path, digest: str) -> Put:
        return self.create(key, path.read_bytes())

    def get(self, key: str, digest: str | None = None) -> bytes:
        if key not in self.objects:
            raise ObjectMissing(key)
        return self.objects[key]

    def exists(self, key: str) -> bool:
        return key in self.objects

    def folders(self, prefix: str) -> list[str]:
        return sorted({key[len(prefix) :].split("/")[0] for key in self.objects if key.startswith(prefix)})


class Outcome:
    """Looks like the trainer's StepOutcome, which needs torch to import."""

    def __init__(self, digest: str, metrics: TrainMetrics) -> None:
        self.metrics, self.digest, self.rows = metrics, digest, list[dict[str, Any]]()


class FakeGroup:
    def __init__(self) -> None:
        self.trained: list[tuple[int, bool]] = []
        """(step, replayed)"""
        self.digest = "w{step}"
        self.metrics = METRICS
        self.rates: list[float] = []
        self.always_step: list[bool] = []
        self.go = threading.Event()
        self.go.set()

    def call(self, operation: dict[str, Any], local: Any = None) -> Any:
        assert self.go.wait(10)
        folder = operation["folder"]
        if operation["op"] == "save":
            (Path(folder) / "state").write_text("moments")
            return None
        step = BatchCommit.model_validate_json(operation["commit"]).step
        self.rates.append(TrainingSection.model_validate_json(operation["training"]).learning_rate)
        self.always_step.append(operation["always_step"])
        self.trained.append((step, folder is None))
        if folder is not None:
            Path(folder).mkdir()
            (Path(folder) / "model.safetensors").write_text(f"weights {step}")
        return Outcome(self.digest.format(step=step), self.metrics)

    def quit(self) -> None:
        raise AssertionError("nobody asked")


class World:
    def __init__(self, folder: Path, device: str, version: int, rate: float = 1e-6) -> None:
        config = RunConfig.model_validate(
            {
                "name": "r",
                "model": {"path": "m"},
                "data": {"prompts": "p"},
                "training": {"steps": 5, "checkpoint_every": 2, "learning_rate": rate},
                "engine": {"device": device},
            }
        )
        self.store = MemoryStore()
        self.group = FakeGroup()
        self.stopped: list[BaseException] = []
        self.state = TrainerState(0, None)
        self.service = TrainService(config, self.store, KEYS, folder, self.state, self.stopped.append)
        self.service.ready(self.group, version=version, vocabulary=8, ranks=1, settings={})

    def commit(self, step: int, token: int = 1) -> str:
        row = {
            "run_id": "r",
            "attempt": 1,
            "step": step,
            "slot": 0,
            "group_id": f"g{step}",
            "member": 0,
            "prompt_id": "p",
            "prompt_text": "",
            "prompt_token_ids": [1],
            "response_text": "",
            "response_token_ids": [token],
            "loss_mask": [True],
            "behavior_logprobs": [-1.0],
            "version_spans": [{"version": step, "start": 0, "end": 1}],
            "v_traj": step,
            "head_version": step,
            "tail_version": step,
            "staleness": 0,
            "reward": 1.0,
            "advantage": 0.0,
            "finish_reason": "stop",
            "turns": [],
            "engine_id": "e",
            "engine_build": "b",
            "sampling": {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_tokens": 1},
            "seed": 0,
            "environment": "x",
            "from_live_policy": True,
            **dict.fromkeys(("reserved_at", "started_at", "finished_at", "occupied_at"), NOW),
        }
        return batches.commit(self.store, KEYS, table_from_rows([row], batch=True), attempt=1, groups=()).digest

    def train(self, step: int, digest: str) -> TrainResult:
        return TrainResult.model_validate(self.service.train(step, digest)["result"])


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    yield World(tmp_path, "cpu", 0)


def test_checkpoints_by_interval_and_at_the_target(world: World) -> None:
    for step in range(5):
        world.train(step, world.commit(step))
    assert world.store.folders(KEYS.checkpoints) == ["v=00000002", "v=00000004", "v=00000005"]
    assert checkpoints.read(world.store, KEYS, 4).weights_digest == "w3"
    status = world.state.read()
    assert (status["version"], status["busy_step"], status["phase"]) == (5, None, "idle")


def test_same_step_in_flight_is_joined_and_others_are_refused(world: World) -> None:
    digest, later = world.commit(0), world.commit(1)
    world.group.go.clear()
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(world.train, 0, digest) for _ in range(2)]
        deadline = time.monotonic() + 10
        while world.state.read()["phase"] != "train":
            assert time.monotonic() < deadline, "the step did not begin"
            time.sleep(0.001)
        with pytest.raises(TrainerConflict, match="in flight with batch"):
            world.train(0, later)
        with pytest.raises(TrainerOutOfOrder, match="step 0 is in flight"):
            world.train(1, later)
        world.group.go.set()
        assert both[0].result(10) == both[1].result(10)
    assert world.group.trained == [(0, False)]


def test_done_step_is_answered_after_catching_up(tmp_path: Path) -> None:
    first = World(tmp_path, "cpu", 0)
    digests = [first.commit(step) for step in range(3)]
    results = [first.train(step, digest) for step, digest in enumerate(digests[:2])]
    # The next incarnation comes up with version 0 and the same bucket.
    second = World(tmp_path, "cpu", 0)
    second.store.objects = first.store.objects
    assert second.train(1, digests[1]) == results[1]
    assert second.group.trained == [(0, True), (1, True)]
    second.train(2, digests[2])
    assert second.group.trained[2:] == [(2, False)]


def test_a_replay_uses_the_settings_of_then(tmp_path: Path) -> None:
    first = World(tmp_path, "cpu", 0, rate=0.1)
    digests = [first.commit(step) for step in range(3)]
    first.train(0, digests[0])
    second = World(tmp_path, "cpu", 0, rate=0.2)
    second.store.objects = first.store.objects
    second.train(1, digests[1])
    third = World(tmp_path, "cpu", 0, rate=0.3)
    third.store.objects = first.store.objects
    third.train(2, digests[2])
    assert (first.group.rates, second.group.rates, third.group.rates) == ([0.1], [0.1, 0.2], [0.1, 0.2, 0.3])


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_replay_that_differs(tmp_path: Path, device: str, caplog: pytest.LogCaptureFixture) -> None:
    first = World(tmp_path, device, 0)
    digests = [first.commit(step) for step in range(2)]
    first.train(0, digests[0])
    second = World(tmp_path, device, 0)
    second.store.objects = first.store.objects
    second.group.digest = "other{step}"
    if device == "cuda":
        with caplog.at_level(logging.WARNING):
            assert second.train(1, digests[1]).weights.digest == "other1"
        assert "gave weights other0, the first run gave w0" in caplog.text
        return
    for _ in range(2):  # it stays refused: the state in memory is not the one on record
        with pytest.raises(ReplayMismatch, match="gave weights other0, the first run gave w0"):
            second.train(1, digests[1])
    assert second.group.trained == [(0, True)]


def test_a_checkpoint_on_demand_is_saved_once_and_after_a_replay_if_need_be(tmp_path: Path) -> None:
    first = World(tmp_path, "cpu", 0)
    first.train(0, first.commit(0))
    with pytest.raises(ObjectMissing):
        first.service.checkpoint(1)  # not published
    result = train_rows.find(first.store, KEYS, 0, (batches.find(first.store, KEYS, 0) or pytest.fail("none")).digest)
    assert result is not None
    first.store.put_hint = lambda key, body: None  # type: ignore[method-assign]
    weights.publish(first.store, KEYS, result.weights, parent=None, batch_digest="b")
    second = World(tmp_path, "cpu", 0)
    second.store.objects = first.store.objects
    for _ in range(2):
        assert second.service.checkpoint(1) == {"version": 1}
    saved = checkpoints.newest(second.store, KEYS, 9)
    assert saved is not None and (saved.version, saved.weights_digest) == (1, "w0")
    assert second.group.trained == [(0, True)], "replayed, once"


def test_past_a_step_without_result(tmp_path: Path) -> None:
    world = World(tmp_path, "cpu", 3)
    with pytest.raises(TrainerOutOfOrder, match="holds version 3"):
        world.train(1, world.commit(1))


def test_token_that_the_model_does_not_have_is_a_bad_batch(world: World) -> None:
    with pytest.raises(TrainerBadBatch, match="token ids run from 1 to 8, the model has 8"):
        world.train(0, world.commit(0, token=8))
    assert world.group.trained == []
    assert not world.stopped


def test_failure_after_the_weights_moved_stops_the_process(world: World) -> None:
    digest = world.commit(0)
    world.store.broken = "/weights/"
    with pytest.raises(StoreError):
        world.train(0, digest)
    assert [str(error) for error in world.stopped]
    assert train_rows.find(world.store, KEYS, 0, digest) is None


@pytest.mark.parametrize("old", [True, False])
def test_a_replay_steps_without_a_gradient_if_the_release_of_then_did(tmp_path: Path, old: bool) -> None:
    first = World(tmp_path, "cpu", 0)
    first.group.metrics = METRICS if old else METRICS.model_copy(update={"trainable_rows": 1})
    digests = [first.commit(step) for step in range(2)]
    first.train(0, digests[0])
    second = World(tmp_path, "cpu", 0)
    second.store.objects = first.store.objects
    second.train(1, digests[1])
    assert (first.group.always_step, second.group.always_step) == ([False], [old, False])

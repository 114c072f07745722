"""The trainer group whole: real torchrun, real DeepSpeed, real S3, a tiny Qwen3; commanded through its socket."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from roadstead.config import RunConfig, parse
from roadstead.storage import batches, checkpoints, train_rows, weights
from roadstead.storage.batches import BatchCommit
from roadstead.storage.keys import RunKeys
from roadstead.storage.objects import ObjectStore
from roadstead.storage.open import open_run
from roadstead.storage.schema import table_from_rows
from roadstead.storage.train_rows import TrainResult
from roadstead.storage.weights import WeightsManifest
from roadstead.training.advantages import group_advantages
from roadstead.training.client import TrainerClient
from roadstead.training.protocol import (
    Status,
    TrainerBadBatch,
    TrainerConflict,
    TrainerOutOfOrder,
    TrainerUnavailable,
)
from tests.integration.conftest import Servers

VOCABULARY = 64
TEMPERATURE = 0.8
GROUPS, MEMBERS = 2, 4
BOOT_S = 240.0
LOSSES: dict[str, Any] = {
    "minibatches": 2,
    "kl_coefficient": 0.05,
    "aggregation": "sequence_mean",
    "clip_low": 0.02,
    "clip_high": 0.03,
    "learning_rate": 3e-3,
    "ranks": 2,
    "zero_stage": 3,
    "checkpoint_every": 100,
}
"""Of a run with the other objective, on the stage that partitions the weights. The clip is narrow enough to act."""


# -- model, batches, runs -------------------------------------------------------------------------------------


def make_model(folder: Path) -> None:
    """A random Qwen3. Imported here: the trainers have been started before, and boot meanwhile."""
    import torch
    import transformers

    torch.manual_seed(7)
    config = transformers.Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        attention_dropout=0.1,  # the trainer must switch it off
    )
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)


def make_rows(run: str, step: int, advantage: float | None = None) -> list[dict[str, Any]]:
    """A batch of varied lengths, environment tokens and one failed reward; `advantage` overrides row 0's."""
    random = np.random.default_rng(100 + step)
    now = datetime(2025, 1, 1, tzinfo=UTC)
    rows = []
    for group in range(GROUPS):
        rewards: list[float | None] = [float(r) for r in random.integers(0, 3, MEMBERS)]
        if group == 1:
            rewards[3] = None
        advantages = group_advantages(rewards, True)
        prompt = random.integers(0, VOCABULARY, 3 + group).tolist()
        for member in range(MEMBERS):
            n = int(random.integers(2, 12))
            mask = [True] * n
            mask[n // 2] = n < 6  # an environment token in the middle of long ones
            version = max(0, step - 1)
            rows.append(
                {
                    "run_id": run,
                    "attempt": 1,
                    "step": step,
                    "slot": group,
                    "group_id": f"s{step}-g{group}",
                    "member": member,
                    "prompt_id": f"p{group}",
                    "prompt_text": "?",
                    "prompt_token_ids": prompt,
                    "response_text": "!",
                    "response_token_ids": random.integers(0, VOCABULARY, n).tolist(),
                    "loss_mask": mask,
                    "behavior_logprobs": (-4.2 + 0.5 * random.standard_normal(n)).astype(np.float32).tolist(),
                    "version_spans": [{"version": version, "start": 0, "end": n}],
                    "v_traj": version,
                    "head_version": version,
                    "tail_version": version,
                    "staleness": step - version,
                    "reward": rewards[member],
                    "advantage": advantages[member],
                    "finish_reason": "stop",
                    "turns": [{"role": "assistant", "start": 0, "end": n}],
                    "engine_id": "e0",
                    "engine_build": "test",
                    "sampling": {
                        "temperature": TEMPERATURE,
                        "top_p": 1.0,
                        "top_k": -1,
                        "max_tokens": 16,
                        "logprobs_mode": "processed",
                    },
                    "seed": 0,
                    "environment": "test",
                    "from_live_policy": True,
                    "reserved_at": now,
                    "started_at": now,
                    "finished_at": now,
                    "occupied_at": now,
                }
            )
    if advantage is not None:
        rows[0]["advantage"] = advantage
    return rows


def rows_at(run: str, step: int, seed: int) -> list[dict[str, Any]]:
    """The rows of `make_rows(run, seed)` as a batch of another step."""
    version = max(0, step - 1)
    versions = {"step": step, "v_traj": version, "head_version": version, "tail_version": version}
    return [
        row
        | versions
        | {"staleness": step - version}
        | {"version_spans": [{"version": version, "start": 0, "end": len(row["loss_mask"])}]}
        for row in make_rows(run, seed)
    ]


class Run:
    """One run on S3 and the means to command its trainer."""

    def __init__(self, name: str, endpoint: str, folder: Path, **training: Any) -> None:
        self.folder = folder / name
        self.folder.mkdir()
        self.config: RunConfig = parse(
            {
                "name": name,
                "model": {"path": str(folder / "unused")},
                "data": {"prompts": str(folder / "unused.jsonl")},
                "training": {"steps": 10, "learning_rate": 1e-4, "micro_batch_tokens": 48, **training},
                "storage": {"endpoint_url": endpoint},
            },
            name,
        )
        self.config_path = self.folder / "run.yaml"
        self.config_path.write_text(self.config.dump())
        self.store: ObjectStore
        self.keys: RunKeys
        self.store, self.keys = open_run(self.config)
        self.socket = self.folder / "trainer.sock"
        self.client = TrainerClient(self.socket, hang_s=30)
        self.log = self.folder / "trainer.log"

    def publish(self, model: Path) -> WeightsManifest:
        ref = weights.upload_model(self.store, self.keys, model)
        return weights.publish(self.store, self.keys, ref, parent=None, batch_digest=None)

    def commit(self, step: int, advantage: float | None = None) -> BatchCommit:
        return self.commit_rows(make_rows(self.keys.run_id, step, advantage))

    def commit_rows(self, rows: list[dict[str, Any]]) -> BatchCommit:
        table: pa.Table = table_from_rows(rows, batch=True)
        return batches.commit(self.store, self.keys, table, attempt=1, groups=())

    @contextmanager
    def trainer(self) -> Iterator[subprocess.Popen[bytes]]:
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "roadstead.training.launcher"),
                    *("--config", str(self.config_path), "--socket", str(self.socket)),
                    *("--folder", str(self.folder / "scratch")),
                ],
                stdout=log,
                stderr=log,
            )
        try:
            yield process
        finally:
            process.kill()  # its ranks ask the kernel to die with it
            process.wait(10)
            print(self.log.read_text()[-4000:])

    async def train(self, record: BatchCommit) -> TrainResult:
        result, seconds = await self.client.train(record.step, record.digest, lambda _: None, deadline_s=BOOT_S)
        print(self.keys.run_id, record.step, seconds)
        return result

    async def restarted(self) -> Status:
        """The status of the second incarnation, once it is up."""
        deadline = time.monotonic() + BOOT_S
        while True:
            try:
                status = await self.client.status()
            except TrainerUnavailable:
                status = None
            if status is not None and status["incarnation"] == 1:
                return status
            assert time.monotonic() < deadline, f"the trainer did not restart: {status}"
            await asyncio.sleep(0.1)

    def weights_of(self, result: TrainResult) -> dict[str, Any]:
        from safetensors.torch import load_file

        folder = self.folder / f"v{result.weights.version}"
        for file in result.weights.files:
            self.store.get_file(file.key, folder / file.name, file.sha256)
        assert weights.tensors_digest(folder) == result.weights.digest
        tensors: dict[str, Any] = load_file(folder / "model.safetensors")
        return tensors


def ranks_of(launcher: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()]


def lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"  # whoever adopted it may not have reaped it yet


async def gone(pids: list[int], within_s: float = 10.0) -> bool:
    deadline = time.monotonic() + within_s
    while any(lives(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.05)
    return True


@dataclass(frozen=True)
class Runs:
    """Three runs with the same batches, and one of another loss. All trainers are started at once, because booting is
    most of the time."""

    model: Path
    straight: Run
    killed: Run
    two_ranks: Run
    losses: Run
    launchers: dict[str, subprocess.Popen[bytes]]


@pytest.fixture(scope="module")
def runs(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    endpoint = servers.s3.endpoint_url
    assert endpoint is not None
    folder = tmp_path_factory.mktemp("runs")
    model = folder / "model"
    straight = Run("straight", endpoint, folder, checkpoint_every=100)
    killed = Run("killed", endpoint, folder, checkpoint_every=2)
    two_ranks = Run("two-ranks", endpoint, folder, ranks=2, zero_stage=2, checkpoint_every=2)
    losses = Run("losses", endpoint, folder, **LOSSES)
    all_runs = (straight, killed, two_ranks, losses)
    with ExitStack() as stack:
        launchers = {run.config.name: stack.enter_context(run.trainer()) for run in all_runs}
        make_model(model)
        for run in all_runs:
            run.publish(model)
        yield Runs(model, straight, killed, two_ranks, losses, launchers)


@pytest.fixture(scope="module")
async def results(runs: Runs) -> list[TrainResult]:
    """Of the straight run, steps 0, 1, 2; tests further down append to them."""
    return [await runs.straight.train(runs.straight.commit(step)) for step in range(3)]


# -- the tests, in the order of the run's life ---------------------------------------------------------------


async def test_steps_move_the_weights(runs: Runs, results: list[TrainResult]) -> None:
    run = runs.straight
    status = await run.client.status()
    assert (status["version"], status["busy_step"], status["phase"]) == (3, None, "idle")
    assert status["incarnation"] == 0
    v0 = weights.manifest_of(run.store, run.keys, 0)
    assert len({r.weights.digest for r in results} | {v0.digest}) == 4
    for result in results:
        assert result.metrics.applied
        assert result.metrics.grad_norm is not None and result.metrics.grad_norm > 0
        assert result.metrics.learning_rate == 1e-4
    rows = make_rows("straight", 0)
    tokens = sum(sum(row["loss_mask"]) for row in rows if row["reward"] is not None)
    assert results[0].metrics.loss_tokens == tokens


async def test_trainer_logprobs_are_those_of_the_weights_before_the_step(
    runs: Runs, results: list[TrainResult]
) -> None:
    import torch
    import transformers

    run = runs.straight
    policy = transformers.AutoModelForCausalLM.from_pretrained(runs.model, dtype=torch.float32).eval()
    cap = run.config.training.importance_cap
    for step in range(2):
        if step > 0:
            missing, unexpected = policy.load_state_dict(run.weights_of(results[step - 1]), strict=True)
            assert not missing and not unexpected
        record = batches.find(run.store, run.keys, step)
        assert record is not None
        written = train_rows.read(run.store, run.keys, record).to_pylist()
        rows = batches.read(run.store, record).to_pylist()
        loss = 0.0
        for row, got in zip(rows, written, strict=True):
            assert (row["group_id"], row["member"]) == (got["group_id"], got["member"])
            ids = torch.tensor([row["prompt_token_ids"] + row["response_token_ids"]])
            with torch.no_grad():
                logprobs = torch.log_softmax(policy(input_ids=ids).logits[0].float() / TEMPERATURE, -1)
            begin = len(row["prompt_token_ids"])
            want = logprobs[torch.arange(begin - 1, ids.shape[1] - 1), ids[0, begin:]].numpy()
            np.testing.assert_allclose(np.array(got["trainer_logprobs"], np.float32), want, atol=1e-5)
            mask = np.array(row["loss_mask"]) & (row["reward"] is not None)
            weight = np.minimum(np.exp(want - np.array(row["behavior_logprobs"], np.float32)), cap)
            share = float((-row["advantage"] * weight * want)[mask].sum()) / results[step].metrics.loss_tokens
            assert got["loss"] == pytest.approx(share, abs=1e-5)
            loss += share
        assert results[step].metrics.loss == pytest.approx(loss, abs=1e-5)


async def test_repeated_command_gets_the_same_result(runs: Runs, results: list[TrainResult]) -> None:
    run = runs.straight
    for result in (results[0], results[2]):
        again, seconds = await run.client.train(result.step, result.batch_digest, lambda _: None, deadline_s=30)
        assert again == result
        assert "train" not in seconds
    assert (await run.client.status())["version"] == 3


async def test_what_can_not_be_trained_is_refused_by_type(runs: Runs, results: list[TrainResult]) -> None:
    run = runs.straight

    async def ask(step: int, digest: str) -> None:
        await run.client.train(step, digest, lambda _: None, deadline_s=30)

    with pytest.raises(TrainerConflict, match="step 0 is committed with batch"):
        await ask(0, "f" * 64)
    with pytest.raises(TrainerBadBatch, match="no batch is committed for step 3"):
        await ask(3, "f" * 64)
    later = run.commit(7)
    with pytest.raises(TrainerOutOfOrder, match="step 3 has no committed batch"):
        await ask(7, later.digest)
    assert (await run.client.status())["version"] == 3


async def test_tampered_batch_is_refused_and_moves_nothing(runs: Runs, results: list[TrainResult]) -> None:
    run = runs.straight
    record = run.commit(3)
    body = run.store.get(record.data.key)
    middle = len(body) // 2
    run.store.put_hint(record.data.key, body[:middle] + bytes([body[middle] ^ 1]) + body[middle + 1 :])
    with pytest.raises(TrainerBadBatch, match=r"data-.*sha256"):
        await run.train(record)
    assert (await run.client.status())["version"] == 3
    run.store.put_hint(record.data.key, body)
    # That these weights equal those of a run which never saw the tampered batch is checked below.
    results.append(await run.train(record))


async def test_gradient_that_is_not_finite_is_skipped_and_reported(runs: Runs, results: list[TrainResult]) -> None:
    run = runs.straight
    result = await run.train(run.commit(4, advantage=float("nan")))
    assert not result.metrics.applied
    assert result.metrics.grad_norm is None
    assert not result.metrics.grad_clipped
    assert result.weights.version == 5
    assert result.weights.digest == results[3].weights.digest
    # The next step counts from the same weights, and is applied.
    after = await run.train(run.commit(5))
    assert after.metrics.applied
    assert after.weights.digest != result.weights.digest


async def test_a_trainer_that_hangs_is_named(runs: Runs, results: list[TrainResult]) -> None:
    run = runs.straight
    record = run.commit(6)
    pid = (await run.client.status())["pid"]
    seen: list[dict[str, Any]] = []
    os.kill(pid, signal.SIGSTOP)
    try:
        impatient = TrainerClient(run.socket, hang_s=1.5)
        with pytest.raises(TrainerUnavailable, match=r"hangs: no answer to status since 20\d\d-"):
            await impatient.train(6, record.digest, seen.append, deadline_s=30)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert seen
    # The command had reached the socket: whoever asks again joins it or gets its result.
    assert (await run.train(record)).metrics.applied


async def test_a_batch_whose_rewards_are_all_equal_is_recorded_and_moves_nothing(
    runs: Runs, results: list[TrainResult]
) -> None:
    """Adam has momentum by now: a step of gradient 0 would move the weights."""
    run = runs.straight
    before = await run.train(run.commit(7))
    rows = [row | {"reward": 1.0, "advantage": 0.0} for row in make_rows("straight", 8)]
    result = await run.train(run.commit_rows(rows))
    assert (result.weights.version, result.weights.digest) == (9, before.weights.digest)
    metrics = result.metrics
    assert (metrics.applied, metrics.optimizer_steps, metrics.grad_norm) == (False, 0, 0.0)
    assert (metrics.trainable_rows, metrics.zero_advantage_share, metrics.reward_std) == (0, 1.0, 0.0)
    assert metrics.loss_tokens == sum(sum(row["loss_mask"]) for row in rows)
    assert (await run.train(run.commit(9))).metrics.applied


# -- another loss ---------------------------------------------------------------------------------------------


def plain_step(rows: list[dict[str, Any]], model: Path) -> tuple[Any, list[dict[str, float]]]:
    """One step under LOSSES by plain torch on one process, row after row: the policy, and numbers a mini-batch."""
    import torch
    import transformers

    torch.set_num_threads(1)
    policy, reference = (
        transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval() for _ in range(2)
    )
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LOSSES["learning_rate"], betas=(0.9, 0.95), weight_decay=0.0)

    def distribution(network: Any, row: dict[str, Any]) -> tuple[Any, Any]:
        """Log-probabilities of the response tokens, and the entropy where they were sampled."""
        ids = torch.tensor([row["prompt_token_ids"] + row["response_token_ids"]])
        begin = len(row["prompt_token_ids"])
        all_of = torch.log_softmax(network(input_ids=ids).logits[0, begin - 1 : -1] / TEMPERATURE, -1)
        return all_of[torch.arange(len(all_of)), ids[0, begin:]], -(all_of.exp() * all_of).sum(-1)

    rows = [row for row in rows if row["reward"] is not None]
    masks = [torch.tensor(row["loss_mask"]) for row in rows]
    with torch.no_grad():
        proximal = [distribution(policy, row) for row in rows]
        fixed = [distribution(reference, row)[0] for row in rows]
    numbers = []
    for slot in range(GROUPS):  # two groups, two mini-batches
        losses, clipped, kls, entropies = [], [], [], []
        for row, mask, (start, entropy), ref in zip(rows, masks, proximal, fixed, strict=True):
            if row["slot"] != slot:
                continue
            now, _ = distribution(policy, row)
            weight = torch.exp(start - torch.tensor(row["behavior_logprobs"])).clamp(max=2.0)
            ratio = torch.exp(now - start)
            free = ratio * row["advantage"]
            bounded = ratio.clamp(1 - LOSSES["clip_low"], 1 + LOSSES["clip_high"]) * row["advantage"]
            kl = torch.exp(ref - now) - (ref - now) - 1
            token = -torch.minimum(free, bounded) * weight + LOSSES["kl_coefficient"] * kl
            losses.append(token[mask].mean())
            clipped += (bounded < free)[mask].tolist()
            kls += kl[mask].tolist()
            entropies += entropy[mask].tolist()
        loss = torch.stack(losses).mean()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        numbers.append(
            {"loss": loss.item(), "grad_norm": norm.item(), "clip": sum(clipped), "kl": sum(kls)}
            | {"entropy": sum(entropies), "tokens": len(clipped)}
        )
    return policy, numbers


async def test_two_mini_batches_on_two_ranks_are_the_plain_computation(runs: Runs, results: list[TrainResult]) -> None:
    """Decoupled objective, clip-higher, KL to version 0, mean over trajectories; ZeRO-3."""
    import torch
    from safetensors.torch import load_file

    run = runs.losses
    rows = rows_at("losses", 0, seed=5)
    result = await run.train(run.commit_rows(rows))
    policy, numbers = plain_step(rows, runs.model)
    metrics = result.metrics
    tokens = sum(part["tokens"] for part in numbers)
    assert (metrics.applied, metrics.optimizer_steps, metrics.loss_tokens) == (True, 2, tokens)
    assert metrics.loss == pytest.approx(np.mean([part["loss"] for part in numbers]), rel=1e-3)
    assert metrics.grad_norm == pytest.approx(max(part["grad_norm"] for part in numbers), rel=1e-3)
    assert metrics.kl_to_reference == pytest.approx(sum(part["kl"] for part in numbers) / tokens, rel=1e-2)
    assert metrics.entropy == pytest.approx(sum(part["entropy"] for part in numbers) / tokens, rel=1e-4)
    assert metrics.clip_share == pytest.approx(sum(part["clip"] for part in numbers) / tokens, abs=1.5 / tokens)
    assert metrics.clip_share > 0 and metrics.kl_to_reference > 0, "the second mini-batch met moved weights"
    before = load_file(runs.model / "model.safetensors")
    after, want = run.weights_of(result), dict(policy.named_parameters())
    moved = torch.cat([(want[name] - before[name]).flatten() for name in before])
    apart = torch.cat([(want[name] - after[name]).flatten() for name in before])
    # Adam moves a weight whose gradient is rounding noise as far as any other, so single ones differ.
    assert (apart.norm() / moved.norm()).item() < 0.02
    assert result.training is not None and LOSSES.items() <= result.training.items()


def losses_rows() -> list[list[dict[str, Any]]]:
    """The four batches of the run with another loss: step 1's rewards all failed, step 3's row 2 is poisoned."""
    idle = [row | {"reward": None} for row in rows_at("losses", 1, seed=6)]
    poisoned = rows_at("losses", 3, seed=5)
    poisoned[2]["advantage"] = 3e4
    return [rows_at("losses", 0, seed=5), idle, rows_at("losses", 2, seed=7), poisoned]


async def test_a_killed_run_with_another_loss_replays_to_the_same_bits(runs: Runs, results: list[TrainResult]) -> None:
    """No checkpoint: the next incarnation trains steps 0, 1 and 2 again, with the reference that it loads again, and
    would refuse to go on from other weights. Step 1, whose rewards all failed, moved nothing the first time."""
    run = runs.losses
    begun, idle, ordinary, poisoned = losses_rows()
    first = await run.train(run.commit_rows(idle))
    step_0 = train_rows.find(run.store, run.keys, 0, run.commit_rows(begun).digest)
    assert step_0 is not None and first.weights.digest == step_0.weights.digest
    assert not first.metrics.applied and first.metrics.loss_tokens == 0
    second = await run.train(run.commit_rows(ordinary))
    assert second.weights.digest != first.weights.digest
    record = run.commit_rows(poisoned)
    pid = (await run.client.status())["pid"]
    command = asyncio.create_task(run.train(record))
    while (await run.client.status())["busy_step"] != 3 and not command.done():
        await asyncio.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    third = await command
    await run.restarted()
    assert await run.train(record) == third  # replayed by now, if the kill came after the step
    status = await run.client.status()
    assert (status["version"], status["pid"] == pid) == (4, False)
    assert third.weights.digest != second.weights.digest
    await run.client.quit()  # its two ranks would only be in the way of what follows
    assert await asyncio.to_thread(runs.launchers["losses"].wait, 30) == 0


@pytest.mark.slow
async def test_a_step_of_two_mini_batches_is_replayed_and_bisected(runs: Runs, results: list[TrainResult]) -> None:
    """A probe of such a step trains it and goes back: its second gradient is that of weights that moved."""
    from roadstead.training.replay import BisectAsk, ReplayAsk, bisect, replay
    from tests.integration.test_replay import record_run

    run = runs.losses
    for step, rows in enumerate(losses_rows()):  # where the tests above were not run
        record = run.commit_rows(rows)
        if train_rows.find(run.store, run.keys, step, record.digest) is None:
            await run.train(record)
    record_run(run)
    ask = {"run": run.keys.run_id, "storage": run.config.storage}
    report = await asyncio.to_thread(replay, ReplayAsk(first=0, last=3, **ask))
    assert report.equal and [step.equal for step in report.steps] == [True] * 4
    assert [step.metrics for step in report.steps] == [step.recorded_metrics for step in report.steps]
    assert {row.logprob_gap for row in report.rows} == {0.0}
    found = await asyncio.to_thread(bisect, BisectAsk(step=3, metric="grad_norm", threshold=50.0, **ask))
    assert (found.outcome, found.minimal, found.reproduced) == ("found", True, True)
    assert [row.row for row in found.culprits] == [2]


# -- the first run, killed ------------------------------------------------------------------------------------


async def test_killed_rank_replays_to_the_same_bits(runs: Runs, results: list[TrainResult]) -> None:
    run, reference = runs.killed, results
    records = [run.commit(step) for step in range(4)]
    launcher = runs.launchers["killed"]
    again = [await run.train(record) for record in records[:3]]
    saved = checkpoints.newest(run.store, run.keys, 99)
    assert saved is not None
    assert (saved.version, saved.weights_digest) == (2, again[1].weights.digest)

    pid = (await run.client.status())["pid"]
    command = asyncio.create_task(run.train(records[3]))
    while (await run.client.status())["busy_step"] != 3 and not command.done():
        await asyncio.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    again.append(await command)
    status = await run.restarted()
    assert status["pid"] != pid
    print("boot after restart:", status["boot_seconds"])
    assert [r.weights.digest for r in again] == [r.weights.digest for r in reference[:4]]
    assert [r.metrics for r in again] == [r.metrics for r in reference[:4]]
    await run.train(run.commit(4))  # past the last checkpoint, which is version 4
    ranks = ranks_of(launcher.pid)
    await run.client.quit()
    assert await asyncio.to_thread(launcher.wait, 30) == 0
    assert await gone(ranks)


async def test_other_settings_after_a_resume_hold_from_there_on_and_not_for_the_replay(
    runs: Runs, results: list[TrainResult]
) -> None:
    """DeepSpeed restores the learning rate and clipping norm of the checkpoint; a replay needs those of then, the
    next step those of now."""
    run = runs.killed
    last = train_rows.find(run.store, run.keys, 4, run.commit(4).digest)
    assert last is not None and last.metrics.learning_rate == pytest.approx(1e-4)
    training = run.config.training.model_copy(
        update={"learning_rate": 3e-3, "max_grad_norm": 1e-6, "micro_batch_tokens": 200}
    )
    run.config_path.write_text(run.config.model_copy(update={"training": training}).dump())
    with run.trainer():
        result = await run.train(run.commit(5))  # a replay of step 4 that differs is refused
        seventh = await run.train(run.commit(6))
        weights.publish(run.store, run.keys, seventh.weights, parent=None, batch_digest="b")
        await run.client.checkpoint(7, deadline_s=30)
    saved = checkpoints.newest(run.store, run.keys, 99)
    assert saved is not None and saved.version == 7, "asked for, though the interval is 2"
    assert saved.weights_digest == seventh.weights.digest
    assert result.metrics.learning_rate == pytest.approx(3e-3)
    assert result.training == training.model_dump(mode="json")
    before, after = run.weights_of(last), run.weights_of(result)
    moved = max((after[name] - before[name]).abs().max().item() for name in after)
    assert 1e-3 < moved < 4e-3, "Adam moves a weight by about its learning rate"


async def hung_rank_is_named(client: TrainerClient, ranks: list[int]) -> None:
    """Stop the rank that is not 0, which nobody asks for anything: its silence grows, rank 0's does not."""
    first = (await client.status())["pid"]
    other = next(pid for pid in ranks if pid != first)
    os.kill(other, signal.SIGSTOP)
    try:
        async with asyncio.timeout(30):
            while (silence := (await client.status())["silence"])["1"] < 4:
                await asyncio.sleep(0.5)
    finally:
        os.kill(other, signal.SIGCONT)
    assert silence["0"] < silence["1"]
    async with asyncio.timeout(30):
        while (await client.status())["silence"]["1"] > 2.5:
            await asyncio.sleep(0.5)


async def test_two_ranks_agree_with_one(runs: Runs, results: list[TrainResult]) -> None:
    import torch

    alone, reference, run = runs.straight, results, runs.two_ranks
    launcher = runs.launchers["two-ranks"]
    two = [await run.train(run.commit(step)) for step in range(2)]
    ours, theirs = run.weights_of(two[1]), alone.weights_of(reference[1])
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=1e-5)
    saved = checkpoints.newest(run.store, run.keys, 99)
    assert saved is not None
    assert {f.name for f in saved.files} >= {"state/rng_rank0.pt", "state/rng_rank1.pt"}
    ranks = ranks_of(launcher.pid)
    assert len(ranks) == 2
    await hung_rank_is_named(run.client, ranks)
    launcher.kill()
    assert await gone(ranks), "ranks outlived their launcher"

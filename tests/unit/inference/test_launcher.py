"""The server's flags and environment, for both devices, and the wait for first weights."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from roadstead import config
from roadstead.inference import chunk_stamps, cpu_build, launcher
from roadstead.storage import weights
from roadstead.storage.objects import StoreError


def run(**engine: Any) -> config.RunConfig:
    values = {
        "name": "r",
        "seed": 7,
        "model": {"path": "m", "dtype": "bfloat16"},
        "data": {"prompts": "p.jsonl"},
        "training": {"steps": 1},
        "engine": engine,
    }
    return config.parse(values, "test")


def value(command: list[str], flag: str) -> str:
    assert command.count(flag) == 1, f"{flag} in {command}"
    return command[command.index(flag) + 1]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_server_listens_here_only_and_reports_behaviour_logprobs(device: str) -> None:
    command = launcher.server_command(run(device=device, max_model_len=300), Path("/w/v=00000003"), 4321)
    assert command[:3] == ["vllm", "serve", "/w/v=00000003"]
    assert value(command, "--host") == "127.0.0.1"
    assert value(command, "--port") == "4321"
    assert value(command, "--served-model-name") == "policy"
    assert value(command, "--dtype") == "bfloat16"
    assert value(command, "--max-model-len") == "300"
    assert value(command, "--seed") == "7"
    assert value(command, "--logprobs-mode") == "processed_logprobs"
    assert value(command, "--generation-config") == "vllm"
    assert value(command, "--weight-transfer-config") == '{"backend": "roadstead_disk"}'
    assert "--enable-scale-out" in command


def test_cpu_never_chunks_a_prefill_and_fits_a_whole_prompt_in_a_step() -> None:
    command = launcher.server_command(run(device="cpu", max_model_len=9000, kv_cache_bytes=1 << 28), Path("m"), 1)
    assert "--no-enable-chunked-prefill" in command and "--enforce-eager" in command
    assert int(value(command, "--max-num-batched-tokens")) >= 9000
    assert value(command, "--kv-cache-memory-bytes") == str(1 << 28)
    assert value(command, "--distributed-executor-backend").endswith(".UniProcExecutor")
    assert "--gpu-memory-utilization" not in command


def test_cuda_takes_none_of_the_cpu_flags() -> None:
    command = launcher.server_command(run(device="cuda", gpu_memory_utilization=0.4), Path("m"), 1)
    assert value(command, "--gpu-memory-utilization") == "0.4"
    for flag in (
        "--enforce-eager",
        "--no-enable-chunked-prefill",
        "--max-num-batched-tokens",
        "--kv-cache-memory-bytes",
        "--distributed-executor-backend",
    ):
        assert flag not in command


def test_environment_of_the_cpu_build() -> None:
    environment = launcher.server_environment(run(device="cpu"))
    assert environment["OMP_NUM_THREADS"] == "1"
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert environment["TORCHDYNAMO_DISABLE"] == "1"
    assert environment["VLLM_SERVER_DEV_MODE"] == "1"


def test_environment_of_the_cuda_build() -> None:
    environment = launcher.server_environment(run(device="cuda"))
    assert environment["VLLM_SERVER_DEV_MODE"] == "1"
    assert environment["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
    assert not {"OMP_NUM_THREADS", "TORCHDYNAMO_DISABLE", "VLLM_CPU_OMP_THREADS_BIND"} & set(environment)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_both_builds_stamp_every_chunk_before_they_serve(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    done: list[str] = []
    vllm = types.ModuleType("vllm.entrypoints.cli.main")
    vllm.main = lambda: done.append("serve")  # type: ignore[attr-defined]
    for name in ("vllm", "vllm.entrypoints", "vllm.entrypoints.cli"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, vllm.__name__, vllm)
    monkeypatch.setattr(launcher, "die_with_parent", lambda: None)
    monkeypatch.setattr(cpu_build, "adjust", lambda: done.append("adjust"))
    monkeypatch.setattr(chunk_stamps, "stamp_every_chunk", lambda: done.append("stamp"))
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(sys, "argv", [])
    launcher.serve(run(device=device), Path("m"), 1)
    assert done == (["adjust"] if device == "cpu" else []) + ["stamp", "serve"]


class Store:
    def url(self, key: str) -> str:
        return f"s3://bucket/{key}"


class Keys:
    run_id, latest_weights = "r", "runs/r/weights/LATEST"


@pytest.mark.parametrize("down", [False, True])
def test_the_wait_for_first_weights_ends_and_says_what_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, down: bool
) -> None:
    def latest(*_: object) -> None:
        if down:
            raise StoreError("connection refused")

    monkeypatch.setattr(weights, "latest_version", latest)
    monkeypatch.setattr(launcher, "_FIRST_WEIGHTS_POLL_S", 0.01)
    with pytest.raises(launcher.WeightsMissing) as error:
        launcher.first_weights(Store(), Keys(), tmp_path, timeout_s=0.05)  # type: ignore[arg-type]
    assert "s3://bucket/runs/r/weights/LATEST" in str(error.value)
    assert ("connection refused" if down else "none is published") in str(error.value)


def test_the_newest_version_is_downloaded_when_one_appears(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    answers = [None, None, 5]
    monkeypatch.setattr(weights, "latest_version", lambda *_: answers.pop(0))
    monkeypatch.setattr(weights, "manifest_of", lambda _store, _keys, version: f"manifest {version}")
    monkeypatch.setattr(weights, "download", lambda _store, manifest, folder: folder / manifest)
    monkeypatch.setattr(launcher, "_FIRST_WEIGHTS_POLL_S", 0.01)
    folder = launcher.first_weights(Store(), Keys(), tmp_path, timeout_s=5)  # type: ignore[arg-type]
    assert folder == tmp_path / "v=00000005" / "manifest 5"


def test_importing_the_launcher_leaves_torch_for_later() -> None:
    """Its environment is set in `serve`; torch reads that once, at its own import."""
    check = "import roadstead.inference.launcher, sys; sys.exit('torch' in sys.modules or 'vllm' in sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True, timeout=60, cwd=Path(config.__file__).parents[1])

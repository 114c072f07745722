"""The torchrun command, its environment, and DeepSpeed's configuration, on both devices."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from roadstead.config import RunConfig
from roadstead.training.deepspeed_config import deepspeed_config
from roadstead.training.launcher import command, environment


def config(device: str, **training: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "run-1",
            "model": {"path": "model", "dtype": "bfloat16" if device == "cuda" else "float32"},
            "data": {"prompts": "prompts.jsonl"},
            "training": {"steps": 3, **training},
            "engine": {"device": device},
        }
    )


@pytest.mark.parametrize(("device", "ranks"), [("cpu", 1), ("cuda", 4)])
def test_command(device: str, ranks: int) -> None:
    line = command(config(device, ranks=ranks), Path("run.yaml"), Path("/s/trainer"), Path("/f"), 4711)
    assert line[:3] == [sys.executable, "-m", "torch.distributed.run"]
    assert f"--nproc-per-node={ranks}" in line
    assert "--rdzv-backend=c10d" in line
    assert "--rdzv-endpoint=127.0.0.1:4711" in line
    assert not any(part.startswith("--master") for part in line), "a static rendezvous can't restart"
    assert line[-5:] == [
        "--module",
        "roadstead.training.rank",
        "--config=run.yaml",
        "--socket=/s/trainer",
        "--folder=/f",
    ]


def test_environment() -> None:
    cpu, cuda = environment(config("cpu")), environment(config("cuda"))
    assert cpu["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    assert (cpu["DS_ACCELERATOR"], cuda["DS_ACCELERATOR"]) == ("cpu", "cuda")
    assert "CUBLAS_WORKSPACE_CONFIG" not in cpu
    assert cuda["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_config(stage: int) -> None:
    cpu = deepspeed_config(config("cpu", zero_stage=stage, max_grad_norm=0.5))
    cuda = deepspeed_config(config("cuda", zero_stage=stage))
    assert cpu["zero_optimization"]["stage"] == stage
    assert cpu["gradient_clipping"] == 0.5
    assert not cpu["bf16"]["enabled"]
    assert cuda["bf16"] == {"enabled": True, "check_grad_overflow": True}
    assert cpu["optimizer"]["params"]["torch_adam"] is cuda["optimizer"]["params"]["torch_adam"] is True
    assert "fused" not in cpu["optimizer"]["params"]
    assert not cpu["managed_gradient_accumulation"]
    assert not cpu["zero_optimization"]["overlap_comm"]

"""DeepSpeed's configuration, from ours.

Owns: every DeepSpeed key that we set, and why. Never touches: the engine.
Invariant: a pure function of the run's configuration; whatever changes bits is in here or in the checkpoint's
`settings`.
A crash leaves: nothing, it is pure.
"""

from __future__ import annotations

from typing import Any

from roadstead.config import RunConfig

_BUCKET = 50_000_000
"""Elements a reduction bucket: 200 MB in float32. DeepSpeed's default takes 2 GB a rank and is no faster here."""


def deepspeed_config(config: RunConfig) -> dict[str, Any]:
    """The dict that `deepspeed.initialize` takes."""
    t = config.training
    adam: dict[str, Any] = {
        "lr": t.learning_rate,
        "betas": list(t.betas),
        "weight_decay": t.weight_decay,
        # torch's AdamW on both devices. DeepSpeed's own is compiled at first use: that needs a compiler on every
        # machine, and a process killed during the build leaves a lock on which every later start hangs for ever.
        "torch_adam": True,
    }
    if config.engine.device == "cuda":
        adam["fused"] = True  # torch's own fused kernel, nothing to compile
    return {
        "train_micro_batch_size_per_gpu": 1,  # required by DeepSpeed; the plan decides what is passed
        "gradient_accumulation_steps": 1,
        # Any number of backward() calls, then one step(): the plan's length differs from batch to batch.
        "managed_gradient_accumulation": False,
        "gradient_clipping": t.max_grad_norm,
        "optimizer": {"type": "AdamW", "params": adam},
        # A constant learning rate: WarmupLR from 0 would give zero in its first TWO steps.
        "bf16": {
            "enabled": config.model.dtype == "bfloat16",
            "check_grad_overflow": True,  # false, the default of older versions, writes NaN into the masters
        },
        "zero_optimization": {
            "stage": t.zero_stage,
            "reduce_bucket_size": _BUCKET,
            "allgather_bucket_size": _BUCKET,
            "overlap_comm": False,  # overlapped, two runs on the same data differ (DeepSpeed issue 5523)
        },
        "steps_per_print": 1_000_000_000,
        "wall_clock_breakdown": False,
    }

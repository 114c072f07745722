"""What tests do to a vLLM server from inside: `python -m tests.support.vllm_hooks RUN.yaml MODEL_DIR PORT` serves it.

The server is the launcher's own; only its worker extension is a subclass, which tells how many requests the core holds,
and ignores loads while a file says so.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

IGNORE_LOADS = "ignore-loads"
"""A file of this name beside the versions: loads are acknowledged and not done."""


def serve() -> None:
    from roadstead import config
    from roadstead.inference import launcher

    command = launcher.server_command

    def hooked(*args: Any) -> list[str]:
        name = "roadstead.inference.worker_extension.WorkerExtension"
        return [f"{__spec__.name}.HookedExtension" if part == name else part for part in command(*args)]

    launcher.server_command = hooked
    launcher.serve(config.load(Path(sys.argv[1])), Path(sys.argv[2]), int(sys.argv[3]))


if __name__ == "__main__":
    serve()
else:
    from vllm.v1.core.sched.scheduler import Scheduler

    from roadstead.inference import worker_extension

    class HookedExtension(worker_extension.WorkerExtension):
        def requests(self) -> str:
            """In the core, waiting ones included. The worker is in the core's process, so it can look."""
            return str(len(_schedulers[-1].requests))

    _schedulers: list[Scheduler] = []
    _init = Scheduler.__init__

    def _remembered(self: Scheduler, *args: Any, **kwargs: Any) -> None:
        _init(self, *args, **kwargs)
        _schedulers.append(self)

    Scheduler.__init__ = _remembered

    _load = worker_extension.DiskWeights._load

    def _perhaps(self: worker_extension.DiskWeights, files: list[Path]) -> None:
        if not (files[0].parents[1] / IGNORE_LOADS).exists():
            _load(self, files)

    worker_extension.DiskWeights._load = _perhaps  # type: ignore[method-assign]

"""Starts a trainer group: `python -m roadstead.training.launcher --config ... --folder ... --socket ...`.

With `--ask FILE` in place of the socket it is the group of a replay, which answers one question and ends.

Owns: the torchrun command, its environment, the rendezvous port. Never touches: steps, the store.
Invariant: the launcher is torchrun's agent itself; it dies with its parent, and the ranks die with it.
A crash leaves: no process; the socket file and the scratch folder stay for the next start.

The death signal follows the parent's THREAD that started the launcher: start it from one that lives as long as
the trainer should (a main thread, not a pool's).
"""

from __future__ import annotations

import argparse
import os
import socket as sockets
import sys
from pathlib import Path

from roadstead.config import RunConfig, load
from roadstead.process import die_with_parent

_MAX_RESTARTS = 100
"""A run lasts weeks on machines that fail; a group that can't boot is bounded by its commander's deadline."""
_AGENT = (sys.executable, "-m", "torch.distributed.run")


def command(config: RunConfig, config_path: Path, socket: Path, folder: Path, rdzv_port: int) -> list[str]:
    """The torchrun command of the group that trains."""
    return [
        *_torchrun(config, rdzv_port, _MAX_RESTARTS),
        "--module",
        "roadstead.training.rank",
        f"--config={config_path}",
        f"--socket={socket}",
        f"--folder={folder}",
    ]


def replay_command(config: RunConfig, config_path: Path, ask: Path, folder: Path, rdzv_port: int) -> list[str]:
    """The torchrun command of a group that answers `ask`. It is not restarted: whoever asked is told."""
    return [
        *_torchrun(config, rdzv_port, 0),
        "--module",
        "roadstead.training.replay_rank",
        f"--config={config_path}",
        f"--ask={ask}",
        f"--folder={folder}",
    ]


def _torchrun(config: RunConfig, rdzv_port: int, max_restarts: int) -> list[str]:
    """Up to the module.

    The c10d rendezvous, because a static one (--master-addr) hands the restarted ranks the addresses of the dead
    ones (torch 2.13 with gloo: 4 of 4 restarts failed; pytorch issue 135712).
    """
    return [
        *_AGENT,
        f"--nproc-per-node={config.training.ranks}",
        f"--max-restarts={max_restarts}",
        "--monitor-interval=0.1",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{rdzv_port}",
        f"--rdzv-id={config.name}",
        "--local-addr=127.0.0.1",
    ]


def environment(config: RunConfig) -> dict[str, str]:
    """What the ranks need on top of the inherited environment."""
    values = {
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # else a restart reads the dead incarnation's store, 3 of 4 hung
        "GLOO_SOCKET_IFNAME": "lo",  # one machine; a host name that does not resolve must not matter
        "OMP_NUM_THREADS": "1",  # the number of threads changes the bits, and spinning ones cost 10x on a busy machine
        "DS_ACCELERATOR": config.engine.device,
        "HF_HUB_OFFLINE": "1",  # the model is on S3
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }
    if config.engine.device == "cuda":
        values["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # cuBLAS is deterministic only with it
    return values


def main() -> None:
    die_with_parent()
    parser = argparse.ArgumentParser(prog="python -m roadstead.training.launcher", description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    purpose = parser.add_mutually_exclusive_group(required=True)
    purpose.add_argument("--socket", type=Path)
    purpose.add_argument("--ask", type=Path)
    given = parser.parse_args()
    config = load(given.config)
    os.environ.update(environment(config))
    if given.ask is not None:
        line = replay_command(config, given.config, given.ask, given.folder, _free_port())
    else:
        line = command(config, given.config, given.socket, given.folder, _free_port())

    from torch.distributed import run

    run.main(line[len(_AGENT) :])


def _free_port() -> int:
    with sockets.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main()

"""The vLLM server of one engine.

    python -m roadstead.inference.launcher --config RUN.yaml --port P --folder DIR

Owns: the server's flags and environment, and the download of the weights it starts from.
Never touches: later weights (the watcher loads those), requests, the GPU before vLLM does.
Invariant: the server starts from the newest published version, in a folder whose manifest says which; it
listens on this machine only, and dies with the process that started it.
A crash leaves: no process; DIR/v=... whole, and perhaps a hidden part of a download that the watcher removes.
Any exit is a failure: vLLM exits with 0 when its core has died.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import structlog

from roadstead.config import RunConfig, load
from roadstead.inference import chunk_stamps
from roadstead.inference.folders import version_folder
from roadstead.process import die_with_parent
from roadstead.storage import weights
from roadstead.storage.keys import RunKeys
from roadstead.storage.objects import ObjectStore, StoreError
from roadstead.storage.open import open_run

log = structlog.get_logger(__name__)

SERVED_MODEL = "policy"
_FIRST_WEIGHTS_TIMEOUT_S = 600.0
"""Version 0 is uploaded when the run begins; minutes, for a model of tens of GB."""
_FIRST_WEIGHTS_POLL_S = 0.5
_CPU_BATCH_TOKENS = 4096
"""Tokens a step; a whole prompt must fit, since prefill is not chunked there."""


class WeightsMissing(RuntimeError):
    """No version was published in time."""


_HELP = """Serve a run's newest weights with vLLM, on 127.0.0.1 only: its routes can replace the weights."""
_EXAMPLE = """example: an engine of your own, on another machine (docs/fleet.md)

  there    python -m roadstead.inference.launcher --config RUN.yaml --port 8001 \\
             --folder DATA/runs/RUN/engine/vllm-127.0.0.1-8001
  here     ssh -N -L 8001:127.0.0.1:8001 that-machine
  RUN.yaml engine: {urls: ["http://127.0.0.1:8001"]}

RUN.yaml there names the S3 endpoint that this machine uses; credentials come from the usual AWS variables. DIR is on
a file system that both machines see under the same path. The server ends with the process that started it: start it
under systemd, tmux or a container, not with `nohup ... &` from a shell that you close.
"""


def server_command(config: RunConfig, model_dir: Path, port: int) -> list[str]:
    """The `vllm serve` command line. Pure."""
    engine = config.engine
    command = [
        *("vllm", "serve", str(model_dir)),
        *("--host", "127.0.0.1"),  # the dev routes can replace the weights: never on a network
        *("--port", str(port)),
        *("--served-model-name", SERVED_MODEL),
        *("--dtype", config.model.dtype),
        *("--max-model-len", str(engine.max_model_len)),
        *("--max-num-seqs", str(engine.max_num_seqs)),
        *("--seed", str(config.seed)),
        *("--generation-config", "vllm"),  # sampling is what the request says, not what the model folder says
        *("--logprobs-mode", "processed_logprobs"),  # after temperature: the behaviour policy's own
        "--disable-uvicorn-access-log",  # the watcher looks several times a second
        "--enable-scale-out",  # /inference/v1/generate answers 403 without it
        *("--worker-extension-cls", "roadstead.inference.worker_extension.WorkerExtension"),
        *("--weight-transfer-config", '{"backend": "roadstead_disk"}'),
    ]
    if engine.device == "cuda":
        return [*command, "--gpu-memory-utilization", str(engine.gpu_memory_utilization)]
    return [
        *command,
        "--enforce-eager",
        # A seeded request whose prefill is chunked kills the core: "CPU Generator does not use offset".
        "--no-enable-chunked-prefill",
        *("--max-num-batched-tokens", str(max(_CPU_BATCH_TOKENS, engine.max_model_len))),
        *("--kv-cache-memory-bytes", str(engine.kv_cache_bytes)),
        # Worker inside the core: two processes, not three. The short name "uni" is turned into "mp" on CPU.
        *("--distributed-executor-backend", "vllm.v1.executor.uniproc_executor.UniProcExecutor"),
    ]


def server_environment(config: RunConfig) -> dict[str, str]:
    """Variables that must be set before Python imports torch. Pure."""
    common = {
        "VLLM_SERVER_DEV_MODE": "1",  # the routes that pause, load and label
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    if config.engine.device == "cuda":
        return {**common, "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    return {
        **common,
        # The first sampled token would otherwise start C++ compilers, even with --enforce-eager: 14 s.
        "TORCHDYNAMO_DISABLE": "1",
        # Threads that spin against each other on shared cores made it ten times slower; one thread also makes
        # a seeded request's logprobs bitwise the same in any batch.
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }


def serve(config: RunConfig, model_dir: Path, port: int) -> None:
    """Become the server of `model_dir`, a folder made by `storage.weights.download`.

    Returns when the server has ended. Call it first thing in a process, from its main thread, before anything
    imports torch.
    """
    die_with_parent()
    os.environ.update(server_environment(config))
    sys.argv = server_command(config, model_dir, port)
    if config.engine.device == "cpu":
        from roadstead.inference import cpu_build

        cpu_build.adjust()
    chunk_stamps.stamp_every_chunk()
    from vllm.entrypoints.cli.main import main as vllm_main

    vllm_main()


def first_weights(store: ObjectStore, keys: RunKeys, folder: Path, timeout_s: float) -> Path:
    """Download the newest published version under `folder`; waits for one.

    Raises WeightsMissing, StoreError.
    """
    started = time.monotonic()
    log.info("engine.waiting_for_weights", run=keys.run_id, key=keys.latest_weights, timeout_s=timeout_s)
    while True:
        reason: object = "none is published"
        try:
            version = weights.latest_version(store, keys)
        except StoreError as error:
            version, reason = None, error  # the store may still be starting
        if version is not None:
            break
        if time.monotonic() - started > timeout_s:
            raise WeightsMissing(
                f"{store.url(keys.latest_weights)}: no weights of run {keys.run_id} after {timeout_s:g} s "
                f"({reason}); start the run, or look at why it published none"
            )
        time.sleep(_FIRST_WEIGHTS_POLL_S)
    target = weights.download(store, weights.manifest_of(store, keys, version), version_folder(folder, version))
    log.info("engine.weights_downloaded", version=version, folder=str(target), seconds=time.monotonic() - started)
    return target


def main() -> None:
    die_with_parent()  # also while it waits and downloads
    parser = argparse.ArgumentParser(
        prog="python -m roadstead.inference.launcher",
        description=_HELP,
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", type=Path, required=True, help="the run's YAML")
    parser.add_argument("--port", type=int, required=True, help="port to listen on, on 127.0.0.1")
    parser.add_argument("--folder", type=Path, required=True, metavar="DIR", help="folder for versions of the weights")
    arguments = parser.parse_args()
    config = load(arguments.config)
    store, keys = open_run(config)
    model_dir = first_weights(store, keys, arguments.folder.resolve(), _FIRST_WEIGHTS_TIMEOUT_S)
    serve(config, model_dir, arguments.port)


if __name__ == "__main__":
    main()

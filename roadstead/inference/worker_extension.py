"""Weights from local disk into a running vLLM worker.

Runs inside vLLM's worker process, loaded by `--worker-extension-cls`; importing it registers the
weight-transfer backend `roadstead_disk`.
Owns: the checks of new weights, their way into the model, and the worker's end when its server dies.
Never touches: the network, S3, the version label (that belongs to the engine core).
Invariant: sha256, names and shapes of everything are checked before the first parameter is touched, so that a
refused update leaves the old weights whole. A failure after that point ends the process: a half-loaded model
must never answer.
A crash leaves: no process; the kernel kills the worker with its server.
"""

from __future__ import annotations

import hashlib
import logging
import multiprocessing
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from roadstead.inference.worker_probe import logits_digest
from roadstead.process import die_with_parent

log = logging.getLogger(__name__)

Shapes = dict[str, tuple[int, ...]]


@dataclass
class DiskInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    root: str
    """Folder that holds all versions; weights from elsewhere are refused."""


@dataclass
class DiskUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    path: str
    """Folder of one version, under the root."""
    sha256: dict[str, str] = field(default_factory=dict)
    """Digest of each safetensors file of the version, by file name: the version is exactly these files."""


class DiskWeights(WeightTransferEngine[DiskInitInfo, DiskUpdateInfo]):  # type: ignore[misc]
    """Loads a local Hugging Face checkpoint in place. Everything happens in `receive_weights`."""

    init_info_cls = DiskInitInfo
    update_info_cls = DiskUpdateInfo

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        self._root: Path | None = None
        self._tied = bool(self.model_config.hf_text_config.tie_word_embeddings)
        # Read now: the folder that the server was started from is deleted after a few updates.
        launched_from = Path(vllm_config.model_config.model)
        self._expected = self._shapes(sorted(launched_from.glob("*.safetensors")))

    def init_transfer_engine(self, init_info: DiskInitInfo) -> None:
        self._root = Path(init_info.root).resolve(strict=True)

    def start_weight_update(self) -> None:
        """Nothing: to touch the model before its new weights are checked would make a refusal fatal."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        if current_platform.is_cpu():  # the base class waits for an accelerator, and there is none
            self.receive_weights(self.parse_update_info(update_info))
        else:
            super().update_weights(update_info)

    def receive_weights(self, update_info: DiskUpdateInfo) -> None:
        """Raises ValueError, the old weights untouched, when the new ones are not what was announced."""
        files = self._checked_files(update_info)
        try:
            self._load(files)
        except BaseException:
            log.critical("weights in %s broke off half-way; ending the engine", update_info.path, exc_info=True)
            logging.shutdown()
            os.kill(os.getpid(), signal.SIGKILL)
            raise

    def finish_weight_update(self) -> None:
        """Nothing: `receive_weights` has finished, and the label is the engine core's."""

    def shutdown(self) -> None:
        """Nothing is held between updates."""

    def _checked_files(self, update: DiskUpdateInfo) -> list[Path]:
        folder = Path(update.path).resolve()
        if self._root is None or not folder.is_relative_to(self._root):
            raise ValueError(f"path: {folder} is not under the attached root {self._root}")
        if not update.sha256:
            raise ValueError(f"sha256: empty for {folder}; give the digest of each safetensors file")
        files = [folder / name for name in sorted(update.sha256)]
        for file in files:
            with file.open("rb") as body:
                found = hashlib.file_digest(body, "sha256").hexdigest()
            if found != update.sha256[file.name]:
                raise ValueError(f"{file}: sha256 {found}, announced {update.sha256[file.name]}")
        shapes = self._shapes(files)
        if shapes != self._expected:
            differing = sorted(dict(shapes.items() ^ self._expected.items()))
            raise ValueError(
                f"{folder}: {len(differing)} tensors differ in name or shape from the model being served, "
                f"first {differing[:3]}"
            )
        return files

    def _shapes(self, files: list[Path]) -> Shapes:
        shapes: Shapes = {}
        for file in files:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - a safetensors handle is not a mapping
                    shapes[name] = tuple(tensors.get_slice(name).get_shape())
        if self._tied:
            # Some exporters write the tied copy and some do not; the model has one tensor either way.
            shapes.pop("lm_head.weight", None)
        return shapes

    def _load(self, files: list[Path]) -> None:
        initialize_layerwise_reload(self.model)
        loaded = self.model.load_weights(_tensors(files))
        finalize_layerwise_reload(self.model, self.model_config)
        if self._tied and current_platform.is_cpu():
            _repack_tied_head(self.model)
        missing = {name for name, _ in self.model.named_parameters()} - set(loaded)
        missing = {name for name in missing if not name.endswith("_scale")}  # attention scales have defaults
        if missing:
            raise RuntimeError(f"{len(missing)} parameters got no weights, first {sorted(missing)[:3]}")


def _tensors(files: list[Path]) -> Iterator[tuple[str, Any]]:
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                yield name, tensors.get_tensor(name)


def _repack_tied_head(model: Any) -> None:
    """On CPU the output layer computes on a copy packed at load time. A tied checkpoint has no tensor for
    that layer, so a reload leaves the copy stale: logprobs then match neither the old nor the new weights."""
    head = getattr(model, "lm_head", None)
    if head is not None:
        head.quant_method.process_weights_after_loading(head)


class WorkerExtension:
    """Mixed into vLLM's worker class. The module's import does the rest of the work."""

    model_runner: Any
    vllm_config: Any

    def logits_digest(self) -> str | None:
        """See `worker_probe.logits_digest`. Called through /collective_rpc.

        A model that it fails on gets no verdict, which the client reports with every update, rather than no updates.
        """
        try:
            return logits_digest(self.model_runner, self.vllm_config)
        except Exception:
            log.exception("the probe failed: weight updates of this model can't be proved")
            return None


WeightTransferEngineFactory.register_engine("roadstead_disk", DiskWeights)

if multiprocessing.parent_process() is not None:
    # Without it an engine core whose API server is killed lives on for ever, with all its memory.
    die_with_parent()

"""From a started process to a rank whose trainer holds a version. Imports torch: import it late.

Owns: device and process group, the download of version 0, taking over a checkpoint.
Never touches: commands; it writes nothing to the store.
Invariant: collective, all ranks in the same order. The weights that a rank comes back with are those that the
checkpoint's manifest names, proved by their digest.
A crash leaves: downloads in the scratch folder.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from roadstead.config import RunConfig
from roadstead.storage import checkpoints, weights
from roadstead.storage.checkpoints import CheckpointManifest
from roadstead.storage.keys import RunKeys
from roadstead.storage.objects import ObjectStore
from roadstead.training.group import COLLECTIVE_TIMEOUT, RankGroup
from roadstead.training.trainer import Trainer

Enter = Callable[[str], None]
"""Told what the boot does next."""


def join_group(config: RunConfig) -> RankGroup:
    """Take this rank's device and join the others."""
    cuda = config.engine.device == "cuda"
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.use_deterministic_algorithms(True, warn_only=cuda)
    dist.init_process_group("nccl" if cuda else "gloo", timeout=COLLECTIVE_TIMEOUT)
    return RankGroup()


def build_trainer(
    config: RunConfig,
    store: ObjectStore,
    keys: RunKeys,
    group: RankGroup,
    folder: Path,
    at_most: int,
    enter: Enter,
) -> tuple[Trainer, CheckpointManifest | None]:
    """The trainer at its newest complete checkpoint of a version <= `at_most`, else at version 0; and the manifest.

    folder: scratch, the same for all ranks; `weights-v0` stays in it. Raises StoreError, CheckpointUnusable.
    """
    enter("boot: downloading weights v=0")
    model_folder = folder / "weights-v0"
    if dist.get_rank() == 0:
        weights.download(store, weights.manifest_of(store, keys, 0), model_folder)
    dist.barrier()
    enter("boot: building the DeepSpeed engine")
    trainer = Trainer(config, model_folder, group.control)
    return trainer, _restore(trainer, store, keys, folder / "restore", at_most, enter)


def _restore(
    trainer: Trainer, store: ObjectStore, keys: RunKeys, folder: Path, at_most: int, enter: Enter
) -> CheckpointManifest | None:
    box: list[Any] = [None]
    if dist.get_rank() == 0:
        manifest = checkpoints.newest(store, keys, at_most)
        if manifest is not None:
            enter(f"boot: restoring checkpoint v={manifest.version}")
            checkpoints.download(store, manifest, folder)
            box = [manifest.model_dump_json()]
    # Over the default group, whose timeout has room for the download.
    dist.broadcast_object_list(box, src=0, device=trainer.device)
    if box[0] is None:
        return None
    manifest = CheckpointManifest.model_validate_json(box[0])
    trainer.load(folder, manifest)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    return manifest

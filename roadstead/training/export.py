"""From the engine's parameters to a Hugging Face directory and its digest.

Owns: gathering of parameters, safetensors shards, the digest. Never touches: the store, the optimizer's state.
Invariant: names are those of the model's own checkpoint, dtypes those of the model; of tied parameters one copy.
Every rank walks the same parameters in the same order, because gathering is collective under ZeRO-3.
A crash leaves: a local folder that the next incarnation deletes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch
from safetensors.torch import save_file

from roadstead.storage.objects import canonical_json

_SHARD_BYTES = 4 << 30
"""Below the 5 GiB that S3 takes in one PutObject."""
_SAFETENSORS_NAME = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
}


def export(module: Any, rank: int, folder: Path | None) -> str | None:
    """Digest of the weights, and on rank 0 with `folder`: the files in it. Collective. None on other ranks.

    The digest is `storage.weights.tensors_digest` of those files, made without them: a replay writes none.
    One shard is in host memory at a time.
    """
    hasher = hashlib.sha256()
    writer = _ShardWriter(folder, module) if folder is not None and rank == 0 else None
    for name, tensor in _full_parameters(module):
        if rank != 0:
            continue
        body = _bytes(tensor)
        hasher.update(canonical_json([name, _SAFETENSORS_NAME[tensor.dtype], list(tensor.shape), len(body)]))
        hasher.update(body)
        if writer is not None:
            writer.add(name, tensor)
    if writer is not None:
        writer.close()
    return hasher.hexdigest() if rank == 0 else None


def _full_parameters(module: Any) -> Iterator[tuple[str, Any]]:
    """Name and whole tensor on the host, by name; the tied duplicate is left out by named_parameters."""
    for name, parameter in sorted(module.named_parameters()):
        if hasattr(parameter, "ds_id"):  # partitioned by ZeRO-3: one at a time, at a step boundary
            with deepspeed.zero.GatheredParameters([parameter]):
                yield name, parameter.detach().cpu().clone().contiguous()
        else:
            yield name, parameter.detach().cpu().contiguous()


def _elements(parameter: Any) -> int:
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _bytes(tensor: Any) -> Any:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


class _ShardWriter:
    def __init__(self, folder: Path, module: Any) -> None:
        self._folder = folder
        self._shards: list[list[str]] = [[]]
        size = 0
        for name, parameter in sorted(module.named_parameters()):
            more = _elements(parameter) * parameter.element_size()
            if self._shards[-1] and size + more > _SHARD_BYTES:
                self._shards.append([])
                size = 0
            self._shards[-1].append(name)
            size += more
        self._done: dict[str, str] = {}
        self._open: dict[str, Any] = {}
        self._bytes = 0
        folder.mkdir(parents=True)

    def add(self, name: str, tensor: Any) -> None:
        self._open[name] = tensor
        self._bytes += tensor.numel() * tensor.element_size()
        shard = next(i for i, names in enumerate(self._shards) if name in names)
        if name == self._shards[shard][-1]:
            count = len(self._shards)
            file = "model.safetensors" if count == 1 else f"model-{shard + 1:05d}-of-{count:05d}.safetensors"
            save_file(self._open, self._folder / file, metadata={"format": "pt"})
            self._done |= dict.fromkeys(self._open, file)
            self._open = {}

    def close(self) -> None:
        if len(self._shards) > 1:
            index = {"metadata": {"total_size": self._bytes}, "weight_map": self._done}
            (self._folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True))

"""Checkpoints of the trainer's state (optimizer moments, masters, RNG): DeepSpeed's files plus a marker.

Owns: `checkpoints/v=.../`. Never touches: what the files mean.
Invariant: a checkpoint exists when `_COMPLETE.json` does; it names every file with its sha256. DeepSpeed's own
`latest` is never trusted: it is written before the other ranks' shards (measured), and flipped bits load silently.
A crash leaves: files without a marker, which nobody reads and the next save of that version writes again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from roadstead.storage.batches import Frozen
from roadstead.storage.keys import RunKeys
from roadstead.storage.objects import ObjectCorrupt, ObjectStore, canonical_json, sha256_file


class CheckpointFile(Frozen):
    name: str
    """Path inside the checkpoint's folder."""
    key: str
    sha256: str


class CheckpointManifest(Frozen):
    format: Literal[1] = 1
    version: int
    """Policy version: the state after `version` steps."""
    weights_digest: str
    world_size: int
    settings: dict[str, Any]
    """Whatever changes bits: ZeRO stage, dtype, threads, library versions."""
    files: tuple[CheckpointFile, ...]


def upload(store: ObjectStore, keys: RunKeys, version: int, folder: Path) -> tuple[CheckpointFile, ...]:
    """Upload the files of one rank or of all; the marker is `complete`'s business."""
    files = []
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        name, digest = path.relative_to(folder).as_posix(), sha256_file(path)
        key = f"{keys.checkpoint_folder(version)}/{digest[:16]}/{name}"
        store.put_file_once(key, path, digest)
        files.append(CheckpointFile(name=name, key=key, sha256=digest))
    return tuple(files)


def complete(store: ObjectStore, keys: RunKeys, manifest: CheckpointManifest) -> CheckpointManifest:
    """Mark a checkpoint complete. The first marker of a version stays."""
    key = keys.checkpoint_manifest(manifest.version)
    store.create(key, canonical_json(manifest.model_dump(mode="json")))
    return read(store, keys, manifest.version)


def read(store: ObjectStore, keys: RunKeys, version: int) -> CheckpointManifest:
    key = keys.checkpoint_manifest(version)
    try:
        return CheckpointManifest.model_validate_json(store.get(key))
    except ValidationError as error:
        raise ObjectCorrupt(f"{store.url(key)}: not a checkpoint manifest: {error}") from error


def newest(store: ObjectStore, keys: RunKeys, at_most: int) -> CheckpointManifest | None:
    """The newest complete checkpoint of a version <= `at_most`, or None."""
    for folder in reversed(store.folders(keys.checkpoints)):
        version = int(folder.removeprefix("v="))
        if version <= at_most and store.exists(keys.checkpoint_manifest(version)):
            return read(store, keys, version)
    return None


def download(store: ObjectStore, manifest: CheckpointManifest, folder: Path) -> None:
    """Fetch every file, sha256 checked. Raises ObjectMissing, ObjectCorrupt."""
    for file in manifest.files:
        store.get_file(file.key, folder / file.name, file.sha256)

"""Policy weights as immutable, complete Hugging Face directories.

Owns: `weights/v=.../` and the hint `weights/LATEST`. Never touches: engines, the trainer's state.
Invariant: a version exists when its `manifest.json` does; the manifest names every file with its sha256, and the
files were there before it. Files carry their digest in the key, so that a repeated export whose bits differ
(GPU kernels) leaves an orphan instead of a conflict; the first manifest decides.
A crash leaves: orphan files without a manifest, or a manifest that LATEST does not name yet. Both are harmless:
readers look for manifests of higher versions as well as at the hint.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from roadstead.storage.batches import Frozen
from roadstead.storage.keys import RunKeys
from roadstead.storage.objects import (
    ObjectConflict,
    ObjectCorrupt,
    ObjectMissing,
    ObjectStore,
    canonical_json,
    sha256_file,
)

_SKIP = {".gitattributes", "README.md"}
_SUFFIXES = {".json", ".safetensors", ".model", ".txt", ".jinja"}


class WeightFile(Frozen):
    name: str
    """File name inside the Hugging Face directory."""
    key: str
    bytes: int
    sha256: str


class WeightsRef(Frozen):
    """What an exporter uploaded, before anybody published it."""

    version: int
    digest: str
    """sha256 over names, dtypes, shapes and bytes of all tensors."""
    files: tuple[WeightFile, ...]


class WeightsManifest(Frozen):
    """Content of `manifest.json`: a complete directory and where it came from."""

    format: Literal[1] = 1
    run_id: str
    version: int
    digest: str
    files: tuple[WeightFile, ...]
    parent_digest: str | None
    """Weights digest of version - 1; null at version 0."""
    batch_digest: str | None
    """Canonical digest of the batch whose training made this version; null at version 0."""


def upload_file(store: ObjectStore, keys: RunKeys, version: int, path: Path) -> WeightFile:
    """Upload one file of a version under a key that carries its digest."""
    digest = sha256_file(path)
    key = f"{keys.weights_folder(version)}/{path.stem}-{digest[:16]}{path.suffix}"
    store.put_file_once(key, path, digest)
    return WeightFile(name=path.name, key=key, bytes=path.stat().st_size, sha256=digest)


def upload_model(store: ObjectStore, keys: RunKeys, folder: Path) -> WeightsRef:
    """Upload a local Hugging Face directory as version 0."""
    files = sorted(p for p in folder.iterdir() if p.is_file() and p.suffix in _SUFFIXES and p.name not in _SKIP)
    return WeightsRef(
        version=0,
        digest=tensors_digest(folder),
        files=tuple(upload_file(store, keys, 0, path) for path in files),
    )


def publish(
    store: ObjectStore,
    keys: RunKeys,
    ref: WeightsRef,
    *,
    parent: WeightsManifest | None,
    batch_digest: str | None,
) -> WeightsManifest:
    """Write the manifest, then the hint. Files that `ref` lacks (tokenizer, config) are the parent's.

    Raises ObjectConflict when the version was published with another digest.
    """
    own = {f.name for f in ref.files}
    inherited = tuple(f for f in (parent.files if parent else ()) if f.name not in own and not _is_weights(f.name))
    manifest = WeightsManifest(
        run_id=keys.run_id,
        version=ref.version,
        digest=ref.digest,
        files=tuple(sorted(ref.files + inherited, key=lambda f: f.name)),
        parent_digest=parent.digest if parent else None,
        batch_digest=batch_digest,
    )
    store.create(keys.weights_manifest(ref.version), canonical_json(manifest.model_dump(mode="json")))
    there = manifest_of(store, keys, ref.version)
    if (there.digest, there.batch_digest) != (manifest.digest, manifest.batch_digest):
        raise ObjectConflict(
            f"{store.url(keys.weights_manifest(ref.version))}: version {ref.version} is published with digest "
            f"{there.digest} from batch {there.batch_digest}; refused {manifest.digest} from {batch_digest}"
        )
    store.put_hint(keys.latest_weights, canonical_json({"version": ref.version}))
    return there


def manifest_of(store: ObjectStore, keys: RunKeys, version: int) -> WeightsManifest:
    """Raises ObjectMissing when the version is not published, ObjectCorrupt when its manifest is damaged."""
    key = keys.weights_manifest(version)
    try:
        return WeightsManifest.model_validate_json(store.get(key))
    except ValidationError as error:
        raise ObjectCorrupt(f"{store.url(key)}: not a weights manifest: {error}") from error


def latest_version(store: ObjectStore, keys: RunKeys) -> int | None:
    """Newest published version: the hint, then whatever was published after it. None: nothing is."""
    body = store.find(keys.latest_weights)
    version = json.loads(body)["version"] if body else -1
    while store.exists(keys.weights_manifest(version + 1)):
        version += 1
    return version if version >= 0 else None


def download(store: ObjectStore, manifest: WeightsManifest, folder: Path) -> Path:
    """Materialize a version as `folder`, which appears whole or not at all. Every file's sha256 is checked."""
    if (folder / "manifest.json").exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        for file in manifest.files:
            store.get_file(file.key, part / file.name, file.sha256)
        (part / "manifest.json").write_bytes(canonical_json(manifest.model_dump(mode="json")))
        shutil.rmtree(folder, ignore_errors=True)
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return folder


def tensors_digest(folder: Path) -> str:
    """sha256 over all tensors of a folder's safetensors files: name, dtype, shape, bytes, in name order.

    Read from the files' own headers, so it needs no tensor library and does not depend on how they are sharded.
    """
    places: dict[str, tuple[str, list[int], Path, int, int]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
        for name, entry in header.items():
            if name != "__metadata__":
                start, end = entry["data_offsets"]
                places[name] = (entry["dtype"], entry["shape"], path, 8 + size + start, end - start)
    if not places:
        raise ObjectMissing(f"{folder}: no tensors in *.safetensors; it is not a model directory")
    hasher = hashlib.sha256()
    for name, (dtype, shape, path, offset, size) in sorted(places.items()):
        hasher.update(canonical_json([name, dtype, shape, size]))
        with path.open("rb") as file:
            file.seek(offset)
            while size:
                chunk = file.read(min(size, 1 << 22))
                hasher.update(chunk)
                size -= len(chunk)
    return hasher.hexdigest()


def _is_weights(name: str) -> bool:
    return name.endswith(".safetensors") or name.endswith(".safetensors.index.json")

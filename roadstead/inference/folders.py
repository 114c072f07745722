"""Versions of the weights on the engine's own disk.

Owns: the names of their folders and the removal of old ones. Never touches: the content of a folder; S3.
Invariant: the newest two versions are never removed, nor the one that is served: of two one may be loading.
A crash leaves: old folders, removed after the next update.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

_KEPT = 2
_NAME = re.compile(r"^\.?v=(\d{8})")
"""A version, or (hidden) the part of a download that a crash left."""


def version_folder(folder: Path, version: int) -> Path:
    return folder / f"v={version:08d}"


def remove_old(folder: Path, served: int) -> list[int]:
    """Remove all versions but the newest two and `served`. Returns those removed."""
    found = [(int(match[1]), path) for path in folder.iterdir() if (match := _NAME.match(path.name))]
    kept = sorted({version for version, _ in found})[-_KEPT:]
    old = [(version, path) for version, path in found if version < kept[0] and version != served]
    for _, path in old:
        shutil.rmtree(path)
    return sorted({version for version, _ in old})

"""Where a run keeps things on one machine. Everything here can be lost: S3 and Temporal have the truth."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path


def engine_folder(folder: Path) -> Path:
    """Downloaded versions of the weights, two at a time."""
    return folder / "engine"


def trainer_folder(folder: Path) -> Path:
    """The trainer's scratch."""
    return folder / "trainer"


def trainer_socket(folder: Path) -> Path:
    """The trainer's command socket. Unix socket paths end at 107 bytes, so it can't lie in a deep data directory."""
    place = Path(tempfile.gettempdir()) / f"roadstead-{os.getuid()}"
    place.mkdir(mode=0o700, exist_ok=True)
    return place / f"{hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]}.sock"

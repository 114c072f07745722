"""The folder's lock."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from roadstead.training import folder_lock


def test_a_folder_has_one_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_lock, "_LOCK_WAIT_S", 0.2)
    held = folder_lock.lock_folder(tmp_path / "scratch")
    with pytest.raises(folder_lock.FolderTaken, match=f"locked by process {os.getpid()}"):
        folder_lock.lock_folder(tmp_path / "scratch")
    held.close()
    folder_lock.lock_folder(tmp_path / "scratch").close()

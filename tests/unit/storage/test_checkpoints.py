"""Which checkpoint is taken over, and which never."""

from __future__ import annotations

from pathlib import Path

import pytest

from roadstead.storage import checkpoints
from roadstead.storage.checkpoints import CheckpointManifest
from roadstead.storage.keys import RunKeys
from roadstead.storage.objects import ObjectCorrupt, ObjectMissing
from tests.support.memory_store import MemoryStore

KEYS = RunKeys("runs", "r")


def save(store: MemoryStore, version: int, folder: Path) -> CheckpointManifest:
    folder.mkdir()
    (folder / "state.pt").write_bytes(b"moments of %d" % version)
    return checkpoints.complete(
        store,
        KEYS,
        CheckpointManifest(
            version=version,
            weights_digest=f"w{version}",
            world_size=1,
            settings={},
            files=checkpoints.upload(store, KEYS, version, folder),
        ),
    )


def test_the_newest_complete_one_is_taken_and_a_newer_one_without_marker_is_not(tmp_path: Path) -> None:
    store = MemoryStore()
    save(store, 2, tmp_path / "2")
    kept = save(store, 4, tmp_path / "4")
    (tmp_path / "6").mkdir()
    (tmp_path / "6" / "state.pt").write_bytes(b"half")
    checkpoints.upload(store, KEYS, 6, tmp_path / "6")
    assert checkpoints.newest(store, KEYS, 99) == kept
    older = checkpoints.newest(store, KEYS, 3)
    assert older is not None and older.version == 2
    checkpoints.download(store, kept, tmp_path / "out")
    assert (tmp_path / "out" / "state.pt").read_bytes() == b"moments of 4"


@pytest.mark.parametrize("damage", ["truncated", "flipped", "gone"])
def test_a_damaged_one_is_refused_and_not_trained_from_scratch(tmp_path: Path, damage: str) -> None:
    store = MemoryStore()
    manifest = save(store, 2, tmp_path / "2")
    key = manifest.files[0].key
    body = store.objects.pop(key)
    if damage != "gone":
        store.objects[key] = body[:-1] if damage == "truncated" else body[:-1] + b"x"
    with pytest.raises(ObjectMissing if damage == "gone" else ObjectCorrupt, match=r"state\.pt"):
        checkpoints.download(store, manifest, tmp_path / "out")

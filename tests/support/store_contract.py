"""What any object store of ours must do. Subclasses give a `store` fixture."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from roadstead.storage.objects import (
    ObjectConflict,
    ObjectCorrupt,
    ObjectMissing,
    ObjectStore,
    Put,
    sha256,
    sha256_file,
)


class StoreContract:
    @pytest.fixture
    def key(self) -> str:
        return f"contract/{uuid.uuid4().hex}/object"

    def test_created_once_and_the_same_again_is_success(self, store: ObjectStore, key: str) -> None:
        assert store.put_once(key, b"one") is Put.CREATED
        assert store.put_once(key, b"one") is Put.ALREADY
        assert store.get(key, sha256(b"one")) == b"one"

    def test_other_bytes_are_a_conflict_that_names_both_and_changes_nothing(self, store: ObjectStore, key: str) -> None:
        store.put_once(key, b"one")
        with pytest.raises(ObjectConflict) as error:
            store.put_once(key, b"two")
        assert sha256(b"one") in str(error.value) and sha256(b"two") in str(error.value)
        assert store.get(key) == b"one"

    def test_create_leaves_what_is_there(self, store: ObjectStore, key: str) -> None:
        assert store.create(key, b"one") is Put.CREATED
        assert store.create(key, b"two") is Put.ALREADY
        assert store.get(key) == b"one"

    def test_missing_is_missing(self, store: ObjectStore, key: str) -> None:
        assert store.find(key) is None and not store.exists(key)
        with pytest.raises(ObjectMissing):
            store.get(key)

    def test_a_wrong_digest_is_found_on_reading(self, store: ObjectStore, key: str) -> None:
        store.put_once(key, b"one")
        with pytest.raises(ObjectCorrupt):
            store.get(key, sha256(b"two"))

    def test_files_arrive_whole_or_not_at_all(self, store: ObjectStore, key: str, tmp_path: Path) -> None:
        source, target = tmp_path / "source", tmp_path / "deep" / "target"
        source.write_bytes(bytes(range(256)) * 9000)
        digest = sha256_file(source)
        assert store.put_file_once(key, source, digest) is Put.CREATED
        assert store.put_file_once(key, source, digest) is Put.ALREADY
        store.get_file(key, target, digest)
        assert target.read_bytes() == source.read_bytes()
        with pytest.raises(ObjectCorrupt):
            store.get_file(key, tmp_path / "other", "0" * 64)
        assert sorted(p.name for p in tmp_path.iterdir()) == ["deep", "source"]

    def test_another_file_is_a_conflict(self, store: ObjectStore, key: str, tmp_path: Path) -> None:
        for name in ("one", "two"):
            (tmp_path / name).write_bytes(name.encode())
        store.put_file_once(key, tmp_path / "one", sha256_file(tmp_path / "one"))
        with pytest.raises(ObjectConflict):
            store.put_file_once(key, tmp_path / "two", sha256_file(tmp_path / "two"))

    def test_hints_can_change_and_listings_see_everything(self, store: ObjectStore, key: str) -> None:
        folder = key.rsplit("/", 1)[0] + "/"
        store.put_hint(key, b"1")
        store.put_hint(key, b"2")
        store.put_once(folder + "v=1/x", b"x")
        assert store.get(key) == b"2"
        assert list(store.keys(folder)) == [key, folder + "v=1/x"]
        assert store.folders(folder) == ["v=1"]

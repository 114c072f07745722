"""An object store in a dictionary, for property tests that need thousands of operations.

The contract that it shares with the real store is tested on both: tests/unit/storage/test_contract.py on this one,
tests/integration/test_storage.py on SeaweedFS.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO

from roadstead.storage.objects import ObjectMissing, ObjectStore, StoreAddress


class Crash(BaseException):
    """The process died here. Not an Exception, so that nothing handles it by accident."""


class MemoryStore(ObjectStore):
    """`crash_before`: number of the mutation (from 0) before which the process dies; None for never."""

    def __init__(self) -> None:
        self.address = StoreAddress(bucket="memory")
        self.objects: dict[str, bytes] = {}
        self.crash_before: int | None = None
        self.mutations: list[str] = []

    def _mutate(self, key: str) -> None:
        if self.crash_before is not None and len(self.mutations) >= self.crash_before:
            raise Crash(key)
        self.mutations.append(key)

    def _create(self, key: str, body: bytes | IO[bytes], digest: str | None = None) -> bool:
        if key in self.objects:
            return False
        self._mutate(key)
        self.objects[key] = body if isinstance(body, bytes) else body.read()
        return True

    def put_hint(self, key: str, body: bytes) -> None:
        self._mutate(key)
        self.objects[key] = body

    def _chunks(self, key: str) -> Iterator[bytes]:
        if key not in self.objects:
            raise ObjectMissing(f"{key}: no such object")
        yield self.objects[key]

    def exists(self, key: str) -> bool:
        return key in self.objects

    def keys(self, prefix: str) -> Iterator[str]:
        return iter(sorted(key for key in self.objects if key.startswith(prefix)))

    def folders(self, prefix: str) -> list[str]:
        return sorted({key[len(prefix) :].split("/")[0] for key in self.keys(prefix) if "/" in key[len(prefix) :]})

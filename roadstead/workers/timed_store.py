"""A store that says how long it took.

Owns: the seconds of its reads and writes. Never touches: what is stored.
Invariant: a read of what this process has just written is a verification, and is counted as one, once.
A crash leaves: nothing.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from roadstead.metrics import catalogue
from roadstead.metrics.registry import Metrics
from roadstead.storage.objects import ObjectStore, Put, StoreAddress


class TimedStore(ObjectStore):
    """For persist_batch, which writes each file and reads it back."""

    def __init__(self, address: StoreAddress, metrics: Metrics) -> None:
        super().__init__(address)
        self._metrics = metrics
        self._written: set[str] = set()
        """Keys that were not read back yet: a few, while a batch is being written."""

    def create(self, key: str, body: bytes) -> Put:
        with self._timed("write"):
            put = super().create(key, body)
        self._written.add(key)
        return put

    def get(self, key: str, digest: str | None = None) -> bytes:
        verifies = key in self._written
        self._written.discard(key)
        with self._timed("verify" if verifies else "read"):
            return super().get(key, digest)

    @contextlib.contextmanager
    def _timed(self, operation: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self._metrics.observe(catalogue.STORE_SECONDS, time.monotonic() - began, operation=operation)

"""The in-memory store keeps the contract that the property tests rely on."""

from __future__ import annotations

import pytest

from tests.support.memory_store import MemoryStore
from tests.support.store_contract import StoreContract


class TestMemoryStore(StoreContract):
    @pytest.fixture
    def store(self) -> MemoryStore:
        return MemoryStore()

"""The in-memory engine as a `Stand` of the conformance suite."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from roadstead.inference.folders import version_folder
from roadstead.staleness import VersionSpan, versions_of_spans
from tests.support.fake_engine import FakeEngine, FakeServer, make_version, next_kv, table

_WEIGHTS = "model.safetensors"


class FakeStand:
    def __init__(self, root: Path, engine: type[FakeEngine] = FakeEngine) -> None:
        self._root, self._version, self._engine = root, 0, engine
        self.server = FakeServer(make_version(root, 0))
        self.engine = self.client()

    def client(self, **options: Any) -> FakeEngine:
        return self._engine(self.server, **{k: v for k, v in options.items() if v is not None})

    def new_version(self) -> tuple[int, Path]:
        self._version += 1
        return self._version, make_version(self._root, self._version)

    def damage(self, folder: Path) -> None:
        file = folder / _WEIGHTS
        body = file.read_bytes()
        file.write_bytes(bytes([body[0] ^ 1]) + body[1:])

    def reference(
        self,
        prompt: Sequence[int],
        response: Sequence[int],
        temperature: float,
        spans: Sequence[VersionSpan],
        kv_spans: Sequence[VersionSpan] | None,
    ) -> list[float]:
        sampled = versions_of_spans(spans)
        if kv_spans is not None:
            writers = [sampled[0]] * len(prompt) + versions_of_spans(kv_spans)
            chain = self._chain([*prompt, *response], writers)
            chains = dict.fromkeys(sampled, chain)
        else:
            tokens = [*prompt, *response]
            chains = {version: self._chain(tokens, [version] * len(tokens)) for version in set(sampled)}
        return [
            table(self._weights(version), chains[version][len(prompt) + i], temperature)[token]
            for i, (version, token) in enumerate(zip(sampled, response, strict=True))
        ]

    def _chain(self, tokens: Sequence[int], writers: Sequence[int]) -> list[str]:
        """KV before each token."""
        chain = [""]
        for token, version in zip(tokens, writers, strict=True):
            chain.append(next_kv(self._weights(version), chain[-1], token))
        return chain

    @cache  # noqa: B019 - as long-lived as a test
    def _weights(self, version: int) -> str:
        return (version_folder(self._root, version) / _WEIGHTS).read_text()

    async def running(self) -> int:
        return len(self.server.running)

    async def pause(self) -> None:
        self.server.paused = True

    async def break_off(self) -> None:
        self.server.loading = True

    def ignore_loads(self, ignore: bool) -> None:
        self.server.ignores_loads = ignore

    def hang(self, hang: bool) -> None:
        self.server.hung = hang

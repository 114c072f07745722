"""What the checks read and what they write.

Owns: the reader of one run's objects, the verdict. Never touches: what counts as right.
Invariant: a violation is a sentence with the key it was found at.
"""

from __future__ import annotations

import io
import json
from dataclasses import dataclass, field
from typing import Any, Protocol

import pyarrow.parquet as pq


class Reader(Protocol):
    """One run's objects; keys are relative to the run."""

    def get(self, key: str) -> bytes: ...

    def list(self, prefix: str) -> list[str]: ...


@dataclass
class Verdict:
    violations: list[str] = field(default_factory=list)
    attempts: int = 0
    batches: int = 0
    groups: int = 0
    """In a terminal state."""
    terminal: dict[str, int] = field(default_factory=dict)
    evaluations: int = 0
    """On record."""
    max_staleness: int = 0
    trained_tokens: int = 0
    staged_tokens: int = 0
    """Of all staged groups, trained or not."""
    reserved: list[float] = field(default_factory=list)
    """Unix seconds at which each group on record was admitted."""

    def wrong(self, text: str) -> None:
        self.violations.append(text)


class S3Reader:
    def __init__(self, client: Any, bucket: str, root: str) -> None:
        self._client, self._bucket, self._root = client, bucket, root

    def get(self, key: str) -> bytes:
        body: bytes = self._client.get_object(Bucket=self._bucket, Key=f"{self._root}/{key}")["Body"].read()
        return body

    def list(self, prefix: str) -> list[str]:
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self._bucket, Prefix=f"{self._root}/{prefix}"
        )
        return sorted(x["Key"].removeprefix(f"{self._root}/") for page in pages for x in page.get("Contents", []))


def rows_of(run: Reader, key: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pq.read_table(io.BytesIO(run.get(key))).to_pylist()
    return found


def read_json(run: Reader, key: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(run.get(key))
    return value


def relative(key: str) -> str:
    """Records name full keys: <prefix>/<run>/rest."""
    return key.split("/", 2)[2]

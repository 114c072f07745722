"""The prompt dataset and the order in which it is served.

Owns: reading a JSONL or Parquet file, its fingerprint, and the map from a cursor position to a row.
Never touches: the cursor itself (the run workflow is its only writer), tokenization.
Invariant: position p is row `order(epoch)[p % rows]` of epoch `p // rows`; within an epoch no row comes twice.
The order is defined by sha256, not by a random generator, so no library version can change it.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq


class DatasetError(ValueError):
    """The prompt file can't be used; the text names file, row and remedy."""


class PromptSet:
    """All prompts of a run, in file order."""

    def __init__(self, rows: list[dict[str, Any]], source: str) -> None:
        if not rows:
            raise DatasetError(f"{source}: no rows; put at least one prompt in it")
        seen: dict[str, int] = {}
        for i, row in enumerate(rows):
            if not isinstance(row.get("prompt"), str) or not row["prompt"]:
                raise DatasetError(f"{source}: row {i} has no text under `prompt` (got {row.get('prompt')!r})")
            row.setdefault("prompt_id", f"p{i}")
            other = seen.setdefault(str(row["prompt_id"]), i)
            if other != i:
                raise DatasetError(f"{source}: rows {other} and {i} share prompt_id {row['prompt_id']!r}")
        self.rows: Sequence[Mapping[str, Any]] = rows
        """In file order."""
        self.digest = _fingerprint(rows)
        """sha256 over the rows in file order: another order is another dataset."""

    def __len__(self) -> int:
        return len(self.rows)

    def at(self, position: int, seed: int) -> Mapping[str, Any]:
        """The row served at cursor `position` (0-based, over all epochs)."""
        epoch, index = divmod(position, len(self.rows))
        return self.rows[_order(len(self.rows), seed, epoch)[index]]


def load_prompts(path: Path, key: str = "data.prompts") -> PromptSet:
    """Read a `.jsonl` or `.parquet` file. key: of the configuration that names it. Raises DatasetError."""
    try:
        if path.suffix == ".parquet":
            rows = pq.read_table(path).to_pylist()
        elif path.suffix == ".jsonl":
            rows = []
            for number, line in enumerate(path.read_text().splitlines(), start=1):
                if line.strip():
                    row = json.loads(line)
                    if not isinstance(row, dict):
                        raise DatasetError(f"{path}:{number}: expected an object, got {type(row).__name__}")
                    rows.append(row)
        else:
            raise DatasetError(f"{key}: {path} is neither .jsonl nor .parquet; convert it")
    except OSError as error:
        raise DatasetError(f"{key}: {path} can't be read ({error.strerror or error})") from error
    except json.JSONDecodeError as error:
        raise DatasetError(f"{path}:{number}: not JSON: {error}") from error
    return PromptSet(rows, str(path))


def _fingerprint(rows: list[dict[str, Any]]) -> str:
    hasher = hashlib.sha256()
    for row in rows:
        hasher.update(json.dumps(row, sort_keys=True, default=str).encode() + b"\n")
    return hasher.hexdigest()


@functools.lru_cache(maxsize=4)
def _order(rows: int, seed: int, epoch: int) -> list[int]:
    return sorted(range(rows), key=lambda i: hashlib.sha256(f"{seed}/{epoch}/{i}".encode()).digest())

"""Points in the files that W&B writes offline, which it has no reader for.

Owns: reading `run-*.wandb`: a log in LevelDB's format (github.com/google/leveldb, doc/log_format.md) of protobuf
`Record`s, behind seven bytes of W&B's own. Never touches: the files; nothing is written.
Invariant: what is returned was written whole; a torn end is passed over.
A crash leaves: nothing.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_MAGIC = b":W&B"
_HEAD, _BLOCK = 7, 32768
_FULL, _LAST = 1, 4
"""Kinds of a fragment: a whole record, or the last part of one; 2 and 3 are the parts before it."""


def points(folder: Path, run: str) -> Iterator[dict[str, Any]]:
    """Every point logged to the run in `folder`, by metric, older files first. Raises ValueError for another format."""
    from wandb.proto.wandb_internal_pb2 import Record

    for file in sorted(folder.glob(f"wandb/*run-*-{run}/run-{run}.wandb")):
        for body in _records(file):
            record = Record()
            record.ParseFromString(body)
            if record.HasField("history"):
                yield {
                    (item.key or ".".join(item.nested_key)): json.loads(item.value_json) for item in record.history.item
                }


def _records(file: Path) -> Iterator[bytes]:
    data = file.read_bytes()
    if not _MAGIC.startswith(data[: len(_MAGIC)]):
        raise ValueError(f"{file}: does not begin with {_MAGIC!r}: not a file of a W&B release that is known here")
    at, begun = _HEAD, b""
    while at + _HEAD <= len(data):
        if (left := _BLOCK - at % _BLOCK) < _HEAD:
            at += left  # a block's end too short for a header is padding
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        at += _HEAD
        if kind == 0 or at + length > len(data):
            return
        begun += data[at : at + length]
        at += length
        if kind in (_FULL, _LAST):
            yield begun
            begun = b""

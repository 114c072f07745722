"""The canonical digest of a table: what was stored, whoever encoded it.

Owns: the byte form below. Never touches: files, the store.
Invariant: the digest depends on column names, types, values, nulls and row order only; not on the Parquet
encoder, library version, compression, row groups, chunks, slices or dictionary encoding.

Byte form, little-endian throughout:
    "roadstead-table-1\\n", row count u64, column count u64, then each column in order:
    name (u64 length + UTF-8), type (u64 length + text), array
    array   = one validity byte a value (1 present, 0 null), then by type
      fixed   raw values, nulls as zero bytes; booleans one byte each; timestamps their int64 count
      string  u64 byte length a value (0 for null), then all bytes
      list    u64 length a value (0 for null), then the array of all items of present lists
      struct  the array of each field in order; map = list of struct(key, value)
NaN payloads and -0.0 are kept: two floats that differ in bits differ in digest.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

_MAGIC = b"roadstead-table-1\n"


def table_digest(table: pa.Table) -> str:
    """sha256, as 64 hex digits, over the canonical byte form of `table`."""
    hasher = hashlib.sha256(_MAGIC)
    hasher.update(_u64(table.num_rows) + _u64(table.num_columns))
    for name in table.column_names:
        column = table.column(name)
        array = column.combine_chunks()
        if isinstance(array, pa.ChunkedArray):  # zero chunks
            array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], type=column.type)
        if pa.types.is_dictionary(array.type):
            array = array.dictionary_decode()
        _text(hasher, name)
        _text(hasher, type_name(array.type))
        _array(hasher, array)
    return hasher.hexdigest()


def type_name(kind: pa.DataType) -> str:
    """The digest's own name of a type; large and small variants are one."""
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return "string"
    if pa.types.is_map(kind):
        return f"map<{type_name(kind.key_type)},{type_name(kind.item_type)}>"
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return f"list<{type_name(kind.value_type)}>"
    if pa.types.is_struct(kind):
        return "struct<" + ",".join(f"{f.name}:{type_name(f.type)}" for f in kind) + ">"
    if pa.types.is_timestamp(kind):
        return f"timestamp[{kind.unit},{kind.tz}]"
    if pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return str(kind)
    raise TypeError(f"no canonical form for Arrow type {kind}")


def _u64(value: int) -> bytes:
    return value.to_bytes(8, "little")


def _text(hasher: Any, text: str) -> None:
    body = text.encode()
    hasher.update(_u64(len(body)) + body)


def _array(hasher: Any, array: pa.Array) -> None:
    kind = array.type
    hasher.update(np.ascontiguousarray(array.is_valid().to_numpy(zero_copy_only=False).astype(np.uint8)).data)
    if pa.types.is_struct(kind):
        for field in array.flatten():  # flatten() carries the parent's nulls into the fields
            _array(hasher, field)
    elif pa.types.is_map(kind):
        hasher.update(_lengths(array))
        _array(hasher, _concat(array.keys, array))
        _array(hasher, _concat(array.items, array))
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        hasher.update(_lengths(array))
        _array(hasher, array.flatten())  # skips null lists and honours slices
    elif pa.types.is_string(kind) or pa.types.is_large_string(kind):
        body = pc.fill_null(array.cast(pa.large_binary()), b"")
        hasher.update(np.asarray(pc.binary_length(body), dtype="<u8").data)
        offsets = np.frombuffer(body.buffers()[1], dtype="<i8")[body.offset : body.offset + len(body) + 1]
        if len(body):
            hasher.update(memoryview(body.buffers()[2] or b"")[offsets[0] : offsets[-1]])
    else:
        if pa.types.is_timestamp(kind):
            array = array.cast(pa.int64())
        elif pa.types.is_boolean(kind):
            array = array.cast(pa.uint8())
        if array.null_count:
            array = pc.fill_null(array, pa.scalar(0, type=array.type))
        values = array.to_numpy(zero_copy_only=False)
        hasher.update(np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<")).data)


def _lengths(array: pa.Array) -> Any:
    offsets = array.offsets.to_numpy(zero_copy_only=False).astype("<u8")
    lengths = np.diff(offsets)
    lengths[~array.is_valid().to_numpy(zero_copy_only=False)] = 0
    return np.ascontiguousarray(lengths).data


def _concat(values: pa.Array, parent: pa.Array) -> pa.Array:
    """Map children of the present entries only: `keys`/`items` ignore a slice's bounds and null entries."""
    offsets = parent.offsets.to_pylist()
    valid = parent.is_valid().to_pylist()
    if all(valid):
        return values.slice(offsets[0], offsets[-1] - offsets[0]) if offsets else values.slice(0, 0)
    pieces = [values.slice(a, b - a) for a, b, ok in zip(offsets, offsets[1:], valid, strict=False) if ok]
    return pa.concat_arrays(pieces) if pieces else values.slice(0, 0)

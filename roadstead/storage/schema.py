"""The batch schema: one row a trajectory, versioned.

Owns: column names, types, units, nullability, and the check that refuses a malformed table whole.
Never touches: the store, the encoder's options.
Invariant: per-token lists of a row have equal lengths and the version spans cover exactly the response tokens.

The same schema serves a staged group and a trained batch. What is only known when a batch is assembled (step,
slot, staleness, advantage, occupied_at) is null in a staged group and never null in a batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from roadstead.staleness import VersionSpan, check_cover

SCHEMA_VERSION = 1

_SPANS = pa.list_(
    pa.struct([("version", pa.int64()), ("start", pa.int32()), ("end", pa.int32())])
)  # half-open [start, end) over response tokens
_TURNS = pa.list_(pa.struct([("role", pa.string()), ("start", pa.int32()), ("end", pa.int32())]))
_SAMPLING = pa.struct(
    [
        ("temperature", pa.float64()),
        ("top_p", pa.float64()),
        ("top_k", pa.int32()),  # -1: off
        ("max_tokens", pa.int32()),
        ("logprobs_mode", pa.string()),  # processed: after temperature, top-p and top-k
    ]
)
_TIME = pa.timestamp("us", tz="UTC")


def _required(name: str, kind: pa.DataType) -> pa.Field:
    return pa.field(name, kind, nullable=False)


BATCH_ONLY = ("step", "slot", "staleness", "advantage", "occupied_at")

SCHEMA = pa.schema(
    [
        _required("run_id", pa.string()),
        _required("attempt", pa.int32()),  # of the run, when the group was generated
        pa.field("step", pa.int64()),  # the buffer: trains version step -> step + 1
        pa.field("slot", pa.int32()),  # index in the buffer
        _required("group_id", pa.string()),
        _required("member", pa.int32()),  # 0 .. group_size - 1
        _required("prompt_id", pa.string()),
        _required("prompt_text", pa.string()),
        _required("prompt_token_ids", pa.list_(pa.int32())),
        _required("response_text", pa.string()),
        _required("response_token_ids", pa.list_(pa.int32())),
        _required("loss_mask", pa.list_(pa.bool_())),  # a response token; false: environment token
        _required("behavior_logprobs", pa.list_(pa.float32())),  # nats, after temperature
        _required("version_spans", _SPANS),
        pa.field("kv_version_spans", _SPANS),  # null: every token's KV was made by its own version
        _required("v_traj", pa.int64()),  # oldest version of any token of the GROUP
        _required("head_version", pa.int64()),  # oldest version of this row's loss-masked tokens
        _required("tail_version", pa.int64()),  # newest
        pa.field("staleness", pa.int64()),  # step - head_version
        pa.field("reward", pa.float64()),  # null: the reward failed, the row is excluded from the loss
        pa.field("reward_components", pa.map_(pa.string(), pa.float64())),
        pa.field("advantage", pa.float32()),
        _required("finish_reason", pa.string()),  # stop | length | max_turns | error
        _required("turns", _TURNS),  # over response tokens
        _required("engine_id", pa.string()),
        _required("engine_build", pa.string()),
        _required("sampling", _SAMPLING),
        _required("seed", pa.int64()),
        _required("environment", pa.string()),
        _required("from_live_policy", pa.bool_()),
        _required("reserved_at", _TIME),
        _required("started_at", _TIME),
        _required("finished_at", _TIME),
        pa.field("occupied_at", _TIME),
    ],
    metadata={"roadstead.schema_version": str(SCHEMA_VERSION)},
)

PER_TOKEN = ("response_token_ids", "loss_mask", "behavior_logprobs")
_LONG = {*PER_TOKEN, "prompt_token_ids", "prompt_text", "response_text"}
STATS_COLUMNS = tuple(name for name in SCHEMA.names if name not in _LONG)
"""Columns of the small sibling file that audits read: everything but tokens and texts."""


class SchemaError(ValueError):
    """A table does not fit the schema; the text names the row and the column."""


def table_from_rows(rows: Sequence[Mapping[str, Any]], *, batch: bool) -> pa.Table:
    """Rows (dicts by column name, times in UTC microseconds) to a checked table. Raises SchemaError."""
    for row in rows:
        unknown = set(row) - set(SCHEMA.names)
        if unknown:
            raise SchemaError(f"unknown column(s) {sorted(unknown)}; the schema is version {SCHEMA_VERSION}")
    try:
        table = pa.Table.from_pylist(list(rows), schema=SCHEMA)
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise SchemaError(f"a value does not fit its column: {error}") from error
    check(table, batch=batch)
    return table


def check(table: pa.Table, *, batch: bool) -> None:
    """Raise SchemaError unless every row of `table` is whole. `batch`: the batch-only columns must be filled."""
    if table.schema.names != SCHEMA.names:
        raise SchemaError(f"columns differ from schema version {SCHEMA_VERSION}: {table.schema.names}")
    for field in SCHEMA:
        if table.schema.field(field.name).type != field.type:
            raise SchemaError(f"{field.name}: type {table.schema.field(field.name).type}, expected {field.type}")
        if (not field.nullable or (batch and field.name in BATCH_ONLY)) and table[field.name].null_count:
            raise SchemaError(f"{field.name}: null in {table[field.name].null_count} row(s), not allowed here")
    if table.num_rows == 0:
        raise SchemaError("no rows: there is nothing to train on")
    lengths = {name: pc.list_value_length(table[name]).to_pylist() for name in PER_TOKEN}
    spans = table["version_spans"].to_pylist()
    groups, members = table["group_id"].to_pylist(), table["member"].to_pylist()
    for i in range(table.num_rows):
        row = f"row {i} ({groups[i]} member {members[i]})"
        counts = {name: values[i] for name, values in lengths.items()}
        if len(set(counts.values())) != 1:
            raise SchemaError(f"{row}: per-token lists differ in length: {counts}")
        try:
            check_cover([VersionSpan(**span) for span in spans[i]], counts["response_token_ids"])
        except ValueError as error:
            raise SchemaError(f"{row}: version_spans: {error}") from error
    if batch:
        stale = pc.subtract(table["step"], table["head_version"])
        if not stale.equals(table["staleness"]):
            raise SchemaError("staleness: differs from step - head_version")

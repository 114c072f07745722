"""One batch as a table of scalars a row: all that the checks of symptoms need.

Owns: the columns that checks may ask for. Never touches: the store, judgement.
Invariant: sums over tokens are over the tokens that the loss saw; a row without any has no mean (NaN), not zero.
A crash leaves: nothing, it is pure.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

import numpy as np
import pandas as pd
import pyarrow as pa

from roadstead.storage.audit.tokens import LossTokens, flat, lengths_of

_PLAIN = (
    *("step", "slot", "group_id", "member", "prompt_id", "attempt", "environment", "engine_id", "seed", "v_traj"),
    *("head_version", "tail_version", "staleness", "from_live_policy", "finish_reason", "reward", "advantage"),
)
_TRAINED = ("importance_mean", "importance_max", "capped_share", "kl_to_behavior", "loss")
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class BatchFrames:
    rows: pd.DataFrame
    """A row a trajectory. Beside the batch's scalars: template, tokens, loss_tokens, oldest, newest (versions of loss
    tokens), oldest_at (token index), behavior_sum, text (hash of the response), behavior_bad, trainer_bad (non-finite
    loss tokens), gap, gap_abs (means over loss tokens of behaviour minus trainer), and the trainer's columns."""
    spans: pd.DataFrame
    """A row a (trajectory, version): row (its index in `rows`), version, lag, tokens, gap, gap_abs."""
    positions: pd.DataFrame
    """A row a (trajectory, power of two of the token index): row, bucket, tokens, gap."""


def frames_of(data: pa.Table, train: pa.Table | None) -> BatchFrames:
    rows = data.select(_PLAIN).to_pandas()
    rows["reward"] = pd.to_numeric(rows["reward"])
    rows["reward_missing"] = data["reward"].is_null().to_numpy()
    texts = data["prompt_text"].to_pylist()
    rows["template"] = [_NUMBER.sub("#", text) for text in texts]
    rows["opening"] = [" ".join(text.split()[:3]) for text in texts]
    rows["tokens"] = lengths_of(data, "response_token_ids")
    tokens = LossTokens.of(data, train)
    assert tokens is not None, "verified before"
    count = tokens.count()
    rows["loss_tokens"] = count
    rows["behavior_sum"] = tokens.sum(tokens.behavior)
    rows["behavior_bad"] = tokens.sum(~np.isfinite(tokens.behavior)).astype(int)
    oldest, newest, at = _extremes(tokens, data.num_rows)
    rows["oldest"], rows["newest"], rows["oldest_at"] = oldest, newest, at
    rows["text"] = _hashes(data)
    return BatchFrames(*_gaps(rows, tokens, train))


def _gaps(
    rows: pd.DataFrame, tokens: LossTokens, train: pa.Table | None
) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    if train is None or tokens.gap is None:
        for name in (*_TRAINED, "gap", "gap_abs"):
            rows[name] = np.nan
        rows["trainer_bad"] = 0
        empty = pd.DataFrame({"row": [], "tokens": [], "gap": []})
        return rows, empty.assign(version=[], lag=[], gap_abs=[]), empty.assign(bucket=[])
    for name in _TRAINED:
        rows[name] = train[name].to_numpy()
    good = np.isfinite(tokens.gap)
    own = tokens.sum(~good & np.isfinite(tokens.behavior))
    rows["trainer_bad"] = own.astype(int)
    count = np.maximum(tokens.sum(good), 1e-300)
    gap = np.where(good, tokens.gap, 0.0)
    some = tokens.sum(good) > 0
    rows["gap"] = np.where(some, tokens.sum(gap) / count, np.nan)
    rows["gap_abs"] = np.where(some, tokens.sum(np.abs(gap)) / count, np.nan)
    step = rows["step"].to_numpy()
    frame = pd.DataFrame(
        {"row": tokens.row, "version": tokens.version, "gap": gap, "gap_abs": np.abs(gap), "position": tokens.position}
    )[good]
    spans = frame.groupby(["row", "version"], as_index=False).agg(
        tokens=("gap", "size"), gap=("gap", "mean"), gap_abs=("gap_abs", "mean")
    )
    spans["lag"] = step[spans["row"].to_numpy(dtype=int)] - spans["version"]
    frame["bucket"] = np.log2(frame["position"] + 1).astype(int)
    positions = frame.groupby(["row", "bucket"], as_index=False).agg(tokens=("gap", "size"), gap=("gap", "mean"))
    return rows, spans, positions


def _extremes(tokens: LossTokens, rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Oldest and newest version of the loss tokens and where the oldest is; NaN and -1 for a row without any."""
    oldest, newest, at = np.full(rows, np.nan), np.full(rows, np.nan), np.full(rows, -1)
    if len(tokens.row):
        order = np.lexsort((tokens.position, tokens.version, tokens.row))
        row, first = np.unique(tokens.row[order], return_index=True)
        last = np.append(first[1:], len(order)) - 1
        oldest[row], at[row] = tokens.version[order][first], tokens.position[order][first]
        newest[row] = tokens.version[order][last]
    return oldest, newest, at


def _hashes(data: pa.Table) -> list[str]:
    ids = np.ascontiguousarray(flat(data, "response_token_ids"), dtype="<i4")
    ends = np.cumsum(lengths_of(data, "response_token_ids"))
    return [
        hashlib.blake2b(ids[end - length : end].tobytes(), digest_size=12).hexdigest()
        for end, length in zip(ends, lengths_of(data, "response_token_ids"), strict=True)
    ]

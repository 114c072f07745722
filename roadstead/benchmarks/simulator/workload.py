"""What is generated: groups of responses with their lengths.

Owns: traces (synthetic or read from files) and the order in which a run draws them. Never touches: time, policies.
Invariant: a trace is fixed; a seed only orders it, so that policies with the same seed get the same groups in the same
order. Every length is at least 1.

The synthetic trace stands for the one of the Reserve-Occupy post (dapo-math-17k, not public): log-normal, its two
spreads chosen so that the statistics that the post states come out. `Trace.statistics` says how close they are.
"""

from __future__ import annotations

import glob
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

# The post's section 8.
_GROUPS = 1024
_MEMBERS = 8
_PROMPT_MEDIAN, _PROMPT_P95, _PROMPT_CAP = 138, 246, 1024
_RESPONSE_MEDIAN, _RESPONSE_CAP = 8673, 38_912
_LONG_GROUPS, _LONG_MEAN, _LONG_CAP = 3, 45_000, 131_072

# Log-normal spreads: together 0.643, which puts the p95 of responses just above 25,000; between groups enough for the
# longest group mean to come near the post's 34,449.
_BETWEEN, _WITHIN = 0.5, 0.405
_NORMAL_P95 = 1.6449

_TRACE_SEED = 0
"""Of the synthetic trace; the first one tried."""

POST_STATISTICS = {
    "groups": _GROUPS,
    "responses": _GROUPS * _MEMBERS,
    "prompt_median": _PROMPT_MEDIAN,
    "prompt_p95": _PROMPT_P95,
    "response_median": _RESPONSE_MEDIAN,
    "response_p95": 25_000,
    "longest_group_mean": 34_449,
}
"""What the post states of its trace; of the p95 of responses only that it is above 25,000."""

DEFAULT_PROMPT = 138
"""Prompt tokens where a trace has none: the post's median."""

GroupLengths = tuple[int, tuple[int, ...]]
"""Prompt tokens, and the response tokens of each member."""


@dataclass(frozen=True)
class Trace:
    name: str
    groups: tuple[GroupLengths, ...]

    def draw(self, seed: int) -> Iterator[GroupLengths]:
        """The groups for ever, each pass over them in another order; the order depends on the seed only."""
        rng = np.random.default_rng(seed)
        while True:
            for index in rng.permutation(len(self.groups)):
                yield self.groups[index]

    def statistics(self) -> dict[str, float]:
        """Of prompts and responses, in tokens."""
        prompts = np.array([prompt for prompt, _ in self.groups])
        responses = np.array([length for _, lengths in self.groups for length in lengths])
        means = np.array([sum(lengths) / len(lengths) for _, lengths in self.groups])
        return {
            "groups": len(self.groups),
            "responses": len(responses),
            "prompt_median": float(np.median(prompts)),
            "prompt_p95": float(np.percentile(prompts, 95)),
            "response_median": float(np.median(responses)),
            "response_mean": float(responses.mean()),
            "response_p95": float(np.percentile(responses, 95)),
            "response_max": float(responses.max()),
            "longest_group_mean": float(means.max()),
        }


def synthetic(long_tail: bool = False) -> Trace:
    """The post's load, or its long-tail variant: three groups, drawn at random, scaled to a mean of 45,000."""
    rng = np.random.default_rng(_TRACE_SEED)
    prompts = _log_normal(rng, _PROMPT_MEDIAN, np.log(_PROMPT_P95 / _PROMPT_MEDIAN) / _NORMAL_P95, (_GROUPS, 1))
    prompts = np.clip(prompts[:, 0], 1, _PROMPT_CAP)
    group = _log_normal(rng, _RESPONSE_MEDIAN, _BETWEEN, (_GROUPS, 1))
    lengths = np.clip(_log_normal(rng, group, _WITHIN, (_GROUPS, _MEMBERS)), 1, _RESPONSE_CAP)
    if long_tail:
        for index in rng.choice(_GROUPS, _LONG_GROUPS, replace=False):
            lengths[index] = np.clip(lengths[index] * (_LONG_MEAN / lengths[index].mean()), 1, _LONG_CAP)
    rows = zip(prompts.round().astype(int).tolist(), lengths.round().astype(int).tolist(), strict=True)
    name = "long-tail" if long_tail else "original"
    return Trace(name, tuple((prompt, tuple(members)) for prompt, members in rows))


def _log_normal(rng: np.random.Generator, median: Any, sigma: float, shape: tuple[int, int]) -> Any:
    return median * np.exp(rng.normal(0.0, sigma, shape))


def read_trace(pattern: str, group_size: int) -> Trace:
    """Trace from files: JSONL with `length` (and `group`, `prompt`) a line, or Parquet with these columns, or with
    those of Roadstead's batches (`group_id`, `response_token_ids`, `prompt_token_ids`).

    pattern: a path or glob. group_size: without a group, so many lines in a row are one; the rest is left out.
    Raises ValueError naming the file, the line or column, and the remedy.
    """
    paths = sorted(Path(found) for found in glob.glob(pattern, recursive=True))
    if not paths:
        raise ValueError(f"lengths: {pattern!r} matches no file; give a path or glob of .jsonl or .parquet files")
    rows: list[tuple[Any, int, int]] = []
    for path in paths:
        if path.suffix in (".jsonl", ".json"):
            rows += _jsonl(path)
        elif path.suffix == ".parquet":
            rows += _parquet(path)
        else:
            raise ValueError(f"lengths: {path} is neither .jsonl nor .parquet; convert it")
    return Trace(pattern, grouped(rows, group_size, pattern))


def grouped(rows: Iterable[tuple[Any, int, int]], group_size: int, source: str) -> tuple[GroupLengths, ...]:
    """(group or None, prompt tokens, response tokens) a response, to groups. Raises ValueError when there is none."""
    found: dict[Any, list[tuple[int, int]]] = {}
    loose: list[tuple[int, int]] = []
    for group, prompt, length in rows:
        # An empty response costs one step in an engine: the one that samples the end.
        response = (max(1, prompt), max(1, length))
        (loose if group is None else found.setdefault(group, [])).append(response)
    members = list(found.values())
    members += [loose[i : i + group_size] for i in range(0, len(loose) - group_size + 1, group_size)]
    if not members:
        raise ValueError(
            f"lengths: {source} has {len(loose)} responses, not one group of {group_size}; "
            "lower --group-size, or add more"
        )
    return tuple((group[0][0], tuple(length for _, length in group)) for group in members)


def _jsonl(path: Path) -> Iterator[tuple[Any, int, int]]:
    with path.open() as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"lengths: {path} line {number} is no JSON ({error}); mend or remove it") from error
            # Traces in the wild have lines of metadata between those of lengths.
            if not isinstance(row, dict) or "length" not in row:
                continue
            prompt = row.get("prompt", DEFAULT_PROMPT)
            yield row.get("group"), *_checked(f"{path} line {number}", prompt, row["length"])


def _parquet(path: Path) -> Iterator[tuple[Any, int, int]]:
    try:
        names = set(pq.read_schema(path).names)
    except (OSError, pa.ArrowException) as error:
        raise ValueError(f"lengths: {path} can't be read as Parquet ({error}); export it again") from error
    if "response_token_ids" in names:
        wanted = ["group_id", "response_token_ids", "prompt_token_ids"]
        yield from rows_of_batch(pq.read_table(path, columns=[name for name in wanted if name in names]))
        return
    if "length" not in names:
        raise ValueError(
            f"lengths: {path} has the columns {', '.join(sorted(names))}; name one `length`, or give batches of a run"
        )
    table = pq.read_table(path, columns=[name for name in ("group", "length", "prompt") if name in names])
    for number, row in enumerate(table.to_pylist()):
        prompt = row.get("prompt", DEFAULT_PROMPT)
        yield row.get("group"), *_checked(f"{path} row {number}", prompt, row["length"])


def _checked(where: str, prompt: Any, length: Any) -> tuple[int, int]:
    for key, value in (("prompt", prompt), ("length", length)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ValueError(f"lengths: {where}: {key}: {value!r} is no token count; use 0 or more")
    return prompt, length


def rows_of_batch(table: Any) -> list[tuple[Any, int, int]]:
    """(group, prompt tokens, response tokens) a row of a pyarrow table in Roadstead's batch schema."""
    responses = [len(ids) for ids in table["response_token_ids"].to_pylist()]
    names = table.schema.names
    groups = table["group_id"].to_pylist() if "group_id" in names else [None] * len(responses)
    if "prompt_token_ids" in names:
        prompts = [len(ids) for ids in table["prompt_token_ids"].to_pylist()]
    else:
        prompts = [DEFAULT_PROMPT] * len(responses)
    return list(zip(groups, prompts, responses, strict=True))

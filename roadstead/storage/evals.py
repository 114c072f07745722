"""Evaluations: samples of fixed prompts from one fixed version, beside the batch log and never in it.

Owns: `evals/v=.../`: staged prompts, `data-*.parquet` and `summary.json`. Never touches: groups, batches, ages.
Invariant: every token was sampled by exactly the version that is evaluated; a table with any other is refused whole.
`summary.json` is written LAST and created once: a version with one is evaluated, or given up for good.
A crash leaves: staged prompts, which the next execution adopts, and perhaps a data file without a summary, named by
its content.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import ValidationError

from roadstead.config import EvaluationSection, RunConfig
from roadstead.storage import schema
from roadstead.storage.batches import Frozen, StoredFile
from roadstead.storage.digest import table_digest
from roadstead.storage.keys import RunKeys
from roadstead.storage.objects import ObjectCorrupt, ObjectStore, canonical_json, sha256
from roadstead.storage.parquet import decode, encode
from roadstead.storage.schema import PER_TOKEN, SchemaError

_ERROR = "error: "
"""Key of a reward component that failed: `environments/rewards.py`."""
_REASONS = 20
"""Different ones a summary names: an environment may put a number into each."""
_READERS = 16
"""Staged prompts read at once: each is a request of milliseconds, and there may be thousands."""

EVAL_SCHEMA = pa.schema(
    [
        *(schema.SCHEMA.field(name) for name in ("run_id", "attempt")),
        pa.field("version", pa.int64(), nullable=False),  # evaluated, and of every token
        pa.field("position", pa.int32(), nullable=False),  # of the prompt, 0 .. prompts - 1
        *(
            schema.SCHEMA.field(name)
            for name in (
                *("member", "prompt_id", "prompt_text", "prompt_token_ids", "response_text", "response_token_ids"),
                *("loss_mask", "behavior_logprobs", "version_spans", "kv_version_spans", "reward"),
                *("reward_components", "finish_reason", "turns", "engine_id", "engine_build", "sampling", "seed"),
                *("environment", "started_at", "finished_at"),
            )
        ),
    ],
    metadata={"roadstead.eval_schema_version": "1"},
)
"""One row a sample. The columns of the batch schema mean the same here; what only training needs is not there."""


class EvaluationSettings(Frozen):
    """What an evaluation is made with. Two with equal settings can be compared, token by token."""

    dataset: str
    """Fingerprint of the prompt file."""
    prompts: int
    seed: int
    """Of the run: sampling seeds are a function of it, the prompt and the member, the same for every version."""
    environment: str
    rewards: tuple[tuple[str, float], ...]
    """Import path and weight of each function."""
    chat_template: bool
    group_size: int
    temperature: float
    max_tokens: int
    max_turns: int

    @property
    def digest(self) -> str:
        return sha256(canonical_json(self.model_dump(mode="json")))


class EvaluationSummary(Frozen):
    """Content of `summary.json`."""

    format: Literal[1] = 1
    run_id: str
    attempt: int
    version: int
    weights_digest: str
    settings: EvaluationSettings
    evaluated: int
    """Prompts with all of their samples; `settings.prompts` is all of them."""
    samples: int
    mean_reward: float | None
    """Of the samples that have one."""
    unscored: int
    """Samples whose reward failed."""
    components: dict[str, float]
    """Mean of each reward component, before its weight, over the samples that have it."""
    errors: dict[str, int]
    """Why rewards failed, and in how many samples."""
    mean_tokens: float | None
    """Response tokens a sample, the environment's included."""
    finish_reasons: dict[str, int]
    failures: dict[str, int]
    """Why prompts have no samples, and how many."""
    skipped: str | None
    """Why no sample was begun."""
    seconds: float
    """From the moment when an engine served the version; of a skipped one, for how long it waited."""
    digest: str | None
    """Canonical digest of the data table; null: there is none."""
    data: StoredFile | None
    closed_at: str
    """UTC, ISO 8601."""

    @property
    def complete(self) -> bool:
        """Every prompt was evaluated: only then is `mean_reward` to be compared with another's."""
        return self.evaluated == self.settings.prompts


def settings_of(config: RunConfig, section: EvaluationSection, dataset: str, prompts: int) -> EvaluationSettings:
    """dataset: fingerprint of the prompt file. prompts: how many it has."""
    return EvaluationSettings(
        dataset=dataset,
        prompts=prompts,
        seed=config.seed,
        environment=section.environment or config.data.environment,
        rewards=tuple((reward.function, reward.weight) for reward in config.data.rewards),
        chat_template=config.data.chat_template,
        group_size=section.group_size,
        temperature=section.temperature,
        max_tokens=section.max_tokens or config.rollout.max_tokens,
        max_turns=config.rollout.max_turns,
    )


def is_due(version: int, every: int, target: int) -> bool:
    """Whether a version is evaluated: the first, every `every`-th, and the run's last."""
    return version % every == 0 or version == target


# -- staged prompts -------------------------------------------------------------------------------------------


def table_from_rows(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Rows (dicts by column name, times in UTC microseconds) to a checked table. Raises SchemaError."""
    try:
        table = pa.Table.from_pylist(list(rows), schema=EVAL_SCHEMA)
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise SchemaError(f"a value does not fit its column: {error}") from error
    check(table)
    return table


def check(table: pa.Table) -> None:
    """Raise SchemaError unless every row is whole and all tokens are of the one version that is evaluated."""
    if table.schema.names != EVAL_SCHEMA.names:
        raise SchemaError(f"columns differ from the evaluation schema: {table.schema.names}")
    for field in EVAL_SCHEMA:
        if table.schema.field(field.name).type != field.type:
            raise SchemaError(f"{field.name}: type {table.schema.field(field.name).type}, expected {field.type}")
        if not field.nullable and table[field.name].null_count:
            raise SchemaError(f"{field.name}: null in {table[field.name].null_count} row(s), not allowed")
    versions = table["version"].unique().to_pylist()
    if len(versions) != 1:
        raise SchemaError(f"version: an evaluation is of one version, this one is of {versions}")
    lengths = {name: pc.list_value_length(table[name]).to_pylist() for name in PER_TOKEN}
    spans = {name: table[name].to_pylist() for name in ("version_spans", "kv_version_spans")}

    def wrong(i: int, what: str) -> SchemaError:
        return SchemaError(f"row {i} (prompt {table['position'][i]} member {table['member'][i]}): {what}")

    for i in range(table.num_rows):
        counts = {name: values[i] for name, values in lengths.items()}
        if len(set(counts.values())) != 1:
            raise wrong(i, f"per-token lists differ in length: {counts}")
        wanted = [{"version": versions[0], "start": 0, "end": counts["response_token_ids"]}]
        for name, values in spans.items():
            if values[i] != wanted and not (name == "kv_version_spans" and values[i] is None):
                raise wrong(i, f"{name}: {values[i]}, expected version {versions[0]} on every token")


def stage(store: ObjectStore, keys: RunKeys, settings: EvaluationSettings, table: pa.Table) -> None:
    """Write the samples of one prompt; an earlier execution's stay."""
    version, position = table["version"][0].as_py(), table["position"][0].as_py()
    store.create(keys.eval_group(version, settings.digest, position), encode(table))


def is_staged(store: ObjectStore, keys: RunKeys, settings: EvaluationSettings, version: int, position: int) -> bool:
    return store.exists(keys.eval_group(version, settings.digest, position))


def staged(store: ObjectStore, keys: RunKeys, settings: EvaluationSettings, version: int) -> dict[int, pa.Table]:
    """Samples by position of their prompt, as far as they are there. Raises ObjectCorrupt, SchemaError."""

    def read(position: int) -> pa.Table | None:
        key = keys.eval_group(version, settings.digest, position)
        body = store.find(key)
        if body is None:
            return None
        table = decode(body, store.url(key))
        check(table)
        return table

    with ThreadPoolExecutor(_READERS) as readers:
        found = list(readers.map(read, range(settings.prompts)))
    return {position: table for position, table in enumerate(found) if table is not None}


# -- the evaluation -------------------------------------------------------------------------------------------


def put_data(store: ObjectStore, keys: RunKeys, table: pa.Table) -> tuple[str, StoredFile]:
    """Write the samples of a version, read back and compared. Returns their canonical digest and where they lie."""
    check(table)
    digest = table_digest(table)
    key = keys.eval_data(table["version"][0].as_py(), digest)
    store.create(key, encode(table))
    body = store.get(key)
    if (found := table_digest(decode(body, store.url(key)))) != digest:
        raise ObjectCorrupt(f"{store.url(key)}: reads back as {found}, wrote {digest}")
    return digest, StoredFile(key=key, bytes=len(body), sha256=sha256(body))


def numbers(tables: Iterable[pa.Table]) -> dict[str, Any]:
    """The fields of a summary that are counted from samples; a table a prompt."""
    evaluated, rewards, tokens = 0, list[float | None](), list[int]()
    components: dict[str, list[float]] = defaultdict(list)
    errors: Counter[str] = Counter()
    finish: Counter[str] = Counter()
    for table in tables:
        evaluated += 1
        rewards += table["reward"].to_pylist()
        tokens += pc.list_value_length(table["response_token_ids"]).to_pylist()
        finish.update(table["finish_reason"].to_pylist())
        for name, value in (item for parts in table["reward_components"].to_pylist() for item in parts or ()):
            if value is not None:
                components[name].append(value)
            elif name.startswith(_ERROR):
                errors[name.removeprefix(_ERROR)] += 1
    scored = [reward for reward in rewards if reward is not None]
    return {
        "evaluated": evaluated,
        "samples": len(rewards),
        "mean_reward": _mean(scored),
        "unscored": len(rewards) - len(scored),
        "components": {name: sum(values) / len(values) for name, values in sorted(components.items())},
        "errors": most_common(errors),
        "mean_tokens": _mean(tokens),
        "finish_reasons": dict(sorted(finish.items())),
    }


def most_common(reasons: Counter[str]) -> dict[str, int]:
    """The reasons to name, the most common first; the others are counted together."""
    named = dict(reasons.most_common(_REASONS))
    if rest := reasons.total() - sum(named.values()):
        named["other reasons"] = rest
    return named


def close(store: ObjectStore, keys: RunKeys, summary: EvaluationSummary) -> EvaluationSummary:
    """Write the summary. Returns what is stored: ours, or an earlier execution's."""
    store.create(keys.eval_summary(summary.version), canonical_json(summary.model_dump(mode="json")))
    there = find(store, keys, summary.version)
    assert there is not None, "created or already there"
    return there


def is_closed(store: ObjectStore, keys: RunKeys, version: int) -> bool:
    return store.exists(keys.eval_summary(version))


def find(store: ObjectStore, keys: RunKeys, version: int) -> EvaluationSummary | None:
    """The summary of a version, or None. Raises ObjectCorrupt when it can't be read as one."""
    key = keys.eval_summary(version)
    body = store.find(key)
    if body is None:
        return None
    try:
        return EvaluationSummary.model_validate_json(body)
    except ValidationError as error:
        raise ObjectCorrupt(f"{store.url(key)}: not an evaluation's summary: {error}") from error


def read(store: ObjectStore, summary: EvaluationSummary) -> pa.Table:
    """The samples, proved: file sha256, canonical digest, schema. Without any, an empty table. Raises ObjectCorrupt."""
    if summary.data is None:
        return EVAL_SCHEMA.empty_table()
    where = store.url(summary.data.key)
    table = decode(store.get(summary.data.key, summary.data.sha256), where)
    if (found := table_digest(table)) != summary.digest:
        raise ObjectCorrupt(f"{where}: canonical digest {found}, the summary says {summary.digest}")
    check(table)
    return table


def all_of(store: ObjectStore, keys: RunKeys) -> list[EvaluationSummary]:
    """Every summary of the run, by version. For people: it starts from a listing."""
    versions = [int(name.removeprefix("v=")) for name in store.folders(keys.evals)]
    return [summary for version in sorted(versions) if (summary := find(store, keys, version)) is not None]


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None

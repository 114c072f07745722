"""What a resumed run may change in its configuration, and what it may not.

Owns: the verdict on every key. Never touches: files, the store.
Invariant: what makes data or weights incomparable is refused; what changes the experiment must be allowed by name;
what only changes how the work is done is free.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from roadstead.config import ConfigError

_FREE = (
    "training.steps",
    "training.checkpoint_every",
    "training.micro_batch_tokens",
    "rollout.group_timeout_s",
    "rollout.stuck_timeout_s",
    "rollout.max_attempts",
    "rollout.max_dead_letters",
    "filters.empty_batches",
    "staleness.max_groups_in_flight",
    "evaluation",
    "evaluation.",
    "engine.",
    "storage.",
    "temporal.",
    "metrics.",
    "trackers",
    # Where the files lie is this machine's business; the prompts' digest is compared, version 0 is on S3.
    "model.path",
    "data.prompts",
)
_EXPERIMENT = ("engine.kv_cache",)
"""Not free, though its section is."""
_NEVER = {
    "name": "it is another run; begin it with `roadstead run`",
    "seed": "prompt order and sampling seeds are functions of it",
    "model.dtype": "checkpoints and weights digests depend on it",
    "training.ranks": "optimizer checkpoints are sharded by it",
    "training.zero_stage": "optimizer checkpoints are sharded by it",
}


def check_changes(before: dict[str, Any], now: dict[str, Any], allowed: Collection[str]) -> list[str]:
    """The keys that differ. Raises ConfigError for one that may not change, or may only with `--allow KEY`."""
    changed = list(_differences(before, now, ""))
    for key, old, new in changed:
        if key in _NEVER:
            raise ConfigError(
                f"{key}: the run has {old!r}, the configuration {new!r}; it can't change in a run: {_NEVER[key]}"
            )
        if key not in allowed and not _is_free(key):
            raise ConfigError(
                f"{key}: the run has {old!r}, the configuration {new!r}; set it back, or change the experiment on "
                f"purpose with `--allow {key}`"
            )
    unknown = sorted(set(allowed) - {key for key, _, _ in changed})
    if unknown:
        raise ConfigError(f"--allow {unknown[0]}: that key did not change; changed: {[k for k, _, _ in changed]}")
    return [key for key, _, _ in changed]


def _is_free(key: str) -> bool:
    return key not in _EXPERIMENT and any(key == free or (free[-1] == "." and key.startswith(free)) for free in _FREE)


def _differences(before: Any, now: Any, path: str) -> list[tuple[str, Any, Any]]:
    if isinstance(before, dict) and isinstance(now, dict):
        found = []
        for key in sorted({*before, *now}):
            found += _differences(before.get(key), now.get(key), f"{path}.{key}" if path else key)
        return found
    return [] if before == now else [(path, before, now)]

"""Rows of groups and batches for tests."""

from __future__ import annotations

from typing import Any

NOW = 1_790_000_000_000_000
"""UTC microseconds."""


def group_rows(
    group_id: str = "g00000000",
    *,
    members: int = 2,
    tokens: int = 4,
    version: int = 0,
    seed: int = 0,
    run_id: str = "r",
    **changes: Any,
) -> list[dict[str, Any]]:
    """A staged group: `members` rows of `tokens` response tokens each, all from one version.

    The values are plain arithmetic, so that the golden digest does not hang on a random generator.
    """
    return [
        {
            "run_id": run_id,
            "attempt": 1,
            "group_id": group_id,
            "member": member,
            "prompt_id": f"prompt-of-{group_id}",
            "prompt_text": "1+1=",
            "prompt_token_ids": [5, 6, 5, 7],
            "response_text": "2",
            "response_token_ids": [3 + (7 * seed + 5 * member + 3 * i) % 17 for i in range(tokens)],
            "loss_mask": [True] * tokens,
            "behavior_logprobs": [-((seed + member + i) % 8 + 1) / 8 for i in range(tokens)],
            "version_spans": [{"version": version, "start": 0, "end": tokens}],
            "v_traj": version,
            "head_version": version,
            "tail_version": version,
            "reward": float(member % 2),
            "reward_components": [("correct", float(member % 2))],
            "finish_reason": "stop",
            "turns": [{"role": "assistant", "start": 0, "end": tokens}],
            "engine_id": "engine-0",
            "engine_build": "vllm test",
            "sampling": {
                "temperature": 1.0,
                "top_p": 1.0,
                "top_k": -1,
                "max_tokens": tokens,
                "logprobs_mode": "processed",
            },
            "seed": member,
            "environment": "test",
            "from_live_policy": True,
            "reserved_at": NOW,
            "started_at": NOW + 1,
            "finished_at": NOW + 2,
            **changes,
        }
        for member in range(members)
    ]


def batch_rows(step: int = 0, *, groups: int = 2, **changes: Any) -> list[dict[str, Any]]:
    """The rows of a batch, in slot order."""
    rows = []
    for slot in range(groups):
        for row in group_rows(f"g{step * groups + slot:08d}", seed=step * groups + slot, **changes):
            row.update(step=step, slot=slot, staleness=step - row["head_version"], advantage=1.0, occupied_at=NOW + 3)
            rows.append(row)
    return rows

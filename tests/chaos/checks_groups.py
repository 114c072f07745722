"""Groups by themselves: what was staged, what the filters kept out, what could not be generated.

Owns: these checks. Never touches: batches; the product's readers. The run's own filter functions are called again, on
what was staged: they are a part of its configuration.
Invariant, of an empty list of violations:

    staged      under its own name, group_size members numbered from 0, each of another seed, over-sampled or not
    filtered    a verdict is what the configured filters say of the stored rows; who has one isn't trained; who ends
                as filtered has one
    letters     under their own names, with a reason; whoever ends as dead-lettered has one of that attempt or an
                earlier one; whoever has one ends so, unless a later attempt began it again
"""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from typing import Any

import pyarrow.parquet as pq

from roadstead.environments.loading import load_filter
from tests.chaos.verdict import Reader, Verdict, read_json


@dataclass(frozen=True)
class Staged:
    """A group as it was finished by one attempt."""

    key: str
    rows: list[dict[str, Any]]
    filtered: str | None
    """Its verdict's reason."""

    @property
    def group(self) -> str:
        return str(self.rows[0]["group_id"])


@dataclass(frozen=True)
class End:
    """Of a group."""

    state: str
    attempt: int
    """On whose record it is."""
    where: str


def staged_groups(run: Reader, verdict: Verdict, config: dict[str, Any]) -> dict[str, Staged]:
    """By key."""
    size, more = config["rollout"]["group_size"], config["rollout"].get("extra_members", 0)
    found = {}
    for key in run.list("groups/"):
        table = pq.read_table(io.BytesIO(run.get(key)))
        rows = table.to_pylist()
        told = json.loads((table.schema.metadata or {}).get(b"roadstead.verdict", b"{}"))
        staged = found[key] = Staged(key, rows, told.get("filtered"))
        verdict.staged_tokens += sum(len(row["response_token_ids"]) for row in rows)
        verdict.reserved += [rows[0]["reserved_at"].timestamp()]
        name = f"groups/{staged.group}-a{rows[0]['attempt']}.parquet"
        if key != name:
            verdict.wrong(f"{key}: holds {name}")
        if [row["member"] for row in rows] != list(range(size)) or {row["group_id"] for row in rows} != {staged.group}:
            verdict.wrong(f"{key}: {len(rows)} members, expected 0 to {size - 1} of {staged.group}")
        if len({row["seed"] for row in rows}) != len(rows):
            verdict.wrong(f"{key}: two members have the same seed")
        if told.get("aborted_members", 0) != more:
            verdict.wrong(f"{key}: tells of {told.get('aborted_members')} members that were aborted, expected {more}")
    return found


def check_filters(verdict: Verdict, config: dict[str, Any], staged: dict[str, Staged], ends: dict[str, End]) -> None:
    section = config.get("filters") or {}
    functions = [(path.rpartition(":")[2], load_filter(path)) for path in section.get("functions", ())]
    out = set()
    for key, group in staged.items():
        rewards = {row["reward"] for row in group.rows if row["reward"] is not None}
        if section.get("zero_variance") and len(rewards) < 2:
            wanted = "zero_variance"
        else:
            said = ((name, function(group.rows)) for name, function in functions)
            wanted = next((f"{name}: {reason}" for name, reason in said if reason is not None), None)
        if group.filtered != wanted:
            verdict.wrong(f"{key}: filtered as {group.filtered!r}, the filters say {wanted!r}")
        if group.filtered is not None:
            out.add(group.group)
            if group.group in ends and ends[group.group].state == "trained":
                verdict.wrong(f"{key}: filtered ({group.filtered}), and trained")
    for name, end in sorted(ends.items()):
        if end.state == "filtered" and name not in out:
            verdict.wrong(f"{name} ends as filtered in {end.where}, and no verdict says why")


def check_dead_letters(run: Reader, verdict: Verdict, ends: dict[str, End]) -> dict[str, str]:
    """Prompt id by group."""
    prompts: dict[str, str] = {}
    written: dict[str, list[int]] = {}
    for key in run.list("dead-letters/"):
        letter = read_json(run, key)
        group, attempt = letter["group_id"], letter["attempt"]
        if key != f"dead-letters/{group}-a{attempt}.json":
            verdict.wrong(f"{key}: holds the letter of {group}, attempt {attempt}")
        if not letter["reason"]:
            verdict.wrong(f"{key}: gives no reason")
        prompts[group] = letter["prompt_id"]
        written.setdefault(group, []).append(attempt)
        end = ends.get(group)
        # A machine may die between a letter and the record of its end; a later attempt then begins the group again.
        if end is not None and end.state != "dead-lettered" and end.attempt <= attempt:
            verdict.wrong(f"{key}: a dead letter, and {group} ends as {end.state} in {end.where}")
    for group, end in sorted(ends.items()):
        if end.state == "dead-lettered" and not any(attempt <= end.attempt for attempt in written.get(group, [])):
            verdict.wrong(f"{group} ends as dead-lettered in {end.where}, and there is no letter")
    return prompts

"""Evaluations on record: exactly their version on every token, and nothing of them in training.

Owns: these checks. Never touches: the product's readers.
Invariant, of an empty list of violations:

    which       due versions only; the last one always; in a run of one attempt all that are due
    summary     of its own version, over the digest of that version's weights; its counts are those of its samples
    samples     the data file's sha256 and canonical digest; every token of the version, by the engine's own spans;
                group_size members of each prompt, prompts of the held-out file's positions
    staged      the same of every finished prompt, in the table or not
    apart       no sample of an evaluation is in a staged group, hence none in a batch, which is made of those
"""

from __future__ import annotations

import hashlib
import io
from collections import defaultdict
from typing import Any

import pyarrow.parquet as pq

from roadstead.storage.digest import table_digest
from tests.chaos.checks_groups import Staged
from tests.chaos.verdict import Reader, Verdict, read_json, relative, rows_of


def check_evaluations(
    run: Reader,
    verdict: Verdict,
    config: dict[str, Any],
    steps: list[dict[str, Any]],
    staged: dict[str, Staged],
) -> None:
    section = config.get("evaluation")
    keys = run.list("evals/")
    if section is None:
        if keys:
            verdict.wrong(f"evals/: {keys[:3]}..., and no evaluation is configured")
        return
    closed = {int(key[len("evals/v=") :][:8]) for key in keys if key.endswith("/summary.json")}
    due = {version for version in range(len(steps) + 1) if version % section["every"] == 0 or version == len(steps)}
    # Those that were under way when a machine died can't be made up for: the engines serve newer weights by then.
    must = due if verdict.attempts == 1 else {len(steps)}
    if strange := sorted(closed - due):
        verdict.wrong(f"evals/: versions {strange} are evaluated and not due")
    if missing := sorted(must - closed):
        verdict.wrong(f"evals/: versions {missing} are due and not on record")
    for version in sorted(closed):
        _summary(run, verdict, section, version)
    trained = {_sample(row) for group in staged.values() for row in group.rows}
    for key in keys:
        if not key.endswith(".parquet"):
            continue
        version, rows = int(key[len("evals/v=") :][:8]), rows_of(run, key)
        for row in rows:
            _row(verdict, f"{key}: prompt {row['position']} member {row['member']}", row, version)
        if both := sorted(str(row["prompt_id"]) for row in rows if _sample(row) in trained):
            verdict.wrong(f"{key}: samples of prompts {both} are staged for training too")
        members: dict[int, list[int]] = defaultdict(list)
        for row in rows:
            members[row["position"]].append(row["member"])
        if any(sorted(m) != list(range(section["group_size"])) for m in members.values()):
            verdict.wrong(f"{key}: members {dict(members)}, expected {section['group_size']} of each prompt")
    verdict.evaluations = len(closed)


def _summary(run: Reader, verdict: Verdict, section: dict[str, Any], version: int) -> None:
    folder = f"evals/v={version:08d}"
    key = f"{folder}/summary.json"
    summary = read_json(run, key)
    weights = read_json(run, f"weights/v={version:08d}/manifest.json")["digest"]
    if (summary["version"], summary["weights_digest"]) != (version, weights):
        verdict.wrong(f"{key}: of version {summary['version']} {summary['weights_digest']}, expected {weights}")
    if summary["data"] is None:
        if summary["samples"] or summary["evaluated"] or not (summary["failures"] or summary["skipped"]):
            verdict.wrong(f"{key}: has no data, {summary['samples']} samples, and no reason")
        return
    named = relative(summary["data"]["key"])
    if named not in run.list(f"{folder}/data-"):
        verdict.wrong(f"{key}: its data {named} is not there")
        return
    body = run.get(named)
    table = pq.read_table(io.BytesIO(body))
    if hashlib.sha256(body).hexdigest() != summary["data"]["sha256"] or table_digest(table) != summary["digest"]:
        verdict.wrong(f"{named}: its digests are not those in {key}")
    rows = table.to_pylist()
    prompts = {row["position"] for row in rows}
    scored = [row["reward"] for row in rows if row["reward"] is not None]
    mean = sum(scored) / len(scored) if scored else None
    told = (summary["samples"], summary["evaluated"], summary["mean_reward"])
    if told != (len(rows), len(prompts), mean):
        verdict.wrong(f"{key}: tells {told}, its samples are {(len(rows), len(prompts), mean)}")
    if summary["evaluated"] + sum(summary["failures"].values()) != summary["settings"]["prompts"]:
        verdict.wrong(f"{key}: {summary['evaluated']} prompts evaluated, failures {summary['failures']}")
    if len(rows) != len(prompts) * section["group_size"]:
        verdict.wrong(f"{key}: {len(rows)} samples of {len(prompts)} prompts, {section['group_size']} of each expected")


def _row(verdict: Verdict, where: str, row: dict[str, Any], version: int) -> None:
    length = len(row["response_token_ids"])
    if row["version"] != version or row["version_spans"] != [{"version": version, "start": 0, "end": length}]:
        verdict.wrong(f"{where}: spans {row['version_spans']} over {length} tokens, expected version {version} alone")
    if not (length == len(row["loss_mask"]) == len(row["behavior_logprobs"])) or length == 0:
        verdict.wrong(f"{where}: per-token lists differ in length")


def _sample(row: dict[str, Any]) -> tuple[Any, ...]:
    """What tells a sample from every other one."""
    return row["prompt_id"], row["seed"], tuple(row["response_token_ids"]), tuple(row["behavior_logprobs"])

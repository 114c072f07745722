"""What must hold for a finished run, read from S3 alone.

Owns: the reading of the bucket and the verdict. Never touches: the product's readers, its ledger or its counters:
records are JSON, tables are Parquet, and both are read as such. The one thing taken from the product is the canonical
digest of a table, which is a format.
Invariant: a violation is a sentence with the key it was found at. An empty list means that everything below was looked
at and holds:

    steps       records 0 .. target-1, each once; one committed batch each, and no other
    batches     data file's sha256 and canonical digest, B groups x n members, whole rows, staged groups token by token
    bound       for every token, by the engine's own spans: 0 <= step - version <= S; nothing admitted above its tokens
    digests     weights_in(0) is the model's, weights_out(b) is weights_in(b + 1) and manifest b + 1; files' sha256
    ends        every position below the cursor in exactly one terminal state, trained ones in exactly one batch
    prompts     a position has one prompt in every attempt; every whole epoch serves every prompt of the dataset once
    attempts    numbered without a hole, their tokens differ, no batch by an older attempt after a newer one's

and, of what a run may do besides, `checks_groups` (filters, over-sampling, dead letters) and `checks_evaluations`.
"""

from __future__ import annotations

import hashlib
import io
import itertools
from collections import Counter
from typing import Any

import pyarrow.parquet as pq

from roadstead.storage.digest import table_digest
from tests.chaos.checks_evaluations import check_evaluations
from tests.chaos.checks_groups import End, Staged, check_dead_letters, check_filters, staged_groups
from tests.chaos.verdict import Reader, Verdict, read_json, relative

TERMINAL = {"trained", "filtered", "discarded", "expired", "dead-lettered"}


def check(run: Reader, *, dataset: list[str]) -> Verdict:
    """dataset: the prompt ids, one a line of the file."""
    verdict = Verdict()
    record = read_json(run, "run.json")
    config = record["config"]
    bound, target = config["staleness"]["max_staleness"], config["training"]["steps"]
    staged = staged_groups(run, verdict, config)
    steps = _steps(run, verdict, target)
    trained = _batches(run, verdict, steps, config, bound, staged)
    _weights(run, verdict, steps, record["model_digest"])
    attempts = _attempts(run, verdict)
    ends = _ends(run, verdict, steps, attempts, trained)
    check_filters(verdict, config, staged, ends)
    letters = check_dead_letters(run, verdict, ends)
    _prompts(verdict, staged, letters, dataset)
    check_evaluations(run, verdict, config, steps, staged)
    return verdict


def _steps(run: Reader, verdict: Verdict, target: int) -> list[dict[str, Any]]:
    keys = run.list("steps/")
    wanted = [f"steps/step={step:08d}.json" for step in range(target)]
    if keys != wanted:
        verdict.wrong(f"steps/: {len(keys)} records {keys[:3]}..., expected {target}: steps 0 to {target - 1}")
    records = [read_json(run, key) for key in keys]
    for key, record in zip(keys, records, strict=True):
        if key != f"steps/step={record['step']:08d}.json":
            verdict.wrong(f"{key}: says step {record['step']}")
    return records


def _batches(
    run: Reader,
    verdict: Verdict,
    steps: list[dict[str, Any]],
    config: dict[str, Any],
    bound: int,
    staged: dict[str, Staged],
) -> dict[str, tuple[int, str]]:
    """Group id to (step, prompt id) of everything trained."""
    size, members = config["staleness"]["groups_per_batch"], config["rollout"]["group_size"]
    commits = [key for key in run.list("batches/") if key.endswith("/_COMMIT.json")]
    wanted = [f"batches/step={record['step']:08d}/_COMMIT.json" for record in steps]
    if commits != wanted:
        verdict.wrong(f"batches/: committed are {commits}, recorded are {len(wanted)} steps")
    trained: dict[str, tuple[int, str]] = {}
    last_attempt = 0
    for key, record in zip(commits, steps, strict=False):
        commit, step = read_json(run, key), record["step"]
        body = run.get(relative(commit["data"]["key"]))
        if hashlib.sha256(body).hexdigest() != commit["data"]["sha256"]:
            verdict.wrong(f"{commit['data']['key']}: its sha256 is not the one in {key}")
        table = pq.read_table(io.BytesIO(body))
        digest = table_digest(table)
        if not digest == commit["digest"] == record["batch_digest"]:
            verdict.wrong(f"{key}: digests differ: data {digest}, commit {commit['digest']}, {record['batch_digest']}")
        results = [x for x in run.list(f"batches/step={step:08d}/") if "/train-" in x]
        if results != [f"batches/step={step:08d}/train-{digest[:16]}.parquet"]:
            verdict.wrong(f"step {step}: trained {len(results)} batches: {results}")
        if commit["attempt"] < last_attempt:
            verdict.wrong(f"{key}: attempt {commit['attempt']} committed after attempt {last_attempt}")
        last_attempt = commit["attempt"]
        rows = table.to_pylist()
        if len(rows) != size * members or len(commit["groups"]) != size:
            verdict.wrong(f"{key}: {len(rows)} rows of {len(commit['groups'])} groups, expected {size} x {members}")
        for slot, group in enumerate(commit["groups"]):
            name, mine = group["group_id"], [row for row in rows if row["slot"] == slot]
            if [row["member"] for row in mine] != list(range(members)) or {r["group_id"] for r in mine} != {name}:
                verdict.wrong(f"{key}: slot {slot} is not {members} members of {name}")
                continue
            if name in trained:
                verdict.wrong(f"{name} is trained twice: in step {trained[name][0]} and in step {step}")
            trained[name] = (step, mine[0]["prompt_id"])
            source = f"groups/{name}-a{group['attempt']}.parquet"
            kept = ("member", "response_token_ids", "behavior_logprobs", "version_spans", "reward", "seed")
            before = staged[source].rows if source in staged else []
            if [{k: r[k] for k in kept} for r in before] != [{k: r[k] for k in kept} for r in mine]:
                verdict.wrong(f"{key}: {name} differs from what was staged as {source}")
            for row in mine:
                _row(verdict, f"{key}: {name} member {row['member']}", row, step, bound)
        verdict.batches += 1
        verdict.trained_tokens += sum(len(row["response_token_ids"]) for row in rows)
    return trained


def _row(verdict: Verdict, where: str, row: dict[str, Any], step: int, bound: int) -> None:
    spans, length = row["version_spans"], len(row["response_token_ids"])
    if not (length == len(row["loss_mask"]) == len(row["behavior_logprobs"])) or length == 0:
        verdict.wrong(f"{where}: per-token lists differ in length")
    edges = [0, *(span["end"] for span in spans)]
    if [span["start"] for span in spans] != edges[:-1] or edges[-1] != length or edges != sorted(set(edges)):
        verdict.wrong(f"{where}: spans do not cover its {length} tokens: {spans}")
    versions = [span["version"] for span in spans]
    oldest = min(versions)
    if versions != sorted(versions):
        verdict.wrong(f"{where}: versions go backwards: {versions}")
    if not 0 <= step - oldest <= bound or max(versions) > step:
        verdict.wrong(f"{where}: versions {versions} in step {step}, the bound is {bound}")
    if row["v_traj"] > oldest:
        verdict.wrong(f"{where}: v_traj {row['v_traj']} is above its oldest token's {oldest}")
    if row["step"] != step or row["staleness"] != step - oldest:
        verdict.wrong(f"{where}: says step {row['step']}, staleness {row['staleness']}")
    verdict.max_staleness = max(verdict.max_staleness, step - oldest)


def _weights(run: Reader, verdict: Verdict, steps: list[dict[str, Any]], model: str) -> None:
    before = read_json(run, "weights/v=00000000/manifest.json")["digest"]
    if before != model:
        verdict.wrong(f"weights/v=00000000/manifest.json: digest {before}, run.json has {model}")
    seen = {before}
    for record in steps:
        where = f"steps/step={record['step']:08d}.json"
        if record["weights_in"] != before:
            verdict.wrong(f"{where}: trained on top of {record['weights_in']}, version {record['step']} is {before}")
        key = f"weights/v={record['step'] + 1:08d}/manifest.json"
        manifest = read_json(run, key)
        told = (manifest["digest"], manifest["parent_digest"], manifest["batch_digest"])
        if told != (record["weights_out"], before, record["batch_digest"]):
            verdict.wrong(f"{key}: {told} does not follow from {where}")
        for file in manifest["files"]:
            if hashlib.sha256(run.get(relative(file["key"]))).hexdigest() != file["sha256"]:
                verdict.wrong(f"{file['key']}: its sha256 is not the one in {key}")
        before = record["weights_out"]
        if before in seen and record["metrics"]["applied"]:
            verdict.wrong(f"{where}: the weights did not move")
        seen.add(before)


def _attempts(run: Reader, verdict: Verdict) -> list[dict[str, Any]]:
    keys = [key for key in run.list("attempts/") if key.endswith(".json") and not key.endswith("-end.json")]
    if keys != [f"attempts/{number:06d}.json" for number in range(1, len(keys) + 1)] or not keys:
        verdict.wrong(f"attempts/: {keys}")
    records = [read_json(run, key) for key in keys]
    tokens = [record["fencing_token"] for record in records]
    if len(set(tokens)) != len(tokens):
        verdict.wrong("attempts/: two attempts share a fencing token")
    for earlier, later in itertools.pairwise(records):
        if later["from_version"] < earlier["from_version"]:
            verdict.wrong(f"attempt {later['attempt']} begins at version {later['from_version']}, before the last one")
    verdict.attempts = len(records)
    return records


def _ends(
    run: Reader,
    verdict: Verdict,
    steps: list[dict[str, Any]],
    attempts: list[dict[str, Any]],
    trained: dict[str, tuple[int, str]],
) -> dict[str, End]:
    sources = [(f"step {record['step']}", record["attempt"], record["terminal"]) for record in steps]
    for record in attempts:
        sources.append((f"attempt {record['attempt']}", record["attempt"], record.get("terminal") or {}))
    for key in run.list("attempts/"):
        if key.endswith("-end.json"):
            sources.append((key, int(key[len("attempts/") : -len("-end.json")]), read_json(run, key)["terminal"]))
    ends: dict[str, End] = {}
    for where, attempt, terminal in sources:
        for group, state in terminal.items():
            if state not in TERMINAL:
                verdict.wrong(f"{where}: {group} ends as {state!r}")
            if group in ends:
                verdict.wrong(
                    f"{group} ends twice: as {ends[group].state} in {ends[group].where}, as {state} in {where}"
                )
            ends[group] = End(state, attempt, where)
    told = {group for group, end in ends.items() if end.state == "trained"}
    if told != set(trained):
        verdict.wrong(f"recorded as trained and not in a batch, or the other way: {sorted(told ^ set(trained))}")
    cursor = steps[-1]["cursor"] if steps else 0
    served = {f"g{position:08d}" for position in range(cursor)}
    if lost := sorted(served - set(ends)):
        verdict.wrong(f"{len(lost)} groups below the cursor {cursor} have no terminal state: {lost[:8]}")
    if strange := sorted(set(ends) - served):
        verdict.wrong(f"{len(strange)} groups at or past the cursor {cursor} have one: {strange[:8]}")
    verdict.groups = len(ends)
    verdict.terminal = dict(Counter(end.state for end in ends.values()))
    return ends


def _prompts(verdict: Verdict, staged: dict[str, Staged], letters: dict[str, str], dataset: list[str]) -> None:
    """Positions run through the dataset in some order, epoch by epoch, whatever becomes of their groups.

    letters: prompt id by group, of dead letters.
    """
    served: dict[str, str] = {}
    for group, prompt in [*((s.group, s.rows[0]["prompt_id"]) for s in staged.values()), *letters.items()]:
        if served.setdefault(group, prompt) != prompt:
            verdict.wrong(f"{group} has two prompts: {served[group]} and {prompt}")
    epochs: dict[int, list[str]] = {}
    for group, prompt in served.items():
        epochs.setdefault(int(group[1:]) // len(dataset), []).append(prompt)
    for epoch, prompts in sorted(epochs.items()):
        twice = [prompt for prompt, count in Counter(prompts).items() if count > 1]
        if twice:
            verdict.wrong(f"epoch {epoch}: prompts served twice: {sorted(twice)}")
        if unknown := sorted(set(prompts) - set(dataset)):
            verdict.wrong(f"epoch {epoch}: prompts that are not in the dataset: {unknown}")
        if len(prompts) == len(dataset) and Counter(prompts) != Counter(dataset):
            verdict.wrong(f"epoch {epoch}: {sorted(set(dataset) - set(prompts))} were skipped")

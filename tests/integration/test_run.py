"""Whole runs on real parts: Temporal, S3, vLLM, DeepSpeed, every worker a process of its own.

Everything is checked on the Parquet that came out, the weights and the records; nothing on progress counters.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
from collections import Counter
from pathlib import Path

import duckdb
import pandas as pd
import pytest

from roadstead.metrics.catalogue import CATALOGUE
from roadstead.storage import batches, steps, weights
from roadstead.storage.digest import table_digest
from tests.support import tiny
from tests.support.forward import reference_logprobs
from tests.support.scraping import Scrape, Scraper
from tests.support.workplace import LIMIT_S, Workplace, check_run, wait_for_step

pytestmark = pytest.mark.timeout(LIMIT_S + 60)


@pytest.fixture(scope="module")
def scraper(workplace: Workplace) -> Scraper:
    return Scraper(workplace.data / "runs" / "finished" / "metrics")


@pytest.fixture(scope="module")
def finished(workplace: Workplace, scraper: Scraper) -> str:
    with scraper:
        prompts = str(workplace.folder / "prompts.jsonl")
        output = workplace.run("finished", evaluation={"prompts": prompts, "every": 3, "max_tokens": 4})
    assert "24 admitted = 24 trained" in output, output
    return "finished"


def test_a_run_leaves_one_whole_chained_batch_a_step(workplace: Workplace, finished: str) -> None:
    check_run(workplace, finished, steps_=6, bound=2)


def test_rollouts_overlap_training(workplace: Workplace, finished: str) -> None:
    """Groups generated under version v are trained later than v: generation did not wait for the trainer."""
    store, keys = workplace.store(finished)
    ages = Counter()
    for record in steps.all_of(store, keys):
        commit = batches.find(store, keys, record.step)
        assert commit is not None
        ages.update(batches.read(store, commit)["staleness"].to_pylist())
    assert ages[1] + ages[2] > ages[0]


def test_stored_logprobs_are_those_of_the_stamped_versions(workplace: Workplace, finished: str, tmp_path: Path) -> None:
    """Float32: 1e-4 nats between the engine's logprobs and a Hugging Face forward pass, span by span."""
    store, keys = workplace.store(finished)
    sampled = []
    for record in steps.all_of(store, keys):
        commit = batches.find(store, keys, record.step)
        assert commit is not None
        rows = batches.read(store, commit).to_pylist()
        sampled += [row for row in rows if len(row["version_spans"]) > 1][:3] + rows[:2]
    versions = {span["version"] for row in sampled for span in row["version_spans"]}
    folders = {
        version: str(weights.download(store, weights.manifest_of(store, keys, version), tmp_path / f"v{version}"))
        for version in versions
    }
    reference = reference_logprobs(
        folders,
        [
            {
                "prompt": row["prompt_token_ids"],
                "response": row["response_token_ids"],
                "temperature": row["sampling"]["temperature"],
                "spans": [[s["version"], s["start"], s["end"]] for s in row["version_spans"]],
            }
            for row in sampled
        ],
    )
    for row, expected in zip(sampled, reference, strict=True):
        assert row["behavior_logprobs"] == pytest.approx(expected, abs=1e-4), (row["group_id"], row["version_spans"])


def test_exported_batches_are_plain_parquet(workplace: Workplace, finished: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    workplace.roadstead("batch", "export", finished, "--to", str(out))
    store, keys = workplace.store(finished)
    files = sorted(out.iterdir())
    assert [f.name for f in files] == [f"batch-{step:08d}.parquet" for step in range(6)]
    counted = duckdb.sql(f"select count(*), count(distinct group_id), max(staleness) from '{out}/*.parquet'").fetchone()
    assert counted is not None and counted[0] == 6 * 4 * 4 and counted[1] == 24 and counted[2] <= 2
    frame = pd.read_parquet(files[3])
    assert len(frame) == 16 and set(frame["step"]) == {3}
    for record, file in zip(steps.all_of(store, keys), files, strict=True):
        from roadstead.storage.parquet import decode

        assert table_digest(decode(file.read_bytes())) == record.batch_digest


def test_status_and_batch_commands_answer_in_json(workplace: Workplace, finished: str) -> None:
    status = json.loads(workplace.roadstead("status", finished, "--json").stdout)["recorded"]
    assert (status["steps"], status["trained_trajectories"], status["left"]) == (6, 96, 0)
    listed = json.loads(workplace.roadstead("batch", "list", finished, "--json").stdout)
    assert [batch["step"] for batch in listed] == list(range(6)) and all(batch["recorded"] for batch in listed)
    rows = json.loads(workplace.roadstead("batch", "show", finished, "2", "--json").stdout)
    assert len(rows) == 16 and {row["step"] for row in rows} == {2}


def test_every_process_was_scraped_and_every_metric_had_a_value(finished: str, scraper: Scraper) -> None:
    roles = {"orchestrator", "ledger", "rollout", "train"}
    engines = {name for name in scraper.files if name.startswith("vllm-")}
    servers = {"temporal-server"}
    assert scraper.files == roles | {f"{role}-temporal" for role in roles} | servers | engines and len(engines) == 1
    assert list(scraper.folder.iterdir()) == [], "whoever ends in order takes its target along"
    labels = [scrapes[-1].labels for scrapes in scraper.scrapes.values()]
    assert {(found["job"], found["role"]) for found in labels} == {
        *(("roadstead", role) for role in roles),
        *(("temporal", role) for role in roles | servers),
        ("vllm", "engine"),
    }
    assert {found["run"] for found in labels} == {finished}
    assert "temporal_activity_execution_latency_seconds_count" in scraper.scrapes["train-temporal"][-1].names()
    assert "acquire_shards_latency_count" in scraper.scrapes["temporal-server"][-1].names()
    assert "vllm:generation_tokens_total" in scraper.scrapes[engines.pop()][-1].names()
    for role in roles:
        seen = {name for scrape in scraper.scrapes[role] for name in scrape.names()}
        for metric in CATALOGUE:
            if metric.role in {role, "every"}:
                name = f"{metric.name}_count" if metric.kind == "histogram" else metric.name
                assert name in seen, (role, name)
    last = {role: scraper.scrapes[role][-1] for role in roles}
    for role, name in [
        *(("ledger", "reserve_slots"), ("ledger", "occupy_slot"), ("rollout", "rollout_group")),
        *(("train", "train_step"), ("orchestrator", "persist_batch"), ("orchestrator", "publish_weights")),
    ]:
        assert last[role].value("roadstead_activity_seconds_count", activity=name, outcome="completed") > 0
        assert last[role].value("roadstead_activity_seconds_count", activity=name, outcome="failed") == 0


def test_metrics_say_what_the_parquet_says(workplace: Workplace, finished: str, scraper: Scraper) -> None:
    """Ages, rewards and tokens of every step that was scraped, and the counters up to it, beside the batches on S3."""
    store, keys = workplace.store(finished)
    tables = []
    for record in steps.all_of(store, keys):
        commit = batches.find(store, keys, record.step)
        assert commit is not None
        tables.append(batches.read(store, commit).to_pandas())
    checked = set()
    for scrape in _settled(scraper.scrapes["orchestrator"]):
        step = int(scrape.value("roadstead_step", attempt="1"))
        upto = pd.concat(tables[: step + 1])
        table, lengths = tables[step], upto["response_token_ids"].map(len)
        expected = {
            "roadstead_batch_age_max_versions": (step - table["head_version"]).max(),
            "roadstead_batch_age_mean_versions": (step - table["head_version"]).mean(),
            "roadstead_batch_reward_mean": table["reward"].mean(),
            "roadstead_batch_reward_stddev": table["reward"].std(ddof=0),
            "roadstead_batch_advantage_stddev": table["advantage"].std(ddof=0),
            "roadstead_batch_response_tokens": table["response_token_ids"].map(len).sum(),
            "roadstead_batch_trajectories": len(table),
        }
        found = {name: scrape.value(name, attempt="1") for name in expected}
        assert found == pytest.approx(expected, rel=1e-5), step
        assert scrape.value("roadstead_trained_tokens_total") == lengths.sum()
        ages = upto["step"] - upto["head_version"]
        assert scrape.value("roadstead_trained_age_versions_sum") == ages.sum()
        for age in range(3):
            assert scrape.value("roadstead_trained_age_versions_bucket", le=f"{age}.0") == (ages <= age).sum()
        assert scrape.value("roadstead_over_bound_trajectories_total") == 0
        checked.add(step)
    assert checked, "steps are longer than the scrapes are apart"
    generated = scraper.scrapes["rollout"][-1]
    everything = pd.concat(tables)
    assert generated.value("roadstead_generated_tokens_total") == everything["response_token_ids"].map(len).sum()
    last = scraper.scrapes["orchestrator"][-1]
    assert last.value("roadstead_admission_bound_groups") == 12
    admissions = {
        scrape.values.get(("roadstead_step_admissions_groups", _FIRST)) for scrape in scraper.scrapes["orchestrator"]
    }
    assert 4 in admissions, "B under each version but the first, whose (S + 1) x B may pass between two looks"


_FIRST = (("attempt", "1"),)


def _settled(scrapes: list[Scrape]) -> list[Scrape]:
    """The first scrape of each step, where the one after it says the same: a step's number is set last, so the first
    that shows it was not taken while the next step's numbers were being set."""

    def numbers(scrape: Scrape) -> dict[str, float]:
        return {name: value for (name, labels), value in scrape.values.items() if labels == _FIRST and value == value}

    found: dict[float, Scrape | None] = {}
    for first, second in itertools.pairwise(scrape for scrape in scrapes if "roadstead_step" in scrape.names()):
        step = first.value("roadstead_step", attempt="1")
        found.setdefault(step, first if numbers(first) == numbers(second) else None)
    return [scrape for scrape in found.values() if scrape is not None]


def test_bad_input_is_named_and_nothing_is_left_running(workplace: Workplace, finished: str) -> None:
    unknown = workplace.roadstead("status", "no-such-run", check=False)
    assert unknown.returncode == 2 and "no-such-run" in unknown.stderr and "finished" in unknown.stderr
    missing = workplace.roadstead("batch", "show", finished, "99", check=False)
    assert missing.returncode == 2 and "99" in missing.stderr
    again = workplace.roadstead("run", str(workplace.folder / "finished.yaml"), check=False)
    assert again.returncode == 1 and "completed" in again.stderr and "roadstead resume finished" in again.stderr
    file = workplace.folder / "bad.yaml"
    file.write_text(tiny.config(workplace.folder, "bad", model={"path": "/nowhere"}).dump())
    bad = workplace.roadstead("run", str(file), check=False)
    assert bad.returncode == 2 and "model.path" in bad.stderr and "/nowhere" in bad.stderr


@pytest.mark.slow
def test_killing_workers_engine_and_trainer_in_mid_run_changes_no_total(workplace: Workplace) -> None:
    """SIGKILL to the orchestrator worker, the engine and the others, one after another while the run goes on."""
    process = workplace.start("killed", training__steps=14)
    store, keys = workplace.store("killed")
    victims = ["workers.orchestrator", "inference.launcher", "workers.rollout", "training.rank", "workers.ledger"]
    for number, victim in enumerate(victims):
        wait_for_step(store, keys, 2 * number + 1, process)
        found = [line for line in workplace.processes() if f"roadstead.{victim} " in line and "runs/killed" in line]
        # torchrun's agent names the rank's module in its own command line: the rank is what is killed.
        pids = [int(line.split()[0]) for line in found if "torch.distributed.run" not in line]
        assert pids, (victim, workplace.processes())
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
    live = json.loads(workplace.roadstead("status", "killed", "--json").stdout)["live"]
    assert live is None or (live["phase"] in {"running", "finished"} and live["version"] >= 10)
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, output
    assert "orchestrator-worker ended with -9; starting it again" in output
    check_run(workplace, "killed", steps_=14, bound=2)
    assert "56 admitted = 56 trained" in output, output


@pytest.mark.slow
def test_a_synchronous_run_is_interrupted_resumed_and_trains_on_nothing_stale(workplace: Workplace) -> None:
    process = workplace.start("synchronous", staleness={"max_staleness": 0, "groups_per_batch": 4}, training__steps=12)
    store, keys = workplace.store("synchronous")
    wait_for_step(store, keys, 2, process)
    second = workplace.roadstead("run", str(workplace.folder / "synchronous.yaml"), check=False)
    assert second.returncode == 1 and f"hosted by process {process.pid}" in second.stderr
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert not [line for line in workplace.processes() if "runs/synchronous" in line], "Ctrl-C leaves no process"
    assert len(steps.all_of(store, keys)) < 12
    resumed = workplace.roadstead("resume", "synchronous")
    assert "run synchronous goes on" in resumed.stdout
    check_run(workplace, "synchronous", steps_=12, bound=0)
    for record in steps.all_of(store, keys):
        commit = batches.find(store, keys, record.step)
        assert commit is not None
        spans = batches.read(store, commit)["version_spans"].to_pylist()
        assert {span["version"] for row in spans for span in row} == {record.step}, "every single token"


async def test_the_local_store_starts_for_a_command_when_nothing_is_up(tmp_path: Path) -> None:
    """Data is never out of reach, and a stack that a command started is gone with it."""
    place = Workplace(tmp_path)
    answer = await asyncio.to_thread(place.roadstead, "batch", "list", "nothing", check=False)
    assert answer.returncode == 2 and "there is no run yet" in answer.stderr
    assert "starting s3" in answer.stderr
    assert place.processes() == []

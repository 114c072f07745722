"""`roadstead evals`: what its table and its notes say of what is on record."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from roadstead.cli.evals import Evaluations, notes, read, table
from roadstead.config import parse
from roadstead.storage import evals, runs
from roadstead.storage.evals import EvaluationSettings, EvaluationSummary
from roadstead.storage.keys import RunKeys
from roadstead.storage.runs import RunRecord
from tests.support.memory_store import MemoryStore

KEYS = RunKeys("runs", "r")


def settings(**changes: Any) -> EvaluationSettings:
    values: dict[str, Any] = {
        "dataset": "d",
        "prompts": 4,
        "seed": 0,
        "environment": "a:b",
        "rewards": (),
        "chat_template": False,
        "group_size": 1,
        "temperature": 1.0,
        "max_tokens": 8,
        "max_turns": 1,
    }
    return EvaluationSettings(**{**values, **changes})


def summary(version: int, **changes: Any) -> EvaluationSummary:
    values: dict[str, Any] = {
        "run_id": "r",
        "attempt": 1,
        "version": version,
        "weights_digest": "w",
        "settings": settings(),
        "evaluated": 4,
        "samples": 4,
        "mean_reward": 0.125 * version,
        "unscored": 0,
        "components": {"correct": 0.5, "form[at]": 0.25},
        "errors": {},
        "mean_tokens": 3.5,
        "finish_reasons": {"stop": 4},
        "failures": {},
        "skipped": None,
        "seconds": 2.0,
        "digest": None,
        "data": None,
        "closed_at": "2026-11-30T00:00:00+00:00",
    }
    return EvaluationSummary(**{**values, **changes})


def shown(*closed: EvaluationSummary) -> list[str]:
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table("r", Evaluations(list(closed), [])))
    return console.export_text().splitlines()


def test_a_version_is_a_row_of_numbers_and_a_component_is_a_column() -> None:
    lines = shown(summary(0), summary(2, components={"correct": 1.0}))
    head = next(line for line in lines if "version" in line)
    assert "correct" in head and "form[at]" in head, "a name is no markup"
    row = next(line.split() for line in lines if " 0.250 " in line and "1.000" in line)
    assert row[1::2][:4] == ["2", "0.250", "1.000", "-"] and "4 of 4" in " ".join(row)


def test_what_was_not_evaluated_says_why() -> None:
    skipped = summary(2, evaluated=0, samples=0, mean_reward=None, skipped="VersionPassed: it serves 3")
    partly = summary(4, evaluated=3, failures={"BadRequest: too long": 1})
    text = "\n".join(shown(skipped, partly))
    assert "skipped: VersionPassed: it serves 3" in text and "1: BadRequest: too long" in text
    assert "0 of 4" in text and "3 of 4" in text


def test_the_notes_keep_a_reader_from_comparing_what_can_t_be_compared() -> None:
    other = settings(temperature=0.5)
    said = "\n".join(notes(Evaluations([summary(0), summary(2, settings=other), summary(4, settings=other)], [6])))
    assert "settings changed at version 2:" in said and "not on record: version 6" in said
    assert notes(Evaluations([summary(0), summary(2)], [])) == []
    assert "3 samples have no reward" in notes(Evaluations([summary(0, unscored=3)], []))[0]
    assert "no `evaluation` section" in notes(Evaluations([], []))[0]


def test_a_due_version_without_a_record_is_named() -> None:
    """Nothing is trained yet: version 0 is all there is to evaluate."""
    store = MemoryStore()
    config = parse(
        {
            "name": "r",
            "model": {"path": "m"},
            "data": {"prompts": "p.jsonl"},
            "training": {"steps": 3},
            "evaluation": {"prompts": "e.jsonl", "every": 2},
        },
        "test",
    )
    runs.create(
        store,
        KEYS,
        RunRecord(
            run_id="r",
            config=config.model_dump(mode="json"),
            versions={},
            model_digest="m",
            dataset_digest="d",
            dataset_rows=1,
            created_at="2026-11-30T00:00:00+00:00",
        ),
    )
    assert read(store, KEYS) == Evaluations([], [0])
    evals.close(store, KEYS, summary(0))
    assert read(store, KEYS) == Evaluations([summary(0)], [])

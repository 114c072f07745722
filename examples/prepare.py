"""What an example's `run.yaml` needs beside it: `python -m examples.prepare guessing examples/guessing --seed 0`.

Owns: which examples have a tiny model of their own, and the file of prompts. Never touches: how a model is built, what
a prompt is.
Invariant: model and prompts depend on the example and the seed alone.
A crash leaves: at most what `build_model` says; the prompts are written anew each time.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import examples.arithmetic.warmup
import examples.calculator.short
import examples.calculator.warmup
import examples.guessing.environment
import examples.guessing.warmup
import roadstead.environments.arithmetic
from examples.arithmetic.model import Recipe, build_model

COUNT = 1024
"""Prompts. More than the 40 steps of 8 draw: nothing repeats within a demo."""


class Task(NamedTuple):
    recipe: Recipe
    make_prompts: Callable[[int, int], list[dict[str, Any]]]
    """Given how many and the seed."""


TASKS = {
    "arithmetic": Task(
        Recipe("arithmetic-2", examples.arithmetic.warmup.warm_up), roadstead.environments.arithmetic.make_prompts
    ),
    "guessing": Task(
        Recipe("guessing-1", examples.guessing.warmup.warm_up), examples.guessing.environment.make_prompts
    ),
    "calculator": Task(
        Recipe("calculator-1", examples.calculator.warmup.warm_up), examples.calculator.short.make_prompts
    ),
}


def prepare(
    example: str, model: Path, prompts: Path, seed: int, progress: Callable[[float, str], None]
) -> dict[str, Any]:
    """Build the model in folder `model`, or find it there, and write file `prompts`. Returns as `build_model` does."""
    task = TASKS[example]
    manifest = build_model(model, seed, task.recipe, progress)
    write_prompts(prompts, task.make_prompts(COUNT, seed))
    return manifest


def write_prompts(out: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """As JSONL."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    parser = argparse.ArgumentParser(description="Build an example's model and write its prompts.")
    parser.add_argument("example", choices=TASKS)
    parser.add_argument("folder", type=Path, help="gets model-SEED/ and prompts.jsonl")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    manifest = prepare(
        given.example,
        given.folder / f"model-{given.seed}",
        given.folder / "prompts.jsonl",
        given.seed,
        lambda fraction, text: print(f"{fraction:4.0%} {text}", flush=True),
    )
    print(json.dumps(manifest, indent=2))


if __name__ == "__main__":
    main()

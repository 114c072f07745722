"""Build the game's model: `python -m examples.guessing.model OUT --seed 0`. Shape and tokenizer are the demo's."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from examples.arithmetic import model as tiny
from examples.guessing.warmup import warm_up

RECIPE = "guessing-1"
"""Raise its number with every change of game or warm-up: older folders are then rebuilt."""


def build_model(out_dir: Path, seed: int, progress: Callable[[float, str], None] | None = None) -> dict[str, Any]:
    """See `examples.arithmetic.model.build_model`."""
    return tiny.build_model(out_dir, seed, progress, tiny.Recipe(RECIPE, warm_up))


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the guessing game's model.")
    parser.add_argument("out", type=Path, help="folder to build it in")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    manifest = build_model(
        arguments.out, arguments.seed, lambda fraction, text: print(f"{fraction:4.0%} {text}", flush=True)
    )
    print(json.dumps(manifest, indent=2))


if __name__ == "__main__":
    main()

"""Write the game's prompts: `python -m examples.guessing.prompts OUT.jsonl --seed 0`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from examples.guessing.environment import make_prompts

COUNT = 1024
"""More than 40 steps of 8 prompts draw."""


def write_prompts(out: Path, seed: int) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("".join(json.dumps(row) + "\n" for row in make_prompts(COUNT, seed)))


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the guessing game's prompts.")
    parser.add_argument("out", type=Path, help="JSONL file to write")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    write_prompts(arguments.out, arguments.seed)


if __name__ == "__main__":
    main()

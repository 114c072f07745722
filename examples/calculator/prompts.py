"""Write the chat model's prompts: `python -m examples.calculator.prompts OUT.jsonl --seed 0`."""

from __future__ import annotations

import argparse
from pathlib import Path

from examples.calculator.environment import make_prompts
from examples.prepare import write_prompts

COUNT = 4096


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the calculator task's prompts for a chat model.")
    parser.add_argument("out", type=Path, help="JSONL file to write")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    write_prompts(given.out, make_prompts(COUNT, given.seed))


if __name__ == "__main__":
    main()

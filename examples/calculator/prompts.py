"""Write the task's prompts: `python -m examples.calculator.prompts OUT.jsonl --seed 0`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from examples.calculator.environment import make_prompts

COUNT = 4096


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the calculator task's prompts.")
    parser.add_argument("out", type=Path, help="JSONL file to write")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    arguments.out.write_text("".join(json.dumps(row) + "\n" for row in make_prompts(COUNT, arguments.seed)))


if __name__ == "__main__":
    main()

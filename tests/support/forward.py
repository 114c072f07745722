"""Logprobs by a plain Hugging Face forward pass: the reference that stored logprobs are checked against.

Run as a process (`python -m tests.support.forward`), so that the tests themselves never load torch.
stdin: {"folders": {version: model dir}, "rows": [{prompt, response, temperature, spans: [[version, start, end]]}]};
stdout: for each row, the logprob (nats) of each response token under the weights of its version.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any


def reference_logprobs(folders: dict[int, str], rows: list[dict[str, Any]]) -> list[list[float]]:
    request = json.dumps({"folders": folders, "rows": rows})
    answer = subprocess.run(
        [sys.executable, "-m", "tests.support.forward"],
        input=request,
        capture_output=True,
        text=True,
        timeout=180,
        check=True,
    )
    result: list[list[float]] = json.loads(answer.stdout.splitlines()[-1])
    return result


def main() -> None:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    request = json.load(sys.stdin)
    models = {
        int(version): AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True
        ).eval()
        for version, folder in request["folders"].items()
    }
    answers = []
    with torch.no_grad():
        for row in request["rows"]:
            ids = torch.tensor([row["prompt"] + row["response"]])
            first = len(row["prompt"]) - 1
            values = [0.0] * len(row["response"])
            for version, start, end in row["spans"]:
                logits = models[version](ids).logits[0].float() / row["temperature"]
                logprobs = torch.log_softmax(logits, -1)
                for i in range(start, end):
                    values[i] = logprobs[first + i, row["response"][i]].item()
            answers.append(values)
    print(json.dumps(answers))


if __name__ == "__main__":
    main()

"""A tiny random model, prompts and an environment: for tests that look at mechanics, not at learning."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from roadstead.config import RunConfig, parse
from roadstead.environments.protocol import Response, Reward, Transcript

_BUILD = """
import sys, torch
from examples.arithmetic.tokenizer import BOS, EOS, PAD, VOCABULARY_SIZE, build_tokenizer
from transformers import Qwen3Config, Qwen3ForCausalLM
torch.manual_seed(0)
Qwen3ForCausalLM(Qwen3Config(
    vocab_size=VOCABULARY_SIZE, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, head_dim=32, max_position_embeddings=512, tie_word_embeddings=False,
    initializer_range=0.3, pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS, dtype="float32",
)).save_pretrained(sys.argv[1])
build_tokenizer(512).save_pretrained(sys.argv[1])
"""


def build_model(folder: Path) -> Path:
    """In a process of its own, so that the test process never runs torch operations and stays free to fork."""
    subprocess.run([sys.executable, "-c", _BUILD, str(folder)], check=True, timeout=120, capture_output=True)
    return folder


class DigitsEnvironment:
    """Rewards the share of digits: a random model gets something between 0 and 1, so advantages are not all zero."""

    name = "digits"

    def reward(self, row: Mapping[str, Any], response: str, finish_reason: str) -> Reward:
        share = sum(c.isdigit() for c in response) / max(1, len(response))
        return Reward(share, {"digits": share})


class EchoEnvironment:
    """Up to three turns: what the model said last is said back to it. The reward is that of `DigitsEnvironment`."""

    name = "echo"

    def reset(self, row: Mapping[str, Any], seed: int) -> EchoEpisode:
        return EchoEpisode(row["prompt"])


class EchoEpisode:
    def __init__(self, start: str) -> None:
        self.start, self._turns = start, 0

    def step(self, response: Response) -> str | None:
        self._turns += 1
        return response.text[-2:] + "=" if self._turns < 3 else None

    def reward(self, transcript: Transcript) -> Reward:
        said = "".join(turn.text for turn in transcript.turns if turn.role == "assistant")
        return Reward(sum(c.isdigit() for c in said) / max(1, len(said)), {"turns": float(len(transcript.turns))})


def every_fifth(rows: list[dict[str, Any]]) -> str | None:
    """A filter."""
    return "a multiple of five" if int(rows[0]["prompt_id"][1:]) % 5 == 0 else None


def config(folder: Path, name: str, **changes: Any) -> RunConfig:
    """A run of short steps. `changes`: values by dotted key."""
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{i}+{i}=", "prompt_id": f"p{i}"}) + "\n" for i in range(40)))
    values: dict[str, Any] = {
        "name": name,
        "model": {"path": str(folder / "model")},
        "data": {"prompts": str(prompts), "environment": "tests.support.tiny:DigitsEnvironment"},
        "staleness": {"max_staleness": 2, "groups_per_batch": 4},
        "rollout": {"group_size": 4, "max_tokens": 40, "ignore_eos": True},
        "training": {"steps": 6, "learning_rate": 3e-3, "checkpoint_every": 2},
        "engine": {"max_model_len": 128},
    }
    for key, value in changes.items():
        section, _, name_ = key.partition("__")
        if name_:
            values[section][name_] = value
        else:
            values[section] = value
    return parse(values, "test")

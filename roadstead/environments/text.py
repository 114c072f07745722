"""Between text and token ids: the model's own tokenizer.

Owns: how a prompt becomes ids and how response ids become text. Never touches: engines, rewards.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any


class TextCodec:
    """Encode prompts, decode responses. `chat`: wrap a prompt as one user turn of the model's chat template."""

    def __init__(self, folder: Path, *, chat: bool) -> None:
        self._tokenizer = _load(folder)
        self._chat = chat
        if chat and not self._tokenizer.chat_template:
            raise ValueError(
                f"data.chat_template: true, but the tokenizer in {folder} has no chat template; "
                "set data.chat_template: false or use a chat model"
            )

    def encode(self, prompt: str) -> tuple[int, ...]:
        if self._chat:
            turn = [{"role": "user", "content": prompt}]
            ids = self._tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=False)
        else:
            ids = self._tokenizer(prompt)["input_ids"]
        return tuple(ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of response tokens, special tokens left out."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text


def _load(folder: Path) -> Any:
    # Imported here: only the rollout worker needs it. The generic class reads all that tokenizer.json and
    # tokenizer_config.json say; AutoTokenizer would import torch first (7 s of a worker's start, 400 MB).
    if (folder / "tokenizer.json").exists():
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True)

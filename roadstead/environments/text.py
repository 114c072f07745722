"""Between text and token ids: the model's own tokenizer.

Owns: how a prompt and an observation become ids and how response ids become text. Never touches: engines, rewards.
Invariant: an observation's ids depend on the observation and on the one token before it alone, so that they are
appended to what was sampled; no token of an earlier turn is ever made again from text.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from roadstead.environments.protocol import Message, Observation

_ANSWER, _SAID = "\N{SNOWMAN}\N{COMET}", "\N{UMBRELLA}\N{COMET}"
"""Stand for the model's turn and for what is said after it, to find them in a rendered chat: no template holds them."""


class TextCodec:
    """Encode prompts and observations, decode responses. `chat`: by the model's chat template."""

    def __init__(self, folder: Path, *, chat: bool) -> None:
        self._tokenizer = _load(folder)
        self._chat = chat
        if chat and not self._tokenizer.chat_template:
            raise ValueError(
                f"data.chat_template: true, but the tokenizer in {folder} has no chat template; "
                "set data.chat_template: false or use a chat model"
            )

    def encode(self, prompt: str | Sequence[Message]) -> tuple[int, ...]:
        """Ids of a prompt. With a chat template, a text is one user message. Raises ValueError."""
        if self._chat:
            turns = (
                [{"role": "user", "content": prompt}]
                if isinstance(prompt, str)
                else [dict(message) for message in prompt]
            )
            ids = self._tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
        elif isinstance(prompt, str):
            ids = self._tokenizer(prompt)["input_ids"]
        else:
            raise ValueError(
                "data.chat_template: false, but the environment begins with messages; "
                "set data.chat_template: true or let the environment begin with text"
            )
        return tuple(ids)

    def observe(self, observation: Observation, last: int) -> tuple[int, ...]:
        """Ids that go between two turns of the model. last: id of the token before them. Raises ValueError.

        With a chat template: all that it writes from the end of the model's turn to the beginning of the next one,
        less the end token if that was sampled.
        """
        if observation.token_ids is not None:
            return observation.token_ids
        text = observation.text
        if self._chat:
            text = self._between(observation).removeprefix(self._tokenizer.decode([last]))
        return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def response(self, text: str, *, ended: bool) -> tuple[int, ...]:
        """Ids of a response that is known as text. ended: with the end token behind it, if the tokenizer has one."""
        ids = list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        if ended and self._tokenizer.eos_token_id is not None:
            ids.append(self._tokenizer.eos_token_id)
        return tuple(ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of response tokens, special tokens left out."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text

    def _between(self, observation: Observation) -> str:
        if _SAID not in self._after_answer(observation.role, _SAID):
            raise ValueError(
                f"data.chat_template: the model's template leaves out a message of role {observation.role!r} after "
                "a turn of the assistant; let the environment answer in another role, such as 'user'"
            )
        return self._after_answer(observation.role, observation.text)

    def _after_answer(self, role: str, text: str) -> str:
        rendered: str = self._tokenizer.apply_chat_template(
            [
                {"role": "user", "content": "-"},
                {"role": "assistant", "content": _ANSWER},
                {"role": role, "content": text},
            ],
            add_generation_prompt=True,
            tokenize=False,
        )
        return rendered.partition(_ANSWER)[2]


def _load(folder: Path) -> Any:
    # Imported here: only the rollout worker needs it. The generic class reads all that tokenizer.json and
    # tokenizer_config.json say; AutoTokenizer would import torch first (7 s of a worker's start, 400 MB).
    if (folder / "tokenizer.json").exists():
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True)

"""Prompts become ids and responses become text by the model's own tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.arithmetic.tokenizer import BOS, EOS, PAD, build_tokenizer
from roadstead.environments.text import TextCodec


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("tokenizer")
    tokenizer = build_tokenizer(64)
    tokenizer.save_pretrained(place / "plain")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}={% endfor %}"
    tokenizer.save_pretrained(place / "chat")
    return place


def test_text_comes_back_without_special_tokens(folder: Path) -> None:
    codec = TextCodec(folder / "plain", chat=False)
    ids = codec.encode("17+25=")
    assert len(ids) == 6 and not {BOS, EOS, PAD} & set(ids)
    assert codec.decode((*ids, EOS)) == "17+25="


def test_a_chat_template_wraps_the_prompt_as_one_user_turn(folder: Path) -> None:
    plain, chat = TextCodec(folder / "plain", chat=False), TextCodec(folder / "chat", chat=True)
    assert chat.encode("1+1") == plain.encode("1+1=")


def test_a_missing_chat_template_is_refused_with_the_remedy(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.chat_template: false"):
        TextCodec(folder / "plain", chat=True)

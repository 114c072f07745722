"""Prompts become ids and responses become text by the model's own tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.arithmetic.tokenizer import BOS, EOS, PAD, build_tokenizer
from roadstead.environments.protocol import Observation
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


_CHATML = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<eos>;{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def _chat(folder: Path, tmp_path: Path, template: str) -> TextCodec:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "plain")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(tmp_path)
    return TextCodec(tmp_path, chat=True)


def test_a_plain_observation_is_its_text_alone(folder: Path) -> None:
    codec = TextCodec(folder / "plain", chat=False)
    assert codec.decode(codec.observe(Observation("higher;"), EOS)) == "higher;"
    assert codec.observe(Observation("ignored", token_ids=(7, 8)), EOS) == (7, 8)


def test_a_turn_in_a_chat_is_what_the_template_writes_between_two_turns_of_the_model(
    folder: Path, tmp_path: Path
) -> None:
    codec, plain = _chat(folder, tmp_path, _CHATML), TextCodec(folder / "plain", chat=False)
    start = codec.encode([{"role": "user", "content": "1-15:"}])
    assert start == plain.encode("<|user|>1-15:<eos>;<|assistant|>")
    sampled = (*plain.encode("8"), EOS)
    between = codec.observe(Observation("higher", role="tool"), EOS)
    whole = codec.encode(
        [
            {"role": "user", "content": "1-15:"},
            {"role": "assistant", "content": "8"},
            {"role": "tool", "content": "higher"},
        ]
    )
    assert (*start, *sampled, *between) == whole, "appended ids are the chat as the template writes it, at once"
    cut = codec.observe(Observation("higher", role="tool"), plain.encode("8")[0])
    assert cut == (EOS, *between), "a turn that did not sample its end token gets it"


def test_a_template_that_drops_a_role_is_refused_with_the_remedy(folder: Path, tmp_path: Path) -> None:
    template = "{% for m in messages if m['role'] != 'tool' %}{{ m['content'] }};{% endfor %}"
    codec = _chat(folder, tmp_path, template)
    assert codec.observe(Observation("a"), EOS)
    with pytest.raises(ValueError, match="role 'tool'"):
        codec.observe(Observation("a", role="tool"), EOS)


def test_messages_need_a_chat_template(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.chat_template: true"):
        TextCodec(folder / "plain", chat=False).encode([{"role": "user", "content": "hi"}])

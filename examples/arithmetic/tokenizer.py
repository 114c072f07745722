"""The demo model's tokenizer: one token a character.

Owns: the vocabulary and its ids. Never touches: weights, files.
Invariant: there are exactly VOCABULARY_SIZE ids and each has a text, so whatever is sampled can be decoded.
A crash leaves: nothing, it is pure.
"""

from __future__ import annotations

from typing import Any

PAD, BOS, EOS, UNKNOWN = range(4)
SPECIALS = ("<pad>", "<bos>", "<eos>", "<unk>")
CHARACTERS = "0123456789+-*/=;:.,?!()[]{}<>_'\" \nabcdefghijklmnopqrstuvwxyz"
VOCABULARY = {text: index for index, text in enumerate((*SPECIALS, *CHARACTERS))}
VOCABULARY_SIZE = len(VOCABULARY)


def encode(text: str) -> list[int]:
    """Ids of `text`, as the saved tokenizer gives them. Raises KeyError on a character it doesn't know."""
    return [VOCABULARY[character] for character in text]


def build_tokenizer(max_length: int) -> Any:
    """A `PreTrainedTokenizerFast` that adds no special tokens. max_length: of the model, in tokens."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token=SPECIALS[UNKNOWN]))
    # `.` would leave line breaks out, and this regex engine takes no flags.
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(SPECIALS))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIALS[PAD],
        bos_token=SPECIALS[BOS],
        eos_token=SPECIALS[EOS],
        unk_token=SPECIALS[UNKNOWN],
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )

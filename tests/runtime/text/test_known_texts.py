"""Texts that begin like a known one have the tokens that they have alone."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from carryall.runtime.text.known_texts import KnownTexts, common_length

SPECIAL = ["<|im_start|>", "<|im_end|>", "<tool>", "<tool>x", "[A", "A]", "__"]
PIECES = [
    *SPECIAL,
    "word ",
    " two",
    "  ",
    "x",
    "A",
    "_",
    "<|im_",
    "\n",
    "\u2581",
    "e\u0301",
    "long text " * 500,
]


def tokenizer(kind: str) -> Tokenizer:
    """A tokenizer of single characters, whose tokens depend on spaces and on the beginning of a text."""
    letters = sorted({*"".join(PIECES), "\u2581", *pre_tokenizers.ByteLevel.alphabet()})
    merges = [("l", "o"), ("w", "o"), ("\u2581", "t"), ("\u0120", "t"), ("_", "x")]
    vocabulary = {text: n for n, text in enumerate([*letters, *(a + b for a, b in merges)])}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[m for m in merges if set(m) <= set(vocabulary)]))
    if kind == "bytes":
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    elif kind == "first":
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    else:
        made.normalizer = normalizers.Sequence(
            [normalizers.NFC(), normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        )
    strips = kind == "strips"
    made.add_special_tokens([AddedToken(text, normalized=False, lstrip=strips) for text in SPECIAL])
    return made


@pytest.mark.long
@settings(deadline=None, max_examples=60)
@given(
    kind=st.sampled_from(["bytes", "first", "prepends", "strips"]),
    texts=st.lists(st.lists(st.sampled_from(PIECES), max_size=12), min_size=1, max_size=3),
    begin=st.lists(st.sampled_from(PIECES), min_size=1, max_size=8),
    cut=st.integers(0, 9000),
)
def test_tokens_are_those_of_the_text_alone(
    kind: str, texts: list[list[str]], begin: list[str], cut: int
) -> None:
    made = tokenizer(kind)
    known = KnownTexts(made.get_added_tokens_decoder())
    whole = ["".join([*begin, *rest]) for rest in texts]
    for text in [*whole, *(text[:cut] for text in whole), *whole]:
        alone = made.encode(text, add_special_tokens=False).ids
        assert known.encode(text, lambda part: made.encode(part, add_special_tokens=False).ids) == alone


@pytest.mark.parametrize(("strips", "encoded"), [(False, 11), (True, 5022)])
def test_what_a_known_text_begins_with_is_not_tokenized_again(strips: bool, encoded: int) -> None:
    """Unless the special token takes spaces away from what stands in front of it."""
    made = tokenizer("strips" if strips else "bytes")
    known, parts = KnownTexts(made.get_added_tokens_decoder()), list[str]()

    def encode(part: str) -> Sequence[int]:
        parts.append(part)
        ids: list[int] = made.encode(part, add_special_tokens=False).ids
        return ids

    first = "a long text" + " x" * 2500
    known.encode(first + "<|im_end|>", encode)
    known.encode(first + "<|im_end|>y", encode)
    assert len(parts[-1]) == encoded
    known.encode("another" + first, encode)
    assert parts[-1] == "another" + first


def test_texts_of_other_salts_are_not_known() -> None:
    made = tokenizer("bytes")
    known, parts = KnownTexts(made.get_added_tokens_decoder()), list[str]()

    def encode(part: str) -> Sequence[int]:
        parts.append(part)
        ids: list[int] = made.encode(part, add_special_tokens=False).ids
        return ids

    text = "a long text" + " x" * 2500 + "<|im_end|>"
    tokens = [known.encode(text, encode, salt) for salt in ("alice", "bob", "", "bob")]
    assert tokens == [tokens[0]] * 4
    assert list(map(len, parts)) == [len(text)] * 3 + [len("<|im_end|>")]


@given(st.text("ab", max_size=9), st.text("ab", max_size=9))
def test_common_length(first: str, second: str) -> None:
    length = common_length(first, second)
    assert first[:length] == second[:length]
    assert first[length : length + 1] != second[length : length + 1] or length == len(first) == len(second)

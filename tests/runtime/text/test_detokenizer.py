"""Incremental detokenization equals decoding all tokens at once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_kit import WORDS, byte_level, word_level

from carryall.runtime.text.detokenizer import Detokenizer
from carryall.runtime.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def by_bytes(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_level(tmp_path_factory.mktemp("bytes"))


@pytest.fixture(scope="module")
def by_words(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return word_level(tmp_path_factory.mktemp("words"))


def stream(
    tokenizer: Tokenizer, tokens: list[int], context: tuple[int, ...] = (), skip: bool = True
) -> list[str]:
    detokenizer = Detokenizer(tokenizer, context, skip_special_tokens=skip)
    return [*(detokenizer.push(token) for token in tokens), detokenizer.end()]


@pytest.mark.long
@settings(max_examples=300, deadline=None)
@given(tokens=st.lists(st.integers(0, 257), max_size=60), skip=st.booleans())
def test_any_bytes(by_bytes: Tokenizer, tokens: list[int], skip: bool) -> None:
    whole = by_bytes.decode(tokens, skip_special_tokens=skip)
    assert "".join(stream(by_bytes, tokens, skip=skip)) == whole
    at_once = Detokenizer(by_bytes, skip_special_tokens=skip).text_of(tokens)
    assert at_once == (None if "\N{REPLACEMENT CHARACTER}" in whole else whole)


@pytest.mark.long
@settings(max_examples=300, deadline=None)
@given(pieces=st.lists(st.one_of(st.sampled_from(WORDS), st.text(max_size=3)), max_size=12))
def test_words_and_bytes_of_whole_characters(by_words: Tokenizer, pieces: list[str]) -> None:
    tokens: list[int] = []
    for piece in pieces:
        known = by_words.token_id(piece)
        in_bytes = [by_words.token_id(f"<0x{byte:02X}>") for byte in piece.encode()]
        tokens += [known] if known is not None else [token for token in in_bytes if token is not None]
    assert "".join(stream(by_words, tokens)) == by_words.decode(tokens)
    assert Detokenizer(by_words).text_of(tokens) in (by_words.decode(tokens), None)


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=20), cut=st.integers(0, 20))
def test_text_after_a_prompt_is_what_the_whole_has_more(by_bytes: Tokenizer, text: str, cut: int) -> None:
    head, tail = text[:cut], text[cut:]
    tokens = by_bytes.encode(tail, add_special_tokens=False)
    context = tuple(by_bytes.encode(head)[-6:])
    assert "".join(stream(by_bytes, tokens, context)) == tail
    assert Detokenizer(by_bytes, context).text_of(tokens) in (tail, None)


def test_a_word_after_a_prompt_keeps_its_space(by_words: Tokenizer) -> None:
    the, cat = by_words.token_id("▁the"), by_words.token_id("▁cat")
    assert the is not None
    assert cat is not None
    assert stream(by_words, [cat], (the,))[0] == " cat"
    assert stream(by_words, [cat])[0] == "cat"
    assert "".join(stream(by_words, [1, the, 2, cat], (1,))) == "the cat"


def test_a_split_character_is_held_back_until_it_is_whole(by_bytes: Tokenizer) -> None:
    tokens = by_bytes.encode("a中b", add_special_tokens=False)
    assert stream(by_bytes, tokens) == ["a", "", "", "中", "b", ""]
    assert stream(by_bytes, tokens[:3]) == ["a", "", "", "\N{REPLACEMENT CHARACTER}"]


def test_special_tokens_are_left_out_or_shown(by_bytes: Tokenizer) -> None:
    (letter,) = by_bytes.encode("a", add_special_tokens=False)
    assert stream(by_bytes, [letter, 257, letter]) == ["a", "", "a", ""]
    assert stream(by_bytes, [letter, 257, letter], skip=False) == ["a", "</s>", "a", ""]


def test_work_per_token_does_not_grow_with_the_text(
    by_bytes: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[int] = []
    decode = by_bytes.decode

    def counting(tokens: list[int], *, skip_special_tokens: bool = True) -> str:
        decoded.append(len(tokens))
        return decode(tokens, skip_special_tokens=skip_special_tokens)

    monkeypatch.setattr(by_bytes, "decode", counting)
    (letter,) = by_bytes.encode("a", add_special_tokens=False)
    (broken,) = [t for t in range(256) if decode([t]) == "\N{REPLACEMENT CHARACTER}"][:1]
    for tokens, most in (([letter] * 2000, 2), ([broken] * 2000, 100)):
        decoded.clear()
        stream(by_bytes, tokens)
        assert max(decoded) <= most

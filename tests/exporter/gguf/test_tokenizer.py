"""Tokenizers of GGUF files; the expected rules are those of llama.cpp's src/llama-vocab.cpp."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, pre_tokenizers

from carryall.errors import CarryallWarning, CheckpointError
from carryall.exporter.gguf.tokenizer import tokenizer_files

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
WORDS = ["ab", "abc", "xyz"]  # no merges lead to xyz
SPECIAL = ["<s>", "</s>"]


def read(*, special: tuple[str, ...] = (), **changes: Any) -> tuple[Tokenizer, dict[str, Any]]:
    tokens = [*BYTES, *WORDS, *SPECIAL, *special]
    named = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [1] * (len(BYTES) + len(WORDS)) + [3] * (len(SPECIAL) + len(special)),
        "merges": ["a b", "ab c"],
        "bos_token_id": tokens.index("<s>"),
        "eos_token_id": tokens.index("</s>"),
        **changes,
    }
    metadata = {f"tokenizer.ggml.{name}": value for name, value in named.items() if value is not None}
    files = tokenizer_files(metadata, len(tokens))
    return Tokenizer.from_str(files["tokenizer.json"]), json.loads(files["generation_config.json"])


@pytest.mark.parametrize(
    ("pre", "tokens"),
    [
        *(
            (name, ["<s>", "xyz"])
            for name in ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "tekken", "lfm2")
        ),
        *((name, ["x", "y", "z"]) for name in ("gpt-2", "smaug-bpe", "dbrx", "qwen2", "smollm", "gpt-4o")),
    ],
)
def test_some_begin_with_bos_and_keep_words_that_are_tokens(pre: str, tokens: list[str]) -> None:
    assert read(pre=pre)[0].encode("xyz").tokens == tokens


@pytest.mark.parametrize(("pre", "words"), [("qwen2", 3), ("qwen35", 2)])
def test_marks_are_part_of_words_in_newer_files(pre: str, words: int) -> None:
    pieces = read(pre=pre)[0].pre_tokenizer.pre_tokenize_str("e\u0301a e")
    assert len(pieces) == words


@pytest.mark.parametrize(("pre", "stated"), [("llama-bpe", False), ("gpt-2", True)])
def test_the_file_decides_about_bos(pre: str, stated: bool) -> None:
    tokens = read(pre=pre, add_bos_token=stated)[0].encode("abc").tokens
    assert tokens == (["<s>", "abc"] if stated else ["abc"])


def test_a_file_without_the_name_of_its_pre_tokenizer_is_warned_of() -> None:
    with pytest.warns(CarryallWarning, match="does not name its pre-tokenizer"):
        tokenizer, _ = read(pre=None)
    pieces = [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str("a+b 12345 c  d")]
    assert pieces == ["a", "+", "b", "\u0120", "123", "45", "\u0120c", "\u0120", "\u0120d"]


def test_a_pre_tokenizer_that_is_no_name_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"'tokenizer\.ggml\.pre' is \[1\], no name"):
        read(pre=[1])


@pytest.mark.parametrize(
    ("special", "given", "ends"),
    [
        (("<|eot_id|>",), None, ["</s>", "<|eot_id|>"]),
        (("<|im_end|>", "<|end|>"), None, ["</s>", "<|im_end|>"]),
        (("<|end|>",), None, ["</s>", "<|end|>"]),
        (("<|end|>", "<|return|>"), None, ["</s>"]),
        (("<|eot_id|>", "<|end|>"), "<|end|>", ["</s>", "<|end|>"]),
        ((), None, ["</s>"]),
    ],
)
def test_the_end_of_a_turn_is_found_by_its_text(
    special: tuple[str, ...], given: str | None, ends: list[str]
) -> None:
    tokens = [*BYTES, *WORDS, *SPECIAL, *special]
    number = None if given is None else tokens.index(given)
    _, found = read(special=special, eot_token_id=number)
    assert [tokens[token] for token in found["eos_token_id"]] == ends


@given(
    st.dictionaries(st.text("ab\u00e9\U0001f600", min_size=1, max_size=5), st.sampled_from([-2.0, -1.0, 0.0]))
)
def test_sentencepiece_merges_are_all_pairs_of_tokens_that_make_a_token(scores: dict[str, float]) -> None:
    tokens = list(scores)
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": list(scores.values()),
    }
    content = json.loads(tokenizer_files(metadata, len(tokens))["tokenizer.json"])
    pairs = [(left, right) for left in tokens for right in tokens if left + right in scores]
    pairs.sort(key=lambda pair: (-scores["".join(pair)], tokens.index("".join(pair)), tokens.index(pair[0])))
    assert content["model"]["merges"] == [list(pair) for pair in pairs]

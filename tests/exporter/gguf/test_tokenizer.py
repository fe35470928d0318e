"""Tokenizers of GGUF files; the expected rules are those of llama.cpp's src/llama-vocab.cpp."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, pre_tokenizers

from carryall.errors import CarryallWarning, CheckpointError, PackageError
from carryall.exporter.gguf.tokenizer import gguf_tokenizer
from carryall.exporter.gguf.vocabulary import VOCABULARY_FILE
from carryall.runtime.text.tokenizer import Tokenizer as TextTokenizer

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
    files = gguf_tokenizer(metadata, len(tokens)).files()
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
    content = json.loads(gguf_tokenizer(metadata, len(tokens)).files()["tokenizer.json"])
    pairs = [(left, right) for left in tokens for right in tokens if left + right in scores]
    pairs.sort(key=lambda pair: (-scores["".join(pair)], tokens.index("".join(pair)), tokens.index(pair[0])))
    assert content["model"]["merges"] == [list(pair) for pair in pairs]


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_the_form_that_opens_quickly_is_the_same_tokenizer(kind: str, tmp_path: Path) -> None:
    special = ["<s>", "</s>", "<|tool|>", "\n\n", "\u2581\u2581"]
    words = (
        [*BYTES, *WORDS, "\U0001f600", *special]
        if kind == "gpt2"
        else [*"abcxyz\u2581", *WORDS, "<0x0A>", *special]
    )
    tokens = list(dict.fromkeys(words))
    types = [3 if token in special[:2] else 4 if token in special else 1 for token in tokens]
    metadata = {
        "model": kind,
        "pre": "qwen2",
        "tokens": tokens,
        "token_type": types,
        "merges": ["a b", "ab c"],
        "scores": [-float(number) for number in range(len(tokens))],
        "bos_token_id": tokens.index("<s>"),
    }
    tokenizer = gguf_tokenizer({f"tokenizer.ggml.{k}": v for k, v in metadata.items()}, len(tokens))
    for name, folder in (("whole", tokenizer.files()), ("quick", tokenizer.write_to_open(tmp_path))):
        (tmp_path / name).mkdir()
        for file, content in folder.items():
            (tmp_path / name / file).write_text(content, encoding="utf-8")
    (tmp_path / VOCABULARY_FILE).rename(tmp_path / "quick" / VOCABULARY_FILE)
    whole, quick = (TextTokenizer(tmp_path / name) for name in ("whole", "quick"))
    assert json.loads(quick.to_json()) == json.loads(whole.to_json())
    text = "ab abc  xyz\n\n<|tool|></s> é\U0001f600"
    assert quick.encode(text) == whole.encode(text)
    assert quick.special_token_ids == whole.special_token_ids


def test_a_damaged_vocabulary_is_told(tmp_path: Path) -> None:
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["a"],
        "tokenizer.ggml.scores": [0.0],
    }
    for file, content in gguf_tokenizer(metadata, 1).write_to_open(tmp_path).items():
        (tmp_path / file).write_text(content)
    path = tmp_path / VOCABULARY_FILE
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(PackageError, match="damaged"):
        TextTokenizer(tmp_path)

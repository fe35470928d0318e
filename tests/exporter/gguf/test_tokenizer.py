"""Tokenizers of GGUF files; the expected rules are those of llama.cpp's src/llama-vocab.cpp."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, pre_tokenizers

from carryall.errors import CarryallWarning, CheckpointError, PackageError, RequestError
from carryall.exporter.gguf.tokenizer import GgufTokenizer, gguf_tokenizer
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


FALLBACK = [f"<0x{byte:02X}>" for byte in range(256)]
KINDS = ["gpt2", "llama", "llama without a space before"]


def _small(kind: str) -> GgufTokenizer:
    """Return a tokenizer with added tokens that contain others, spaces and line breaks."""
    special = ["<s>", "</s>", "<|tool|>", "<|tool", "\n\n", "\u2581\u2581"]
    words = (
        [*BYTES, "ab", "abc", "bc", "\u0120a", "\u0120ab", "\u00c3\u00a9", "xyz", *special]
        if kind == "gpt2"
        else [*"abcxyz\u2581\u00e9", "ab", "abc", "bc", "\u2581a", "\u2581ab", *FALLBACK, "<unk>", *special]
    )
    tokens = list(dict.fromkeys(words))
    types = [3 if token in special[:2] else 4 if token in special else 1 for token in tokens]
    metadata = {
        "model": kind.split()[0],
        "pre": "qwen2",
        "tokens": tokens,
        "token_type": types,
        "merges": ["b c", "a b", "\u0120 a", "ab c", "\u0120a b", "\u00c3 \u00a9"],
        "scores": [-float(number % 7) for number in range(len(tokens))],
        "bos_token_id": tokens.index("<s>"),
        "add_space_prefix": kind == "llama",
    }
    if kind != "gpt2":
        metadata["unknown_token_id"] = tokens.index("<unk>")
    return gguf_tokenizer({f"tokenizer.ggml.{k}": v for k, v in metadata.items()}, len(tokens))


@pytest.fixture(scope="module", params=KINDS)
def forms(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of one tokenizer: of a package, and of a model that runs in place."""
    tokenizer, root = _small(request.param), tmp_path_factory.mktemp("forms")
    folders = root / "whole", root / "stored"
    for folder in folders:
        folder.mkdir()
    for folder, files in zip(folders, (tokenizer.files(), tokenizer.write_to_open(folders[1])), strict=True):
        for file, content in files.items():
            (folder / file).write_text(content, encoding="utf-8")
    return folders


def test_the_form_that_opens_quickly_is_the_same_tokenizer(forms: tuple[Path, Path]) -> None:
    whole, stored = (TextTokenizer(folder) for folder in forms)
    assert stored.vocabulary == whole.vocabulary
    assert stored.vocab_size == whole.vocab_size
    assert {token: stored.token_id(token) for token in whole.vocabulary} == whole.vocabulary
    assert stored.token_id("other") is None
    assert stored.special_token_ids == whole.special_token_ids
    assert stored.coverage == whole.coverage
    assert json.loads(stored.to_json()) == json.loads(whole.to_json())


PIECES = [
    *"abcxyz",
    "ab",
    "bc",
    " ",
    "  ",
    "\n",
    "\n\n",
    "<|tool|>",
    "<|tool",
    "|>",
    "</s>",
    "\u2581",
    "é",
    "\U0001f600",
]


@pytest.mark.long
@given(texts=st.lists(st.lists(st.sampled_from(PIECES), max_size=12).map("".join), min_size=1, max_size=4))
def test_tokens_of_parts_of_the_vocabulary_are_those_of_all(
    forms: tuple[Path, Path], texts: list[str]
) -> None:
    """Tokens that a text needs are added text by text."""
    whole, stored = (TextTokenizer(folder) for folder in forms)
    for text in texts:
        tokens = stored.encode(text)
        assert tokens == whole.encode(text)
        for skip in (False, True):
            found = stored.decode(tokens, skip_special_tokens=skip)
            assert found == whole.decode(tokens, skip_special_tokens=skip)


def test_after_long_texts_all_tokens_are_read(forms: tuple[Path, Path]) -> None:
    whole, stored = (TextTokenizer(folder) for folder in forms)
    for text in ("ab " * 700, "abc<|tool|>" * 2000, "x", "yz " * 16_000, "é \n\n ab"):
        assert stored.encode(text) == whole.encode(text)
    assert stored.decode([0, 10**6]) == whole.decode([0, 10**6])
    for wrong in ([-1], ["a"], [1.5]):
        with pytest.raises(RequestError, match="integers of at least 0"):
            stored.decode(wrong)  # type: ignore[arg-type]


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

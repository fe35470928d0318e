"""Public reports of tokens: those of GGUF files, of chats that begin twice, of spaces that were lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from llm_kit import toy_model
from text_kit import word_level
from tokenizers import Tokenizer, pre_tokenizers

from carryall import LLM, SamplingParams
from carryall.errors import UnsupportedModelError
from carryall.exporter.gguf.keys import check_keys
from carryall.exporter.gguf.tokenizer import gguf_tokenizer
from carryall.runtime.text.detokenizer import Detokenizer

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
BEGIN = 256


def gguf(tokens: list[str], kinds: list[int], **changes: Any) -> Tokenizer:
    """Return the tokenizer of a GGUF file with byte-level tokens, then ``tokens`` of ``kinds``."""
    listed = [*BYTES, *tokens]
    named = {
        "model": "gpt2",
        "pre": "qwen35",
        "tokens": listed,
        "token_type": [NORMAL] * len(BYTES) + kinds,
        "merges": [],
        "eos_token_id": listed.index("<end>"),
        **changes,
    }
    metadata = {f"tokenizer.ggml.{name}": value for name, value in named.items()}
    return Tokenizer.from_str(gguf_tokenizer(metadata, len(listed)).files()["tokenizer.json"])


@pytest.mark.parametrize(
    "source", ["FlashML-org/FreeToken#315", "huggingface/transformers#49008", "huggingface/candle#3473"]
)
def test_user_defined_tokens_are_whole(source: str) -> None:
    """They were split into tokens of their characters, so each prompt differed from llama.cpp's."""
    read = gguf(["<end>", "<think>", "</think>"], [CONTROL, USER_DEFINED, USER_DEFINED])
    tokens = read.encode("a<think>b</think><end>", add_special_tokens=False).tokens
    assert tokens == ["a", "<think>", "b", "</think>", "<end>"], source
    # They are text that a model may write; control tokens are not.
    assert read.decode(read.encode("<think>b<end>").ids, skip_special_tokens=True) == "<think>b", source


def test_a_list_of_added_tokens_is_refused_by_name() -> None:
    """huggingface/candle#3641: it was not read, and its tokens were split."""
    with pytest.raises(UnsupportedModelError, match=r"tokenizer\.ggml\.added_tokens"):
        check_keys({"tokenizer.ggml.added_tokens": ["<think>"]}, "llama", frozenset())


@pytest.mark.parametrize(
    ("source", "stated", "tokens"),
    [
        # The first of two tokens in front of GLM's chats, where the file adds none.
        ("ggml-org/llama.cpp#15086", False, ["a"]),
        ("ggml-org/llama.cpp#3966", False, ["a"]),
        ("ggml-org/llama.cpp#3966", True, ["<begin>", "a"]),
    ],
)
def test_a_file_says_whether_texts_begin_with_a_token(source: str, stated: bool, tokens: list[str]) -> None:
    begin = {"bos_token_id": len(BYTES) + 1, "add_bos_token": stated}
    read = gguf(["<end>", "<begin>"], [CONTROL, CONTROL], **begin)
    assert read.encode("a").tokens == tokens, source


@pytest.mark.parametrize(
    "source",
    [
        *("sgl-project/sglang#888", "abetlen/llama-cpp-python#1501", "janhq/cortex.cpp#618"),
        *("huggingface/open-r1#462", "deepseek-ai/DeepSeek-R1#151", "unslothai/unsloth#10312"),
        "allenai/reward-bench#164",
    ],
)
def test_a_chat_begins_once(source: str, tmp_path: Path) -> None:
    """A tokenizer that adds a token in front added it to chats whose template writes it."""
    with LLM(toy_model(tmp_path)) as llm:
        (answer,) = llm.chat([{"role": "user", "content": "a"}], SamplingParams(max_tokens=1))
        assert answer.prompt_token_ids[0] == BEGIN, source
        assert answer.prompt_token_ids.count(BEGIN) == 1
        (answer,) = llm.generate("a", SamplingParams(max_tokens=1))
        assert answer.prompt_token_ids[0] == BEGIN
        assert len(answer.prompt_token_ids) == 2


@pytest.mark.parametrize(
    ("source", "text"),
    [
        # Two or more spaces in front lost one of their own.
        ("huggingface/transformers#47862", "  the cat"),
        # All spaces of the first token.
        ("huggingface/tokenizers#2212", " the cat"),
        # The space between the tokens of a stream.
        ("google/sentencepiece#1043", "the cat sat!"),
        ("karpathy/llama2.c#89", "the"),
    ],
)
def test_spaces_of_a_text_are_kept_in_pieces(source: str, text: str, tmp_path: Path) -> None:
    tokenizer = word_level(tmp_path)
    before, after = (
        tokenizer.encode("!", add_special_tokens=False),
        tokenizer.encode(text, add_special_tokens=False),
    )
    written = Detokenizer(tokenizer, before)
    pieces = [written.push(token) for token in after]
    # Behind other tokens a text begins with the space that the tokenizer puts in front of words.
    assert "".join(pieces) + written.end() == f" {text}", source
    assert tokenizer.decode(tokenizer.encode(text)) == text, source

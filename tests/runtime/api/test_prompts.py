"""The accepted forms of prompts, and prompts that are rejected before they are tokenized or run."""

from __future__ import annotations

import asyncio
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llm_kit import toy_model
from text_kit import byte_level, word_level
from tokenizers import AddedToken, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as RawTokenizer

from carryall.errors import PromptTooLongError, RequestError
from carryall.exporter.demo import demo_path
from carryall.runtime.api.async_llm import AsyncLLM
from carryall.runtime.api.llm import LLM
from carryall.runtime.api.prompts import MOST_BYTES, Prompt, PromptReader
from carryall.runtime.text.token_coverage import coverage
from carryall.runtime.text.tokenizer import Tokenizer
from carryall.runtime.types.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=3)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with LLM(toy_model(tmp_path_factory.mktemp("toy"))) as made:
        yield made


@pytest.mark.parametrize(
    ("given", "token_ids"),
    [
        ("a", [[256, 64]]),
        (["a"], [[256, 64]]),
        (("a", "b"), [[256, 64], [256, 65]]),
        ([1, 2], [[1, 2]]),
        ((1, 2), [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        ({"prompt": "a"}, [[256, 64]]),
        ({"prompt_token_ids": [1]}, [[1]]),
        ([{"prompt": "a"}, {"prompt_token_ids": (1,)}, "b", [2]], [[256, 64], [1], [256, 65], [2]]),
        (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        ([], []),
    ],
)
def test_forms_that_are_taken(llm: LLM, given: Any, token_ids: list[list[int]]) -> None:
    outputs = llm.generate(given, GREEDY)
    assert [output.prompt_token_ids for output in outputs] == token_ids


def test_prompts_of_an_iterator_are_taken_in_order(llm: LLM) -> None:
    prompts: list[Prompt] = ["a", [1, 2]]
    outputs = llm.generate(iter(prompts), GREEDY)
    assert [output.prompt_token_ids for output in outputs] == [[256, 64], [1, 2]]


def test_a_model_shows_its_name_and_its_context(llm: LLM) -> None:
    assert repr(llm) == f"LLM({llm.name!r}, context_length={llm.context_length})"


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (b"bytes", "not bytes; decode it to text first"),
        ([b"bytes"], "not bytes; decode it"),
        (bytearray(b"x"), "not bytearray; decode"),
        (memoryview(b"x"), "not memoryview; decode"),
        (5, "not int 5"),
        (None, "not NoneType None"),
        ([None], "not NoneType None"),
        ({1, 2}, "not set"),
        ([True, False], "the list has bool True"),
        ([1, "a"], "the list has str 'a'"),
        ([1.5], "not float 1.5"),
        ([[1.5]], "the list has float 1.5"),
        ({"text": "a"}, "the keys ['text']"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "the keys ['prompt', 'prompt_token_ids']"),
        ({"prompt": [1]}, "'prompt' is list [1]"),
        ({"prompt": None}, "'prompt' is NoneType None"),
        ({"prompt_token_ids": "a"}, "'prompt_token_ids' is str 'a'"),
        ({"prompt_token_ids": None}, "not NoneType None"),
        ({"prompt_token_ids": b"a"}, "not bytes"),
        ({}, "the keys []"),
    ],
)
def test_anything_else_is_refused_by_name(llm: LLM, given: Any, shown: str) -> None:
    asked: list[Callable[[Any], Any]] = [llm.generate, llm.embed, llm.beam_search]
    asked.append(lambda one: list(llm.stream(one)))
    for ask in asked if not isinstance(given, list) else asked[:3]:
        with pytest.raises(RequestError) as caught:
            ask(given)
        assert shown in str(caught.value)
        assert "a prompt must be a text, a list of token ids, {'prompt': text}" in str(caught.value)


TOKENS = "outside the vocabulary [0, 258)"


@pytest.mark.parametrize("token", [-1, 258, 2**40, -(2**70)])
def test_tokens_that_do_not_exist_are_refused_at_the_door(llm: LLM, token: int) -> None:
    options: list[dict[str, Any]] = [
        {"stop_token_ids": [token]},
        {"logit_bias": {token: 1.0}},
        {"bad_words": [[3, token]]},
        {"allowed_token_ids": [token]},
        {"logprobs": 1, "logprob_token_ids": [token]},
    ]
    asked: list[Callable[[], Any]] = [
        lambda: llm.generate([1, token]),
        lambda: llm.embed([1, token]),
        lambda: llm.beam_search([1, token]),
        *(lambda one=one: llm.generate("a", SamplingParams(max_tokens=2, **one)) for one in options),
    ]
    steps = llm.stats().steps
    for ask in asked:
        with pytest.raises(RequestError) as caught:
            ask()
        assert TOKENS in str(caught.value)
    assert llm.stats().steps == steps


class Reader(PromptReader):
    """One whose tokenizer may be used, or must not be."""

    def __init__(self, tokenizer: Any, context_length: int) -> None:
        super().__init__(lambda: tokenizer, 258, context_length)


class Untouchable:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self.coverage = tokenizer.coverage

    def encode(self, text: str, **options: Any) -> list[int]:
        pytest.fail("a text that is provably too long was tokenized")


def test_a_text_that_is_provably_too_long_is_not_tokenized(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path)
    longest = len("</s>")
    assert tokenizer.coverage is not None
    assert (tokenizer.coverage.bytes_per_token, tokenizer.coverage.strips) == (longest, False)
    reader = Reader(Untouchable(tokenizer), 100)
    with pytest.raises(PromptTooLongError) as caught:
        reader.token_ids("é" * 200)
    assert str(caught.value).startswith(
        "prompt is too long: 100 tokens > 99 maximum: it has 400 bytes and a token covers at most 4; "
        "the context holds 100"
    )
    assert Reader(tokenizer, 101).encode("a" * 99)
    with pytest.raises(PromptTooLongError, match="102 tokens > 100 maximum: the context holds 101"):
        Reader(tokenizer, 101).token_ids("a" * 101)


def test_a_text_that_is_too_large_is_not_tokenized_whatever_the_tokenizer(tmp_path: Path) -> None:
    reader = Reader(Untouchable(word_level(tmp_path)), 100)
    for text in ("a" * (MOST_BYTES + 1), "é" * (MOST_BYTES // 2 + 1)):
        with pytest.raises(PromptTooLongError, match=f"the limit is {MOST_BYTES} bytes"):
            reader.token_ids(text)


def test_a_long_list_of_token_ids_is_refused_by_its_length(tmp_path: Path) -> None:
    class Counted(list[int]):
        def __iter__(self) -> Iterator[int]:
            pytest.fail("was read")

    with pytest.raises(PromptTooLongError, match="1000 tokens > 99 maximum: the context holds 100"):
        Reader(byte_level(tmp_path), 100).token_ids(Counted([1] * 1000))


@pytest.mark.long
def test_normalization_shrinks_text_by_what_the_proof_says() -> None:
    for form in ("NFC", "NFD"):
        most = 0.0
        for code in (code for code in range(0x110000) if not 0xD800 <= code < 0xE000):
            text = unicodedata.normalize("NFD", chr(code))
            for one in (chr(code), text):
                most = max(most, len(one.encode()) / len(unicodedata.normalize(form, one).encode()))
        assert most == 3.0


def raw(**parts: Any) -> RawTokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = RawTokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    for name, part in parts.items():
        setattr(made, name, part)
    return made


def test_tokenizers_that_leave_text_out_prove_nothing() -> None:
    byte_level_too = pre_tokenizers.ByteLevel(add_prefix_space=False)
    removing = pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), byte_level_too])
    assert coverage(raw(normalizer=normalizers.NFKC())) is None
    assert coverage(raw(normalizer=normalizers.Replace("ab", "a"))) is None
    assert coverage(raw(normalizer=normalizers.Sequence([normalizers.NFC(), normalizers.Strip()]))) is None
    assert coverage(raw(pre_tokenizer=removing)) is None
    assert coverage(raw(pre_tokenizer=pre_tokenizers.Whitespace())) is None
    assert coverage(RawTokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, "[UNK]"))) is None
    assert coverage(RawTokenizer(models.BPE(vocab={"a": 0}, merges=[]))) is None
    nfc = coverage(raw(normalizer=normalizers.NFC()))
    assert nfc is not None
    assert nfc.bytes_per_token == 3


def test_whitespace_around_tokens_that_strip_does_not_count() -> None:
    tokenizer = raw()
    tokenizer.add_special_tokens([AddedToken("<x>", rstrip=True)])
    found = coverage(tokenizer)
    assert found is not None
    assert found.strips
    assert found.bytes_of("<x>" + " " * 1000 + "é") == 5


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=300) | st.text("K\u212a가é\u0301 \n<x>", max_size=300))
def test_a_text_never_has_fewer_tokens_than_proven(text: str) -> None:
    for tokenizer in TOKENIZERS:
        found = coverage(tokenizer)
        assert found is not None
        tokens = len(tokenizer.encode(text, add_special_tokens=False).ids)
        assert tokens >= -(-found.bytes_of(text) // found.bytes_per_token)


TOKENIZERS = [
    RawTokenizer.from_file(str(demo_path("pycoder") / "tokenizer.json")),
    raw(normalizer=normalizers.NFC()),
    raw(),
]
TOKENIZERS[-1].add_special_tokens([AddedToken("<x>", lstrip=True, rstrip=True)])


def test_long_texts_are_encoded_and_decoded_like_short_ones() -> None:
    tokenizer = Tokenizer(demo_path("pycoder"))
    text = "def f(x):\n    return x  # é\n" * 1000
    tokens = tokenizer.encode(text)
    assert tokens == tokenizer._tokenizer.encode(text).ids
    assert tokenizer.decode(tokens) == tokenizer._tokenizer.decode(tokens)


@pytest.mark.parametrize("size", [4 << 20, 15 << 20])
def test_huge_prompts_are_refused_while_others_stream(tmp_path: Path, size: int) -> None:
    text = "x" * size

    async def test() -> None:
        llm = AsyncLLM(toy_model(tmp_path, context_length=4096))
        stream = await llm.add_request("p", SamplingParams(temperature=0.0, max_tokens=500))
        for ask in (
            lambda: llm.add_request(text),
            lambda: llm.embed([text]),
            lambda: llm.score(text, "b"),
            lambda: llm.rerank("q", [text]),
            lambda: llm.render([{"role": "user", "content": text}]),
        ):
            with pytest.raises(PromptTooLongError):
                await ask()
        assert [output async for output in stream][-1].outputs[0].finish_reason == "length"
        llm.shutdown()

    asyncio.run(asyncio.wait_for(test(), 60))

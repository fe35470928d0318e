"""The text of an output is the same, taken at once or in parts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_kit import byte_level

from carryall.runtime.engine.requests.output_text import OutputPart, OutputText
from carryall.runtime.text.parsers.formats import AnswerFormat, Thought
from carryall.runtime.text.parsers.registry import message_parser
from carryall.runtime.text.tokenizer import Tokenizer
from carryall.runtime.types.sampling_params import SamplingParams

THINKING = AnswerFormat("test", Thought("<think>", "</think>"))


@pytest.fixture(scope="module")
def by_bytes(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_level(tmp_path_factory.mktemp("bytes"))


def taken(text: OutputText, tokens: Sequence[int], cuts: Sequence[int]) -> list[OutputPart]:
    """Push the tokens, and take the text after each number of tokens in ``cuts``, and at the end."""
    parts: list[OutputPart] = []
    for count, token in enumerate(tokens, start=1):
        assert text.push(token, check_stop=True) is None
        if count in cuts:
            parts.append(text.take(count, ended=False))
    text.end()
    parts.append(text.take(len(tokens), ended=True))
    assert not any(text.take(len(tokens), ended=True))
    return parts


@settings(max_examples=150, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 257), max_size=30),
    cuts=st.lists(st.integers(0, 31), max_size=4),
    stop=st.sampled_from([(), ("never this, whatever the tokens are",)]),
)
def test_the_whole_equals_its_parts(
    by_bytes: Tokenizer, tokens: list[int], cuts: list[int], stop: tuple[str, ...]
) -> None:
    (whole,) = taken(OutputText(by_bytes, [1, 2], SamplingParams()), tokens, [])
    parts = taken(OutputText(by_bytes, [1, 2], SamplingParams(stop=stop)), tokens, cuts)
    assert "".join(part.text for part in parts) == whole.text


@given(cuts=st.lists(st.integers(0, 30), max_size=4))
def test_tokens_of_the_reasoning_are_counted_once(by_bytes: Tokenizer, cuts: list[int]) -> None:
    text = OutputText(by_bytes, [1, 2], SamplingParams(), message_parser(THINKING))
    tokens = by_bytes.encode("<think>why</think>so", add_special_tokens=False)
    parts = taken(text, tokens, cuts)
    assert "".join(part.reasoning for part in parts) == "why"
    assert sum(part.reasoning_tokens for part in parts) == 3
    assert "".join(part.text for part in parts) == "so"

"""The text of an output is the same, read at once or in pieces."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_kit import byte_level

from carryall.runtime.api.output_text import OutputText
from carryall.runtime.text.parsers.registry import message_parser
from carryall.runtime.text.tokenizer import Tokenizer
from carryall.runtime.types.sampling_params import SamplingParams


def finished(tokenizer: Tokenizer, tokens: list[int]) -> OutputText:
    text = OutputText(tokenizer, [1, 2], SamplingParams())
    for token in tokens:
        assert text.push(token, check_stop=True) is None
    text.end()
    return text


@pytest.fixture(scope="module")
def by_bytes(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_level(tmp_path_factory.mktemp("bytes"))


@settings(max_examples=150, deadline=None)
@given(tokens=st.lists(st.integers(0, 257), max_size=30), cuts=st.lists(st.integers(0, 31), max_size=4))
def test_the_whole_equals_its_pieces(by_bytes: Tokenizer, tokens: list[int], cuts: list[int]) -> None:
    whole, pieces = finished(by_bytes, tokens), finished(by_bytes, tokens)
    marks = sorted({0, whole.mark, *(min(cut, whole.mark) for cut in cuts)})
    parts = [pieces.span(start, stop).text for start, stop in pairwise(marks)]
    assert whole.text == "".join(parts) == pieces.text
    assert [whole.span(start, stop).text for start, stop in pairwise(marks)] == parts


@given(cuts=st.lists(st.integers(0, 30), max_size=4))
def test_tokens_of_the_reasoning_are_counted_once(by_bytes: Tokenizer, cuts: list[int]) -> None:
    parser = message_parser("<think></think>")
    text = OutputText(by_bytes, [1, 2], SamplingParams(), parser)
    for token in by_bytes.encode("<think>why</think>so", add_special_tokens=False):
        text.push(token, check_stop=True)
    text.end()
    marks = sorted({0, text.mark, *(min(cut, text.mark) for cut in cuts)})
    spans = [text.span(start, stop) for start, stop in pairwise(marks)]
    assert "".join(span.reasoning_content or "" for span in spans) == "why"
    assert sum(span.reasoning_tokens for span in spans) == 3

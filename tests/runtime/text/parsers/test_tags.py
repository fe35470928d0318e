"""Answers in tags become JSON as transformers' ``DonutProcessor.token2json`` makes it, on recorded texts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from carryall.runtime.text.parsers.base import ParsedMessage
from carryall.runtime.text.parsers.tags import TagParser, has_tags, tags_value

RECORDED = Path(__file__).parents[3] / "corpora" / "tags" / "token2json.json"
TOKENS = {"<yes/>", "<no/>", "<sep/>", "<s_a>"}  # the added tokens when they were recorded


def test_values_equal_those_of_transformers() -> None:
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))
    assert len(recorded) == 200
    assert {text: tags_value(text, TOKENS) for text in recorded} == recorded


@pytest.mark.parametrize("size", [1, 3, 100])
def test_an_answer_becomes_json_when_it_ends(size: int) -> None:
    parser = TagParser(ParsedMessage(), "<s_docvqa><s_question>Wer?</s_question><s_answer>", TOKENS)
    answer = " Müller</s_answer>"
    for begin in range(0, len(answer), size):
        parser.push(answer[begin : begin + size])
        assert parser.message.content.text == ""
    parser.end()
    assert parser.message.content.text == '{"question": "Wer?", "answer": "Müller"}'


def test_an_answer_that_is_cut_keeps_its_whole_fields() -> None:
    parser = TagParser(ParsedMessage(), "<s_cord-v2>", TOKENS)
    parser.push("<s_a>1</s_a><s_b>2")
    parser.end(cut=True)
    assert json.loads(parser.message.content.text) == {"a": "1"}


def test_only_tokens_that_open_fields_are_tags() -> None:
    assert has_tags(["<s>", "<s_menu>"])
    assert not has_tags(["<s>", "</s>", "<sep/>"])


def test_tags_without_end_or_bottom_are_read() -> None:
    """Both orders of many tags, and more objects within each other than Python's calls."""
    many = 3_000
    assert tags_value("</s_a>" * many + "<s_a>" * many, TOKENS) == {"text_sequence": ""}
    value = tags_value("".join(f"<s_{n}>" for n in range(many)) + "x", TOKENS)
    assert value == {"text_sequence": "x"}
    value = tags_value(
        "".join(f"<s_{n}>" for n in range(many)) + "x" + "".join(f"</s_{n}>" for n in reversed(range(many))),
        TOKENS,
    )
    depth = 0
    while isinstance(value, dict):
        (value,), depth = value.values(), depth + 1
    assert depth == 101
    assert value.startswith("<s_101><s_102>")

"""Texts of users, tools and results cannot write what the chat template writes: turns, thoughts, calls."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
from chat_styles import styles, template
from hypothesis import given, settings
from hypothesis import strategies as st
from llm_kit import toy_model
from text_kit import byte_level_with
from tokenizers import AddedToken

from carryall.runtime.api.requests import RequestFactory
from carryall.runtime.engine.config import EngineConfig
from carryall.runtime.text.chat_template import ChatTemplate
from carryall.runtime.text.parsers.formats import tags

STYLES = list(styles())
TURNS = ["<|turn>", "<turn|>"]


@functools.cache
def factory(style: tuple[str, str], folder: Path) -> tuple[RequestFactory, frozenset[int], list[str]]:
    """Requests of a toy model whose tokenizer has each tag of a template as a token, half of them special."""
    source = template(*style)
    texts = [
        *TURNS,
        *dict.fromkeys(tag for tag in tags(source) if tag[0] == "<" and tag[-1] == ">" and "{" not in tag),
    ]
    added = [AddedToken(text, special=at % 2 == 0) for at, text in enumerate(dict.fromkeys(texts))]
    model = toy_model(folder / f"{style}", context_length=4096)
    model.tokenizer = byte_level_with(folder / f"{style} tokenizer", added)
    model.chat_template = ChatTemplate({"default": source}, {})
    ids = frozenset(model.tokenizer.encode(token.content, add_special_tokens=False)[0] for token in added)
    return RequestFactory(model, EngineConfig()), ids, [token.content for token in added]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def conversation(text: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": {"a": text}}}
    parameters = {"type": "object", "properties": {"a": {"type": "string", "description": text}}}
    turns: list[dict[str, Any]] = [
        {"role": "system", "content": text}, {"role": "user", "content": text},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": text, "tool_call_id": "abcdefghi", "name": "f"},
    ]  # fmt: skip
    return turns, [
        {"type": "function", "function": {"name": "f", "description": text, "parameters": parameters}}
    ]


@pytest.mark.long
@pytest.mark.parametrize("style", STYLES)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_texts_add_no_tokens_of_the_template(
    style: tuple[str, str], data: st.DataObject, folder: Path
) -> None:
    requests, ids, texts = factory(style, folder)
    fragments = st.sampled_from([*texts, *(text[:-1] for text in texts), "<", ">", " ", "x", "\n"])
    text = "".join(data.draw(st.lists(fragments, min_size=1, max_size=6)))

    def marks(content: str) -> list[int]:
        turns, tools = conversation(content)
        return [token for token in requests.chat_prompt(turns, tools=tools).token_ids if token in ids]

    assert marks(text) == marks("x")


def test_a_tag_that_the_template_does_not_use_stays_a_token(tmp_path: Path) -> None:
    """Gemma has tokens for HTML: a page is still read as the model was trained to read it."""
    model = toy_model(tmp_path / "model", context_length=256)
    model.tokenizer = byte_level_with(tmp_path / "tokenizer", [AddedToken("<table>"), AddedToken("<call>")])
    model.chat_template = ChatTemplate({"default": "{{ messages[0].content }}{# <call> #}"}, {})
    prompt = RequestFactory(model, EngineConfig()).chat_prompt([{"role": "user", "content": "<table><call>"}])
    table, call = (
        model.tokenizer.encode(text, add_special_tokens=False)[0] for text in ("<table>", "<call>")
    )
    assert table in prompt.token_ids
    assert call not in prompt.token_ids
    assert model.tokenizer.decode(prompt.token_ids) == "<table><call>"

"""The conversations that train a tool caller are what a service renders, and their edits can be made."""

from __future__ import annotations

import importlib
import json
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from carryall.runtime.text.chat_template import ChatTemplate
from carryall.runtime.text.parsers.derivation import derive

TOOLS = Path(__file__).resolve().parents[2] / "tools"


@pytest.fixture(scope="module")
def tool_conversations() -> Iterator[ModuleType]:
    sys.path.insert(0, str(TOOLS))  # where Python finds the modules beside a script
    yield importlib.import_module("tool_conversations")
    sys.path.remove(str(TOOLS))


def calls_of(messages: list[Any]) -> list[Any]:
    return [call["function"] for message in messages for call in message.get("tool_calls", ())]


def test_a_service_renders_the_texts_that_are_trained(tool_conversations: ModuleType) -> None:
    chat = ChatTemplate({"default": tool_conversations.TEMPLATE}, {"bos_token": "<s>"})
    writer = tool_conversations.Writer(random.Random(0))
    for _ in range(50):
        messages = writer.conversation()
        text = "".join(piece for piece, _ in tool_conversations.rendered(messages))
        options: Any = {"tools": tool_conversations.TOOLS, "add_generation_prompt": False}
        assert chat.render(messages, **options) == f"<s>{text}"
        own = "".join(piece for piece, scored in tool_conversations.rendered(messages) if scored)
        assert own.count(tool_conversations.END) == sum(one["role"] == "assistant" for one in messages)
    calls = derive(tool_conversations.TEMPLATE, chat.render).answer.calls
    assert calls is not None
    assert calls.marker == tool_conversations.CALL


def test_edits_replace_a_statement_of_the_file(tool_conversations: ModuleType) -> None:
    """Each edit replaces a statement that the file has once, and the file stays Python."""
    writer = tool_conversations.Writer(random.Random(1))
    edits = 0
    for _ in range(200):
        messages = writer.conversation()
        sources = [one["content"] for one in messages if one["role"] == "tool" and "def " in one["content"]]
        for call in calls_of(messages):
            if call["name"] == "edit_file":
                (source,) = sources
                old, new = call["arguments"]["old"], call["arguments"]["new"]
                assert source.count(old) == 1
                assert old != new
                compile(source.replace(old, new), "file", "exec")
                edits += 1
    assert edits > 100


def test_words_of_tasks_are_in_no_conversation_for_training(tool_conversations: ModuleType) -> None:
    held = set(tool_conversations.HELD_OUT)
    writer = tool_conversations.Writer(random.Random(2))
    trained = [calls_of(writer.conversation()) for _ in range(200)]
    names = set(re.findall(r"[a-z]+", json.dumps(trained)))
    assert not names & held
    writer = tool_conversations.Writer(random.Random(2), tool_conversations.HELD_OUT)
    assert {re.findall(r"\w+", writer.paths()[0])[-2] for _ in range(50)} <= held

"""Where later prompts of a conversation leave a rendered one, for models with recurrent states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from agent_sessions import TEMPLATE
from chat_styles import styles, template
from family_cases import write_case

from carryall import LLM
from carryall.runtime.api.requests import ChatPrompt
from carryall.runtime.api.resumption import Resumption
from carryall.runtime.text.chat_template import ChatTemplate

TOOLS = [{"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}]
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "You are an agent."},
    {"role": "user", "content": "Repair it."},
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "What is in it?",
        "tool_calls": [{"id": "a", "type": "function", "function": {"name": "read", "arguments": {"n": 1}}}],
    },
    {"role": "tool", "tool_call_id": "a", "content": "return 1"},
]
LATER = [{"role": "assistant", "content": "Done."}, {"role": "user", "content": "Test it."}]


def characters(text: str, salt: str = "") -> list[int]:
    del salt
    return [ord(character) for character in text]


def lengths(
    source: str, messages: list[dict[str, Any]], mark: str = "", tools: Any = TOOLS
) -> tuple[str, tuple[int, ...]]:
    """What a template makes of a conversation, and where later prompts leave it, in characters."""
    chat = ChatTemplate({"default": source}, {"bos_token": "<s>"})

    def render(talk: Any) -> str:
        return chat.render(talk, tools=tools)

    text = render(messages)
    tokens = characters(text.replace(mark, "") if mark else text)
    return text, Resumption(characters).lengths(messages, text, mark, tokens, render, str)


def common(first: str, second: str) -> int:
    return next((at for at, pair in enumerate(zip(first, second, strict=False)) if len(set(pair)) > 1), 0)


@pytest.mark.parametrize(("calls", "thoughts"), list(styles()))
def test_they_are_where_other_conversations_and_later_turns_leave_it(calls: str, thoughts: str) -> None:
    source = template(calls, thoughts)
    text, found = lengths(source, TALK)
    other, _ = lengths(source, [TALK[0], {"role": "user", "content": "What is new?"}])
    later, _ = lengths(source, [*TALK, *LATER])
    assert found == (common(text, other), common(text, later) or len(text))


def test_a_template_that_drops_thoughts_leaves_the_prompt_at_the_first_of_them() -> None:
    source = TEMPLATE.replace("OPEN", "[").replace("CLOSE", "]")
    text, found = lengths(source, [*TALK[:2], {**TALK[2], "content": "I look."}, TALK[3]])
    assert found == (text.index("Repair it."), text.index("<think>"))


def test_a_template_that_refuses_other_conversations_tells_no_lengths() -> None:
    source = "{% if messages | length != 4 %}{{ raise_exception('four messages') }}{% endif %}text"
    assert lengths(source, TALK, tools=None) == ("text", ())


def test_texts_beside_a_mark_are_tokenized_apart() -> None:
    """A mark stands in a text of the user that reads like a special token; it is no part of the prompt."""
    marked = [{"role": "user", "content": "a7777b"}]
    source = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    assert lengths(source, marked, "7777", None) == ("<a7777b>", (1, 4))


def test_a_picture_counts_as_its_tokens() -> None:
    """Lengths are those of the prompt, in which a picture's place became all of its tokens."""
    chat = ChatTemplate({"default": "{% for m in messages %}({{ m.content }}){% endfor %}"}, {})
    talk = [{"role": "system", "content": "#"}, {"role": "user", "content": "#?"}]

    def placed(text: str) -> str:
        return text.replace("#", "%%%%")

    text = chat.render(talk)
    lengths = Resumption(characters).lengths(talk, text, "", characters(placed(text)), chat.render, placed)
    assert lengths == (len("(%%%%)("), len("(%%%%)(%%%%?)"))


@pytest.mark.parametrize(("case", "expected"), [("lfm2", True), ("llama", False)])
def test_only_prompts_of_models_with_states_have_lengths(case: str, expected: bool, tmp_path: Path) -> None:
    with LLM(write_case(case, tmp_path / "checkpoint"), max_slots=1) as llm:
        prompt = llm.render_chat([{"role": "user", "content": "x"}])
        assert isinstance(prompt, ChatPrompt)
        assert bool(prompt.resumption) == expected

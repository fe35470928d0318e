"""Public reports of chat templates: functions and tags that they expect, and errors instead of crashes."""

from __future__ import annotations

import re
from typing import Any

import pytest

from carryall.errors import ChatTemplateError
from carryall.runtime.text.chat_template import ChatTemplate

TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Ok"},
]


def rendered(source: str, **variables: Any) -> str:
    return ChatTemplate({"default": source}, {}).render(TALK, add_generation_prompt=False, **variables)


@pytest.mark.parametrize(
    ("source", "template", "text"),
    [
        # The block around the answer of the assistant was a syntax error.
        (
            "mitsuhiko/minijinja#815",
            "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}[{{ m.content }}]"
            "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}",
            "Hi[Ok]",
        ),
        # JSON in templates: other characters were escaped, and signs of HTML.
        ("abetlen/llama-cpp-python#1486", "{{ {'é': '<b>'} | tojson }}", '{"é": "<b>"}'),
        # Methods of texts behind filters were refused.
        (
            "janhq/jan#6123",
            "{% set c = '<think>\\na\\n</think>\\n\\nb' %}{{ (c.split('</think>') | last).lstrip('\\n') }}|"
            "{{ ((c.split('</think>') | first).rstrip('\\n').split('<think>') | last).lstrip('\\n') }}",
            "b|a",
        ),
        # Messages in the opposite order were a syntax error.
        (
            "ggml-org/llama.cpp#13178",
            "{% for m in messages[::-1] %}{{ m.role }},{% endfor %}",
            "assistant,user,",
        ),
        (
            "lmstudio-ai/lmstudio-bug-tracker#630",
            "{% set ns = namespace(last=0) %}{% for m in messages[::-1] %}{% if m.role == 'user' %}"
            "{% set ns.last = (messages | length - 1) - loop.index0 %}{% endif %}{% endfor %}{{ ns.last }}",
            "0",
        ),
        # Filters and tests that templates of tools need were unknown.
        (
            "lmstudio-ai/lmstudio-bug-tracker#1342",
            "{% for v in [[1], 'x', {'a': true}, none] %}"
            "{{ v | tojson | safe if v is mapping or (v is sequence and v is not string) else v | string }};"
            "{% endfor %}",
            '[1];x;{"a": true};None;',
        ),
        ("xorbitsai/inference#3944", "{{ ['type', 'x'] | reject('in', ['type', 'y']) | list }}", "['x']"),
        # Flags of arguments: as JSON in one template, as Python's in the other.
        (
            "fw-ai/cookbook#434",
            "{{ true | tojson }} {{ none | tojson }} {{ true }} {{ none }}",
            "true null True None",
        ),
    ],
)
def test_templates_render_as_in_transformers(source: str, template: str, text: str) -> None:
    assert rendered(template) == text, source


@pytest.mark.parametrize("source", ["theroyallab/tabbyAPI#281", "oobabooga/textgen#6675"])
def test_templates_may_ask_for_the_date(source: str) -> None:
    assert re.fullmatch(r"\d\d [A-Z][a-z]{2} \d{4}", rendered("{{ strftime_now('%d %b %Y') }}")), source


def test_a_refusal_of_a_template_tells_its_reason() -> None:
    """lmstudio-ai/lmstudio-bug-tracker#1586."""
    with pytest.raises(ChatTemplateError, match="No user query found"):
        rendered("{{ raise_exception('No user query found in messages.') }}")


def test_json_of_an_unknown_variable_is_an_error() -> None:
    """sgl-project/sglang#20700: the TypeError of the JSON writer was an error of the server."""
    with pytest.raises(ChatTemplateError):
        rendered("{{ nothing | tojson }}")

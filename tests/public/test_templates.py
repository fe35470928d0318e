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
    ],
)
def test_templates_render_as_in_transformers(source: str, template: str, text: str) -> None:
    assert rendered(template) == text, source


@pytest.mark.parametrize("source", ["theroyallab/tabbyAPI#281", "oobabooga/textgen#6675"])
def test_templates_may_ask_for_the_date(source: str) -> None:
    assert re.fullmatch(r"\d\d [A-Z][a-z]{2} \d{4}", rendered("{{ strftime_now('%d %b %Y') }}")), source


def test_json_of_an_unknown_variable_is_an_error() -> None:
    """sgl-project/sglang#20700: the TypeError of the JSON writer was an error of the server."""
    with pytest.raises(ChatTemplateError):
        rendered("{{ nothing | tojson }}")

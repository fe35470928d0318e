"""Random conversations become the texts that transformers renders, in templates of every style."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from chat_styles import styles, template
from fuzzing import fuzz
from hypothesis import strategies as st

from carryall.errors import ChatTemplateError
from carryall.runtime.text.chat_template import ChatTemplate

VERDICTS: Counter[str] = Counter()
TEMPLATES = [template(*names) for names in styles()]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TOOLS = [
    {"type": "function", "function": {"name": "f", "description": "<é>", "parameters": {"type": "object"}}}
]
TEXTS = st.one_of(
    st.text(max_size=8),
    st.sampled_from(
        ["  a b ", "é\n\n", "<|turn>", "{{ x }}", "'q' \"d\"", "a\\n", "<thought>", "</call>", "& <b>"]
    ),
)
VALUES = st.recursive(
    st.one_of(TEXTS, st.integers(-5, 99), st.booleans(), st.none(), st.sampled_from([0.5, 0.099, 1e30])),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(st.sampled_from("abc"), inner)),
    max_leaves=4,
)
FUNCTIONS = st.fixed_dictionaries(
    {"name": st.sampled_from(["f", "get_x"]), "arguments": st.dictionaries(st.sampled_from("abcd"), VALUES)}
)
CALLS = st.fixed_dictionaries({"id": st.just("c1"), "type": st.just("function"), "function": FUNCTIONS})
MESSAGES = st.one_of(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "tool"]), "content": TEXTS}),
    st.fixed_dictionaries(
        {"role": st.just("assistant"), "content": TEXTS},
        optional={"reasoning_content": TEXTS, "tool_calls": st.lists(CALLS, min_size=1, max_size=2)},
    ),
)


CONVERSATIONS = st.fixed_dictionaries(
    {
        "source": st.sampled_from(TEMPLATES),
        "talk": st.lists(MESSAGES, min_size=1, max_size=5),
        "tools": st.sampled_from([TOOLS, None]),
        "prompt": st.booleans(),
    }
)


@pytest.mark.slow
def test_conversations_render_as_in_transformers(capsys: pytest.CaptureFixture[str]) -> None:
    rendering = pytest.importorskip("transformers.utils.chat_template_utils")
    fuzz(CONVERSATIONS, lambda talk: VERDICTS.update([check(rendering, **talk)]), None)
    with capsys.disabled():
        print(f"{VERDICTS.total()} conversations: {dict(VERDICTS)}")
    assert VERDICTS["equal"] > 0


def check(
    rendering: Any, source: str, talk: list[dict[str, Any]], tools: list[dict[str, Any]] | None, prompt: bool
) -> str:
    try:
        ((expected,), _) = rendering.render_jinja_template(
            [talk], tools=tools, chat_template=source, add_generation_prompt=prompt, **SPECIAL
        )
    except Exception:  # noqa: BLE001 -- of any kind
        with pytest.raises(ChatTemplateError):
            ChatTemplate({"default": source}, SPECIAL).render(talk, tools=tools, add_generation_prompt=prompt)
        return "refused"
    text = ChatTemplate({"default": source}, SPECIAL).render(talk, tools=tools, add_generation_prompt=prompt)
    assert text == expected
    return "equal"

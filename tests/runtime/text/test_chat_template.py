"""Chat templates: the features of Hugging Face templates, and the limits for malicious ones."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from carryall.errors import ChatTemplateError, PromptTooLongError
from carryall.runtime.text.chat_template import ChatTemplate

MESSAGES = [{"role": "user", "content": "2 < 3 & é"}, {"role": "assistant", "content": "yes"}]


def render(source: str, **options: Any) -> str:
    return ChatTemplate({"default": source}, {"bos_token": "<s>"}).render(MESSAGES, **options)


def test_messages_special_tokens_and_generation_prompt() -> None:
    source = (
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m['content'] }}"
        "{{ '\n' if not loop.last }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    assert render(source) == "<s>[user]2 < 3 & é\n[assistant]yes[assistant]"
    assert render(source, add_generation_prompt=False).endswith("yes")


PLAIN = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content CHANGE }};{% endfor %}"
    "{% if add_generation_prompt %}[a]{% endif %}"
)


@pytest.mark.parametrize("change", ["", "| trim", ".split('</think>')[-1]"])
@pytest.mark.parametrize("content", ["yes", "yes ", " two\nlines\n", "[user];", "e"])
def test_the_last_message_is_continued_at_its_end(content: str, change: str) -> None:
    template = ChatTemplate({"default": PLAIN.replace("CHANGE", change)}, {})
    talk = [MESSAGES[0], {"role": "assistant", "content": content}]
    text = template.render(talk, continue_final_message=True)
    kept = content.lstrip() if "trim" in change else content
    assert text == f"[user]2 < 3 & é;[assistant]{kept}"


@pytest.mark.parametrize(
    ("last", "source", "message"),
    [
        (MESSAGES[0], PLAIN, "only a last message of the assistant"),
        ({"role": "assistant", "content": None}, PLAIN, "only a last message of the assistant"),
        ({"role": "assistant", "content": "", "tool_calls": [{}]}, PLAIN, "without tool calls"),
        (MESSAGES[1], "{{ messages[0].content }}", "leaves out the end of the last message"),
    ],
)
def test_other_messages_cannot_be_continued(last: dict[str, Any], source: str, message: str) -> None:
    template = ChatTemplate({"default": source.replace("CHANGE", "")}, {})
    with pytest.raises(ChatTemplateError, match=message):
        template.render([MESSAGES[0], last], continue_final_message=True)


def test_blocks_are_trimmed_as_hugging_face_does() -> None:
    source = "{% for m in messages %}\n  {% if loop.first %}\n{{ m.role }}\n  {% endif %}\n{% endfor %}"
    assert render(source) == "user\n"


def test_loop_controls_namespace_and_generation_tag() -> None:
    source = (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% set ns.n = ns.n + 1 %}{% generation %}{{ m.role }}{% endgeneration %}{% endfor %}{{ ns.n }}"
    )
    assert render(source) == "user1"


def test_tojson_escapes_nothing_and_tools_are_passed() -> None:
    tools = [{"type": "function", "function": {"name": "f<é>"}}]
    assert render("{{ tools | tojson }}", tools=tools) == json.dumps(tools, ensure_ascii=False)
    assert render("{{ tools[0] | tojson(indent=2) }}", tools=tools).startswith('{\n  "type"')
    assert render("{{ tools is none }}") == "True"


def test_tools_are_described_where_the_template_has_no_place_for_them() -> None:
    source = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    template = ChatTemplate({"default": source, "tool_use": "{{ tools }}{{ messages[0].role }}"}, {})
    tools = [{"name": "f<é>"}]
    assert template.render(MESSAGES, tools=tools).endswith("user")  # this template has a place
    assert not template.describes_tools("{{ tools }}{{ messages[0].role }}")
    assert "[system]You can call these functions" in template.render(
        MESSAGES, tools=tools, template="default"
    )
    assert template.describes_tools(source)
    assert template.render(MESSAGES, template="default") == "[user]2 < 3 & é[assistant]yes"


@pytest.mark.parametrize(
    "refusal", ["{{ raise_exception('no system') if messages[0].role == 'system' }}", "{{ 'quiet' }}"]
)
def test_templates_without_system_messages_describe_tools_to_the_user(refusal: str) -> None:
    source = (
        refusal + "{% for m in messages if m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    )
    text = render(source, tools=[{"name": "f"}])
    assert "[user]You can call these functions" in text
    assert "</tool_call>\n\n2 < 3" in text


def test_a_template_that_hides_tools_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    template = ChatTemplate({"default": "{{ messages[0].content }}"}, {}, tool_prompt=False)
    for _ in range(2):
        assert template.render(MESSAGES, tools=[{"name": "f"}]) == MESSAGES[0]["content"]
    (record,) = caplog.records
    assert "the chat template has no place for tools" in record.getMessage()
    assert not template.describes_tools("{{ messages[0].content }}")


def test_dates_and_extra_variables() -> None:
    assert render("{{ strftime_now('%Y') }}") == time.strftime("%Y")
    assert render("{{ enable_thinking }}", enable_thinking=False) == "False"


def test_a_template_s_own_refusal_is_reported() -> None:
    with pytest.raises(ChatTemplateError, match="refuses this conversation: no system messages"):
        render("{{ raise_exception('no system messages') }}")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{% for m in %}", "syntax error in line 1"),
        ("{% macro f(a, a) %}{% endmacro %}", "cannot be compiled: duplicate argument"),
        ("{% if x %}" * 110 + "{% endif %}" * 110, "cannot be compiled: too many"),
        ("{{ messages[0].content.x.y }}", "refuses this conversation"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages | map('nope') | list }}", "No filter named"),
    ],
)
def test_broken_templates(source: str, words: str) -> None:
    with pytest.raises(ChatTemplateError, match=words):
        render(source)


@pytest.mark.long
@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ raise_exception.__globals__['os'] }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ ('{0.__class__.__mro__}').format(1) }}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(10**12) %}{% endfor %}",
        "{{ 'a' * 10**10 }}",
        "{{ [1] * 10**10 }}",
        "{{ 9 ** (9 ** 9) }}",
        "{{ '%9999999999d' % 1 }}",
        "{{ '%*d' % (9999999999, 1) }}",
        "{{ '{:>9999999999}'.format(1) }}",
        "{{ '{:>{}}'.format(1, 9999999999) }}",
        "{{ 'a'.zfill(10**10) }}",
        "{{ ('a' * 10**6).replace('a', 'b' * 10**6) }}",
        "{% set ns = namespace(x='aaaa') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set ns = namespace(x='aaaa') %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set ns = namespace(x=9) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
        "{% for i in range(99999) %}{{ 'a' * 10**4 }}{% endfor %}",
    ],
)
def test_malicious_templates_are_refused_soon(source: str) -> None:
    began = time.process_time()
    with pytest.raises((ChatTemplateError, PromptTooLongError)):
        render(source)
    assert time.process_time() - began < 20


@pytest.mark.parametrize("source", ["{{ raise_exception.__globals__ }}", "{{ '{0.__class__}'.format(1) }}"])
def test_python_s_inside_is_not_shown(source: str) -> None:
    assert render(source) == ""


def test_the_loop_budget_is_per_rendering() -> None:
    template = ChatTemplate({"default": "{% for i in range(90000) %}{% endfor %}done"}, {})
    for _ in range(15):
        assert template.render(MESSAGES) == "done"


def test_renderings_in_several_threads_do_not_disturb_each_other() -> None:
    template = ChatTemplate({"default": "{% for i in range(300) %}{{ x }}{% endfor %}"}, {})
    results: dict[int, str] = {}

    def work(i: int) -> None:
        results[i] = template.render(MESSAGES, x=i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {i: str(i) * 300 for i in range(8)}


def test_huge_sources_are_refused() -> None:
    with pytest.raises(ChatTemplateError, match="characters, more than"):
        render("a" * 1_000_001)


def test_a_missing_template_says_what_to_do() -> None:
    with pytest.raises(ChatTemplateError, match=r"no chat template.*chat_template="):
        ChatTemplate({}, {}).render(MESSAGES)
    with pytest.raises(ChatTemplateError, match=r"no chat template; choose one of \['rag'\]"):
        ChatTemplate({"rag": "x"}, {}).render(MESSAGES)
    with pytest.raises(ChatTemplateError, match=r"no chat template 'nope'; choose one of \['rag'\]"):
        ChatTemplate({"rag": "x"}, {}).render(MESSAGES, template="nope")


def test_a_message_must_have_a_role() -> None:
    with pytest.raises(ChatTemplateError, match="a message must be an object with 'role'"):
        ChatTemplate({"default": "x"}, {}).render([{"content": "hi"}])


def test_named_templates() -> None:
    template = ChatTemplate({"default": "plain", "tool_use": "tools", "rag": "rag"}, {})
    assert template.render(MESSAGES) == "plain"
    assert template.render(MESSAGES, tools=[{"name": "f"}]) == "tools"
    assert template.render(MESSAGES, template="rag") == "rag"
    assert template.render(MESSAGES, template="{{ messages | length }}") == "2"


def write(path: Path, content: object) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))


def test_files_in_order_of_precedence(tmp_path: Path) -> None:
    assert ChatTemplate.from_folder(tmp_path, {}).names == []
    write(tmp_path / "tokenizer_config.json", {"chat_template": "config"})
    assert ChatTemplate.from_folder(tmp_path, {}).render(MESSAGES) == "config"
    listed = [{"name": "default", "template": "listed"}, {"name": "rag", "template": "r"}]
    write(tmp_path / "tokenizer_config.json", {"chat_template": listed})
    assert ChatTemplate.from_folder(tmp_path, {}).render(MESSAGES) == "listed"
    write(tmp_path / "chat_template.json", {"chat_template": "json"})
    assert ChatTemplate.from_folder(tmp_path, {}).render(MESSAGES) == "json"
    write(tmp_path / "chat_template.jinja", "jinja")
    write(tmp_path / "additional_chat_templates" / "tool_use.jinja", "extra")
    template = ChatTemplate.from_folder(tmp_path, {})
    assert template.render(MESSAGES) == "jinja"
    assert template.names == ["default", "rag", "tool_use"]


PARTS = (
    "{% for m in messages %}[{{ m.role }}]{% for part in m.content %}"
    "{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}{% endfor %}"
)
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"


@pytest.mark.parametrize("source", [PARTS, NO_SYSTEM + PARTS])
def test_tools_calls_and_results_reach_a_template_that_writes_lists_of_parts_only(source: str) -> None:
    talk: list[dict[str, Any]] = [
        {"role": "user", "content": "time?"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "now", "arguments": {}}}]},
        {"role": "tool", "content": [{"type": "image"}, {"type": "text", "text": "12:00"}]},
    ]
    tools = [{"type": "function", "function": {"name": "now"}}]
    text = ChatTemplate({"default": source}, {}).render(talk, tools=tools)
    assert json.dumps(tools[0]) in text
    assert "time?[assistant]<tool_call>" in text
    assert text.endswith("[user]<tool_response>\n<image>12:00\n</tool_response>")
    assert ("[system]" in text) == (source == PARTS)


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ '[' + m.role + ']' + m.content }}{% endfor %}",
        "{% for m in messages %}[{{ m.role }}]{{ m.content | tojson }}{% endfor %}",
        "{{ bos_token + '' }}{% for m in messages %}{{ '[' + m.role + ']' + m.content }}{% endfor %}",
    ],
)
def test_lists_of_texts_are_one_text_for_a_template_of_texts(source: str) -> None:
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    template = ChatTemplate({"default": source}, {"bos_token": ""})
    text = template.render([{"role": "user", "content": parts}])
    assert text.replace('"', "") == "[user]a b"


def test_lists_of_texts_are_one_text_for_a_template_of_tools() -> None:
    source = "{{ tools[0].function.name }}{% for m in messages %}{{ ' ' + m.content }}{% endfor %}"
    talk = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    tools = [{"type": "function", "function": {"name": "now"}}]
    assert ChatTemplate({"default": source}, {}).render(talk, tools=tools) == "now a"


def test_a_template_that_writes_texts_and_lists_gets_those_of_users() -> None:
    source = (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for part in m.content %}<{{ part.text }}>{% endfor %}{% endif %}{% endfor %}"
    )
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    talk: list[dict[str, Any]] = [
        {"role": "system", "content": parts},
        {"role": "user", "content": parts},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": [*parts, {"type": "thinking", "thinking": "d"}]},
    ]
    assert ChatTemplate({"default": source}, {}).render(talk) == "ab<a><b>c<a><b><>"


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_a_thought_has_the_names_that_templates_read(name: str) -> None:
    """gpt-oss reads ``thinking``, most others ``reasoning_content``."""
    source = "{% for m in messages %}{{ m.thinking }}|{{ m.reasoning_content }}{% endfor %}"
    message: dict[str, Any] = {"role": "assistant", "content": "a", name: "hm"}
    assert ChatTemplate({"default": source}, {}).render([message]) == "hm|hm"


def test_a_thought_beside_a_text_and_calls_leaves_out_what_gpt_oss_refuses() -> None:
    source = "{% for m in messages %}{{ m.thinking is defined }}{{ m.content }}{% endfor %}"
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    message = {"role": "assistant", "content": "a", "reasoning_content": "hm", "tool_calls": [call]}
    assert ChatTemplate({"default": source}, {}, tool_prompt=False).render([message]) == "Falsea"

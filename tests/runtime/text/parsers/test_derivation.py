"""Formats of answers that are derived from chat templates, and the answers that are read by them."""

from __future__ import annotations

import functools
import itertools
import json
import logging
from typing import Any

import pytest
from chat_styles import CALLS, LITERALS, SINGLE, THOUGHTS, styles, template
from hypothesis import given, settings
from hypothesis import strategies as st

from carryall.runtime.text.chat_template import ChatTemplate
from carryall.runtime.text.parsers.base import ParsedMessage
from carryall.runtime.text.parsers.derivation import Derived, derive
from carryall.runtime.text.parsers.registry import AnswerFormats, message_parser
from carryall.runtime.types.outputs import merged_calls

PARAMETERS: dict[str, Any] = {
    "text": {"type": "string"}, "count": {"type": "integer"}, "ratio": {"type": ["number", "null"]},
    "flag": {"type": "boolean"}, "numbers": {"type": "array", "items": {"type": "integer"}},
    "place": {"type": "object", "properties": {"city": {"type": "string"}}},
    "kind": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
}  # fmt: skip
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "", "parameters": {
        "type": "object", "properties": PARAMETERS}}}
    for name in ("get_weather", "files.read")
]  # fmt: skip
QUESTION = {"role": "user", "content": "why?"}
STYLES = list(styles())


@functools.cache
def template_of(style: tuple[str, str]) -> ChatTemplate:
    return ChatTemplate({"default": template(*style)}, {})


@functools.cache
def derived_of(style: tuple[str, str]) -> Derived:
    return derive(template(*style), template_of(style).render)


def turn(calls: list[tuple[str, dict[str, Any]]], content: str = "", thought: str = "") -> dict[str, Any]:
    made = [
        {"id": f"id{at}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for at, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "content": content, "reasoning_content": thought, "tool_calls": made}


def written(style: tuple[str, str], answer: dict[str, Any]) -> tuple[str, str]:
    """Return the prompt, and what the model writes if it writes what the template does."""
    render = functools.partial(template_of(style).render, tools=TOOLS)
    prompt = render([QUESTION])
    text = render([QUESTION, answer], add_generation_prompt=False)
    header = prompt if text.startswith(prompt) else prompt.removesuffix("<thought>\n")
    assert text.startswith(header)
    return header, text[len(header) :].removesuffix("<turn|>\n")


def read(
    style: tuple[str, str], prompt: str, pieces: list[str], tools: Any = TOOLS, *, cut: bool = False
) -> ParsedMessage:
    parser = message_parser(derived_of(style).answer, prompt, tools=tools)
    assert parser is not None
    for piece in pieces:
        parser.push(piece)
    parser.end(cut=cut)
    return parser.message


def calls_of(message: ParsedMessage) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in merged_calls(message.tool_calls)]


@pytest.mark.parametrize("style", STYLES)
def test_every_style_is_derived_and_proven(style: tuple[str, str]) -> None:
    derived = derived_of(style)
    assert derived.notes == ()
    assert derived.answer.calls is not None
    assert derived.answer.calls.single is (style[0] in SINGLE)
    tags = {"thoughts and texts in tags": ("<|think|>", "<|end_think|>"), "no thoughts": None}
    thought = derived.answer.thought
    assert (thought and (thought.open, thought.close)) == tags.get(style[1], ("<thought>", "</thought>"))


TEXTS = {
    "parameters": st.text().filter(lambda text: "</parameter>" not in text),
    "keys and values": st.text().filter(lambda text: "</value>" not in text),
    "typed parameters": st.text().filter(lambda text: "</parameter>" not in text),
    "quoted by a token": st.text().filter(lambda text: "<|q|>" not in text),
}
HARD_TEXTS = st.sampled_from(
    ["5", "true", "null", "[1]", "</call>", "<call>", "</function", "]", ")", "', \"", "\\", "\n x \n", ""]
)  # fmt: skip


def texts(style: str) -> st.SearchStrategy[str]:
    return HARD_TEXTS | TEXTS.get(style, st.text())


@st.composite
def arguments(draw: st.DrawFn, style: str) -> dict[str, Any]:
    text = texts(style)
    number = st.floats(allow_nan=False, allow_infinity=False) | st.integers(-9, 9)
    place = st.fixed_dictionaries({"city": text})
    if style == "quoted by a token":  # its template writes texts as they are
        place = st.fixed_dictionaries({"city": TEXTS[style]})
    values = {
        "text": text, "count": st.integers(-(10**18), 10**18), "ratio": number | st.none(),
        "flag": st.booleans(), "numbers": st.lists(st.integers()), "place": place,
    }  # fmt: skip
    return draw(st.fixed_dictionaries({}, optional=values))


@pytest.mark.long
@pytest.mark.parametrize("name", ["", "get_weather"])
@pytest.mark.parametrize("style", ["names as keys", "names before JSON", "list"])
def test_a_call_needs_a_name(style: str, name: str) -> None:
    both = style, "thoughts"
    prompt, text = written(both, turn([("get_weather", {"text": "a"})]))
    text = text.replace("get_weather", name)
    for pieces in ([text], list(text)):
        message = read(both, prompt, pieces)
        assert [call.name for call in merged_calls(message.tool_calls)] == [name] * bool(name)


@pytest.mark.long
@pytest.mark.parametrize("style", [*CALLS, *LITERALS, *SINGLE])
@settings(max_examples=60, deadline=None)
@given(data=st.data(), thoughts=st.sampled_from(sorted(THOUGHTS)))
def test_what_a_template_writes_is_read_back(style: str, data: st.DataObject, thoughts: str) -> None:
    both = style, thoughts
    names = ["get_weather", "files.read", *["unknown"] * (style not in TEXTS)]  # only schemas type texts
    given_calls = data.draw(
        st.lists(
            st.tuples(st.sampled_from(names), arguments(style)),
            min_size=1,
            max_size=1 if style in SINGLE else 3,
        )
    )
    content = data.draw(st.sampled_from(["", "So.", "a < b [c] {d}"])) if style not in SINGLE else ""
    thought = data.draw(st.sampled_from(["", "Hm <call> x {"])) if thoughts != "no thoughts" else ""
    prompt, text = written(both, turn(given_calls, content, thought))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    message = read(both, prompt, pieces)
    assert calls_of(message) == given_calls
    assert (message.content.text, message.reasoning.text) == (content, thought)


@pytest.mark.long
@pytest.mark.parametrize("style", [*CALLS, *LITERALS, *SINGLE])
def test_a_cut_answer_gives_what_came_before_the_cut(style: str) -> None:
    both = style, "thoughts"
    whole: list[tuple[str, dict[str, Any]]] = [
        ("get_weather", {"text": "a } b", "numbers": [1, 2]}), ("files.read", {"count": 7}),
    ]  # fmt: skip
    whole = whole[:1] if style in SINGLE else whole
    prompt, text = written(both, turn(whole, "" if style in SINGLE else "So.", "Hm."))
    for end in range(len(text) + 1):
        message = read(both, prompt, [text[:end]])
        calls = merged_calls(message.tool_calls)
        assert [call.name for call in calls] == [name for name, _ in whole][: len(calls)]
        for call, (_, expected) in zip(calls[:-1], whole, strict=False):
            assert json.loads(call.arguments) == expected
        assert not calls or message.reasoning.text == "Hm."
        assert not calls or message.content.text.startswith("" if style in SINGLE else "So.")


@pytest.mark.parametrize("style", [*CALLS, *LITERALS, *SINGLE])
def test_a_call_that_is_cut_anywhere_leaves_no_markup_in_the_text(style: str) -> None:
    both = style, "no thoughts"
    arguments = {"text": "a b", "count": 3}
    prompt, text = written(both, turn([("get_weather", arguments)]))
    calls = derived_of(both).answer.calls
    assert calls is not None
    for end in range(len(text)):
        message = read(both, prompt, [text[:end]], cut=True)
        content = message.content.text
        if calls.marker:  # what may be the beginning of a marker stays text
            assert calls.marker.startswith(content), (end, content)
            assert len(content) < len(calls.marker), (end, content)
        found = merged_calls(message.tool_calls)
        assert [call.name for call in found] in ([], ["get_weather"]), end
        if found and (begun := found[0].arguments).rstrip().endswith("}"):
            assert json.loads(begun).items() <= arguments.items(), (end, begun)


@pytest.mark.long
@pytest.mark.parametrize("style", [*CALLS, *LITERALS, *SINGLE])
@settings(max_examples=60, deadline=None)
@given(data=st.data(), junk=st.text(alphabet='<>[]{}()"\\=:,/| \nabcé', max_size=8), cut=st.booleans())
def test_malformed_calls_end_no_request(style: str, data: st.DataObject, junk: str, cut: bool) -> None:
    """A part of a call is replaced by anything: nothing is raised, and pieces give what the whole gives."""
    both = style, "thoughts"
    calls: list[tuple[str, dict[str, Any]]] = [("get_weather", {"text": "a"}), ("files.read", {"count": 2})]
    answer = turn(calls[: 1 + (style not in SINGLE)])
    prompt, text = written(both, answer)
    start = data.draw(st.integers(0, len(text)))
    stop = data.draw(st.integers(start, len(text)))
    wrong = text[:start] + junk + text[stop:]
    whole, single = (read(both, prompt, pieces, cut=cut) for pieces in ([wrong], list(wrong)))
    for message in (whole, single):
        assert all(call.name for call in merged_calls(message.tool_calls))
    assert whole.content.text == single.content.text
    assert [(call.name, call.arguments) for call in merged_calls(whole.tool_calls)] == [
        (call.name, call.arguments) for call in merged_calls(single.tool_calls)
    ]


@pytest.mark.parametrize("style", [*CALLS, *LITERALS, *SINGLE])
def test_what_was_read_is_never_withdrawn_and_arguments_arrive_as_they_are_written(style: str) -> None:
    both, value = (style, "no thoughts"), "a long text that arrives in pieces"
    prompt, text = written(both, turn([("get_weather", {"text": value, "count": 5})]))
    parser = message_parser(derived_of(both).answer, prompt, tools=TOOLS)
    assert parser is not None
    before = ""
    for end, character in enumerate(text, start=1):
        parser.push(character)
        assert parser.message.content.text == ""
        arguments = "".join(call.arguments for call in parser.message.tool_calls)
        assert arguments.startswith(before)
        before = arguments
        arrived = max(end - text.index(value) - 1, 0)
        if 0 < arrived <= len(value) and style not in ("names as keys", "nested objects"):  # read when whole
            assert value[:arrived].rstrip() in arguments


@pytest.mark.parametrize("style", [style for style in STYLES if style[1] != "no thoughts"])
def test_a_call_in_a_thought_is_part_of_it(style: tuple[str, str]) -> None:
    _, call = written((style[0], "no thoughts"), turn([("get_weather", {"count": 1})]))
    prompt, text = written(style, turn([], "Done.", f"I could {call.strip()} now."))
    message = read(style, prompt, list(text))
    assert message.tool_calls == []
    assert message.reasoning.text == f"I could {call.strip()} now."
    assert message.content.text == "Done."


def marker_of(style: tuple[str, str]) -> str:
    calls = derived_of(style).answer.calls
    return calls.marker if calls is not None else ""


MARKED = [style for style in STYLES if style[1] != "no thoughts" and marker_of(style)]


def unclosed(style: tuple[str, str], thought: str) -> tuple[str, str]:
    """The prompt, and an answer that is a thought without its end."""
    prompt, text = written(style, turn([], "Done.", thought))
    return prompt, text[: text.index(thought) + len(thought)]


@pytest.mark.long
@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("style", MARKED)
def test_a_call_behind_which_the_answer_ends_is_a_call_though_the_thought_is_open(
    style: tuple[str, str], closed: bool
) -> None:
    _, call = written((style[0], "no thoughts"), turn([("get_weather", {"count": 1})]))
    marker, tags = marker_of(style), derived_of(style).answer.thought
    assert tags is not None
    thought = f"{marker} begins one; or {call.strip()} first.\nNow:\n"
    prompt, text = unclosed(style, thought + call)
    text += tags.close + "\n" if closed else ""
    for pieces in ([text], list(text)):
        message = read(style, prompt, pieces)
        assert calls_of(message) == [("get_weather", {"count": 1})]
        assert message.reasoning.text == thought.strip()
        assert message.content.text == ""


@pytest.mark.long
@pytest.mark.parametrize("fault", ["cut", "unknown", "half", "text"])
@pytest.mark.parametrize("style", MARKED)
def test_what_may_be_a_draft_of_a_call_stays_in_the_thought(style: tuple[str, str], fault: str) -> None:
    name = "unknown" if fault == "unknown" else "get_weather"
    _, call = written((style[0], "no thoughts"), turn([(name, {"text": "a long text"})]))
    thought = "Hm.\n" + {"half": call[: call.index("long")], "text": f"{call} no."}.get(fault, call.rstrip())
    prompt, text = unclosed(style, thought)
    for pieces in ([text], list(text)):
        message = read(style, prompt, pieces, cut=fault == "cut")
        assert message.tool_calls == []
        assert message.reasoning.text == thought.strip()


@pytest.mark.parametrize("style", [*CALLS, *LITERALS, *SINGLE])
def test_without_tools_calls_stay_text(style: str) -> None:
    both = style, "thoughts"
    prompt, text = written(both, turn([("get_weather", {"count": 1})]))
    message = read(both, prompt, [text], tools=())
    assert message.tool_calls == []
    assert message.content.text == text.strip()


@pytest.mark.parametrize("style", [*CALLS, *LITERALS])
def test_text_may_follow_calls(style: str) -> None:
    both = style, "no thoughts"
    prompt, text = written(both, turn([("get_weather", {"count": 1})], "Before."))
    message = read(both, prompt, [f"{text}\nAfter."])
    assert calls_of(message) == [("get_weather", {"count": 1})]
    assert message.content.text.split() == ["Before.", "After."]


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "5", "5"),
        ({"type": "integer"}, "5", 5),
        ({"type": "integer"}, "5.0", 5),
        ({"type": "integer"}, "five", "five"),  # nothing is lost
        ({"type": "number"}, "1e3", 1000.0),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "1", "1"),
        ({"type": "array"}, "['a', 1]", ["a", 1]),
        ({"type": "object"}, '{"a": null}', {"a": None}),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", None),
        ({"type": ["integer", "string"]}, "7", 7),
        ({"type": ["integer", "string"]}, "7 days", "7 days"),
        ({"enum": ["5", "6"]}, "5", "5"),
        ({"const": "true"}, "true", "true"),
        ({}, "5", "5"),
        ({"$ref": "#/$defs/x"}, '{"a": 1}', {"a": 1}),
        ({"type": "integer", "nullable": True}, "null", None),
    ],
)
@pytest.mark.parametrize("style", ["parameters", "keys and values"])
def test_texts_become_values_by_the_schema(style: str, schema: Any, text: str, value: Any) -> None:
    parameters = {"type": "object", "properties": {"x": schema}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    prompt, answer = written((style, "no thoughts"), turn([("f", {"x": text})]))
    assert calls_of(read((style, "no thoughts"), prompt, [answer], tools)) == [("f", {"x": value})]


@pytest.mark.parametrize(
    ("source", "marker", "note"),
    [
        ("{{ tools }}[TOOL_CALLS]{{ messages[0].content }}", "[TOOL_CALLS]", "leaves calls out"),
        ("{{ tools }}{{ messages[0].content }}", None, "they are read as text"),
        ("{{ tools }}{{ raise_exception('no') }}", None, "refuses this conversation: no"),
        ("{{ tools }}{{ 'x' }}", None, "leaves the user's message out"),
        ("{{ tools }}{% for m in messages %}{{ m.content }}{{ m.tool_calls }}{% endfor %}", None, "calls"),
        ("{{ tools }}{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}{{ c.function.name }}"
         "{% endfor %}{% endfor %}", None, "leaves calls out"),
        ("{% if %}tools", None, "syntax error"),
    ],
)  # fmt: skip
def test_what_cannot_be_derived_is_told(
    source: str, marker: str | None, note: str, caplog: pytest.LogCaptureFixture
) -> None:
    formats = AnswerFormats(ChatTemplate({"default": source}, {}))
    with caplog.at_level(logging.INFO):
        answer = formats.of(None, with_tools=True)
        formats.of(None, with_tools=True)  # derived once
    assert (answer.calls and answer.calls.marker) == marker
    (record,) = caplog.records
    assert note in record.getMessage()
    assert record.levelno == (logging.INFO if marker else logging.WARNING)


def test_a_template_without_tools_reads_the_calls_that_a_message_describes() -> None:
    formats = AnswerFormats(
        ChatTemplate({"default": "{% for m in messages %}{{ m.content }}{% endfor %}"}, {})
    )
    derived = formats.derived(None, with_tools=True)
    assert derived.answer.calls is not None
    assert (derived.answer.calls.marker, derived.notes) == ("<tool_call>", ())


FRAGMENTS = st.sampled_from(
    ["{{ m.content }}", "{{ m.tool_calls }}", "{{ c.function.name }}", "{{ c.function.arguments }}", "<", ">",
     "{{ c.function.arguments | tojson }}", "{% for m in messages %}", "{{ m.reasoning_content }}", "[", "]",
     "{% for c in m.tool_calls %}", "{{ tools | tojson }}", "<call>", "</call>", "{", "}", "(", ")", ":", '"',
     "{% for k, v in c.function.arguments.items() %}", "{{ k }}", "{{ v }}", "{{ messages }}", "{{ c }}", "x",
     "\n"]
)  # fmt: skip


@pytest.mark.long
@settings(max_examples=300, deadline=None)
@given(st.lists(FRAGMENTS, max_size=25))
def test_no_template_breaks_the_derivation(fragments: list[str]) -> None:
    """Whatever a template writes, deriving ends, with a format or with a note."""
    body = "".join(fragments)
    loops = body.count("{% for")
    source = f"{{# tools #}}{body}{'{% endfor %}' * loops}"
    derived = derive(source, ChatTemplate({"default": source}, {}).render)
    assert derived.answer.calls is not None or derived.notes

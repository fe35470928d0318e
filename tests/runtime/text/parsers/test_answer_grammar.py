"""Grammars of answers: they allow what a template writes, as tokens or as text, and refuse other calls."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_styles import CALLS, LITERALS, SINGLE, styles, template
from text_kit import byte_level_with
from tokenizers import AddedToken

from carryall.runtime.text.chat_template import ChatTemplate
from carryall.runtime.text.grammars import GrammarCompiler
from carryall.runtime.text.parsers import answer_grammar
from carryall.runtime.text.parsers.answer_grammar import AnswerFrame, answer_frame
from carryall.runtime.text.parsers.derivation import derive
from carryall.runtime.text.parsers.formats import HARMONY, AnswerFormat, tags
from carryall.runtime.text.tokenizer import Tokenizer
from carryall.runtime.types.structured_output import StructuredOutput

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"}, "days": {"type": "integer"}, "flag": {"type": "boolean"},
        "numbers": {"type": "array", "items": {"type": "integer"}}, "unit": {"enum": ["C", "F"]},
        "place": {"type": "object", "properties": {"x": {"type": "number"}}},
    },
    "required": ["city"],
}  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("f", "g.h")]
BARE = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}]
QUESTION = {"role": "user", "content": "why?"}
WEATHER: dict[str, Any] = {"city": "Pa <b> is", "days": 3, "unit": "C"}
EVERYTHING: dict[str, Any] = WEATHER | {"flag": True, "numbers": [1, 2]}
EVERYTHING = {key: EVERYTHING[key] for key in PARAMETERS["properties"] if key in EVERYTHING}
STYLES = [*CALLS, *LITERALS, *SINGLE]


@functools.cache
def template_of(style: tuple[str, str]) -> ChatTemplate:
    return ChatTemplate({"default": template(*style)}, {})


@functools.cache
def answer_of(style: tuple[str, str]) -> AnswerFormat:
    return derive(template(*style), template_of(style).render).answer


@functools.cache
def tokenizer_of(style: tuple[str, str], folder: Path, *, tokens: bool) -> Tokenizer:
    """Return a tokenizer of bytes, in which the tags of a style are tokens or text."""
    texts = dict.fromkeys(
        tag for tag in tags(answer_of(style).texts) if tag.startswith("<") and tag[-1] == ">"
    )
    return byte_level_with(
        folder / f"{style} {tokens}", [AddedToken(text, special=True) for text in texts] * tokens
    )


def written(
    style: tuple[str, str], calls: Sequence[tuple[str, Any]], thought: str = "", content: str = ""
) -> str:
    """Return what the template writes behind the prompt."""
    made = [
        {"id": "abcdefghi", "type": "function", "function": {"name": name, "arguments": arguments}}
        for name, arguments in calls
    ]
    turn = {"role": "assistant", "content": content, "reasoning_content": thought, "tool_calls": made}
    render = functools.partial(template_of(style).render, tools=TOOLS)
    text = render([QUESTION, turn], add_generation_prompt=False)
    prompt = render([QUESTION]).removesuffix("<thought>\n")
    return text[len(prompt) :].removesuffix("<turn|>\n")


class Held:
    """Whether texts are whole answers by a frame."""

    def __init__(
        self, tokenizer: Tokenizer, frame: AnswerFrame, wanted: StructuredOutput | None = None
    ) -> None:
        self._tokenizer, self._end = tokenizer, tokenizer.encode("</s>", add_special_tokens=False)
        compiler = GrammarCompiler(tokenizer, self._end, tokenizer.vocab_size)
        self._matcher = compiler.compile(wanted, frame).result()

    def allows(self, text: str) -> bool:
        state = self._matcher.copy()
        for token in [*self._tokenizer.encode(text, add_special_tokens=False), *self._end]:
            logits = np.zeros(self._tokenizer.vocab_size, np.float32)
            state.apply(logits)
            if logits[token] < 0:
                return False
            state.observe(token)
        return True


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokenizers")


def frame_of(
    style: tuple[str, str],
    called: Sequence[str] = (),
    *,
    parallel: bool = True,
    strict: bool = False,
    tools: list[Any] = TOOLS,
) -> AnswerFrame:
    given = [{"function": {**tool["function"], "strict": strict}} for tool in tools]
    prompt = template_of(style).render([QUESTION], tools=tools)
    return answer_frame(answer_of(style), prompt, given, called, parallel=parallel)


@pytest.mark.long
@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize("style", list(styles()))
def test_a_demanded_call_is_held_to_the_form_of_the_template(
    style: tuple[str, str], tokens: bool, folder: Path
) -> None:
    held = Held(tokenizer_of(style, folder, tokens=tokens), frame_of(style, ["f", "g.h"]))
    thoughts = ["hm"] if style[1] == "thoughts that the prompt opens" else ["", "hm"]
    for thought in thoughts if style[1] != "no thoughts" else [""]:
        for calls in ([("f", WEATHER)], [("g.h", EVERYTHING)], [("f", {"city": ""})]):
            text = written(style, calls, thought)
            text = text.removeprefix("<thought>\n") if len(thoughts) == 1 else text
            assert held.allows(text)
            assert not held.allows(f"So. {text}") or len(thoughts) == 1
        two = written(style, [("f", WEATHER), ("g.h", WEATHER)], thought) if style[0] not in SINGLE else ""
        two = two.removeprefix("<thought>\n") if len(thoughts) == 1 else two
        assert held.allows(two) is bool(two)
    assert not held.allows("")


@pytest.mark.long
@pytest.mark.parametrize("style", STYLES)
def test_other_calls_are_refused(style: str, folder: Path) -> None:
    both = style, "no thoughts"
    tokenizer = tokenizer_of(both, folder, tokens=False)
    held = Held(tokenizer, frame_of(both, ["f"], parallel=False))
    assert held.allows(written(both, [("f", WEATHER)]))
    for wrong in ({"days": "y"}, {"flag": 3}, {"unit": "K"}, {"numbers": ["a"]}, {"other": 1}):
        assert not held.allows(written(both, [("f", {"city": "x", **wrong})])), wrong
    assert not held.allows(written(both, [("f", {"days": 1})]))
    assert not held.allows(written(both, [("g.h", WEATHER)]))
    assert not held.allows(written(both, [("unknown", WEATHER)]))
    if style not in SINGLE:
        assert not held.allows(written(both, [("f", WEATHER), ("f", WEATHER)]))


@pytest.mark.long
@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize("style", STYLES)
def test_strict_tools_hold_calls_between_free_text(style: str, tokens: bool, folder: Path) -> None:
    both = style, "thoughts"
    held = Held(tokenizer_of(both, folder, tokens=tokens), frame_of(both, strict=True))
    content = "" if style in SINGLE else "See: {a} [b] < c"
    for thought in ("", "hm"):
        assert held.allows(written(both, [("f", WEATHER)], thought, content))
        assert held.allows(written(both, [], thought, "Only text, with <b> and \n lines."))
        assert not held.allows(written(both, [("f", {"city": "x", "days": "y"})], thought, content))
    assert not frame_of(both).is_needed  # tools that are not strict leave the answer free


@pytest.mark.long
@pytest.mark.parametrize("style", ["parameters", "keys and values", "typed parameters", "quoted by a token"])
def test_texts_in_pieces_have_the_masks_of_a_lazy_terminal(
    style: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values with beginnings of their end, many of them, at all places."""
    both = style, "thoughts"
    tokenizer = tokenizer_of(both, folder, tokens=False)
    end = "<|q|>" if style == "quoted by a token" else written(both, [("f", {"city": "@"})]).split("@")[1]
    end = end.split(">")[0] + ">"
    cities = [f"a{end[:at]}{rest}" for at in range(len(end)) for rest in ("b", "\n", end[0])]
    compiler = GrammarCompiler(tokenizer, tokenizer.encode("</s>"), tokenizer.vocab_size)
    states = [compiler.compile(None, frame_of(both, ["f", "g.h"])).result()]
    monkeypatch.setattr(answer_grammar._Lark, "_in_pieces", answer_grammar._Lark._lazily)
    compiler = GrammarCompiler(tokenizer, tokenizer.encode("</s>"), tokenizer.vocab_size)
    states.append(compiler.compile(None, frame_of(both, ["f", "g.h"])).result())
    compared = 0
    for city in cities:
        copies = [state.copy() for state in states]
        text = written(both, [("f", {"city": city, "unit": "C"}), ("g.h", WEATHER)], f"hm{city}")
        for token in tokenizer.encode(text, add_special_tokens=False):
            pieces, lazy = (np.zeros(tokenizer.vocab_size, np.float32) for _ in copies)
            copies[0].apply(pieces)
            copies[1].apply(lazy)
            assert np.array_equal(pieces, lazy), (city, tokenizer.decode([token]))
            compared += 1
            for state in copies:
                state.observe(token)
            if copies[1].error:
                break
    assert compared > 100 * len(cities)


@pytest.mark.long
@pytest.mark.parametrize("style", STYLES)
def test_functions_without_parameters_can_be_called(style: str, folder: Path) -> None:
    both = style, "no thoughts"
    held = Held(tokenizer_of(both, folder, tokens=False), frame_of(both, ["now"], tools=BARE))
    assert held.allows(written(both, [("now", {})]))
    assert not held.allows(written(both, [("now", {"x": 1})]))


@pytest.mark.long
@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize(
    ("thoughts", "right", "wrong"),
    [
        ("no thoughts", ['{"a": 1}'], ["<thought>\nhm\n</thought>\n\n{}", "hm"]),
        ("thoughts", ['{"a": 1}', '<thought>\nhm {"\n</thought>\n\n{"a": 1}'], ["hm</thought>{}", "x"]),
        ("thoughts that the prompt opens", ['hm\n</thought>\n\n{"a": 1}'], ['{"a": 1}']),
        ("thoughts and texts in tags",
         ['<|text|>{"a": 1}<|end_text|>', '<|think|>x<|end_think|><|text|>{}<|end_text|>'], ['{"a": 1}']),
    ],
)  # fmt: skip
def test_a_structured_output_begins_behind_the_thought(
    thoughts: str, right: list[str], wrong: list[str], tokens: bool, folder: Path
) -> None:
    style = "tagged objects", thoughts
    for wanted in (
        StructuredOutput(json_object=True),
        StructuredOutput(json_schema={"type": "object", "properties": {"a": {"type": "integer"}}}),
        StructuredOutput(regex=r'\{("a": 1)?\}'),
        StructuredOutput(grammar='start: "{" ("\\"a\\": 1")? "}"'),
        StructuredOutput(choice=("{}", '{"a": 1}')),
    ):
        held = Held(tokenizer_of(style, folder, tokens=tokens), frame_of(style, tools=[]), wanted)
        assert [held.allows(text) for text in right] == [True] * len(right)
        assert [held.allows(text) for text in wrong] == [False] * len(wrong)


def test_the_end_of_a_thought_in_the_prompt_leaves_no_room_for_another() -> None:
    answer = answer_of(("tagged objects", "thoughts"))
    for prompt, thought in (
        ("<thought>\n", "begun"),
        ("<thought>\n\n</thought>\n\n", "none"),
        ("x", "possible"),
    ):
        assert answer_frame(answer, prompt, [], [], parallel=True).thought == thought


def test_harmony_has_channels(folder: Path) -> None:
    tokens = [
        AddedToken(text, special=True) for text in dict.fromkeys(tags(HARMONY.texts)) if text[:2] == "<|"
    ]
    tokenizer = byte_level_with(folder / "harmony", tokens)
    thought = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    frame = answer_frame(HARMONY, "<|start|>assistant", TOOLS, ["f"], parallel=True)
    held = Held(tokenizer, frame)
    call = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"city": "x"}'
    assert held.allows(call)
    assert held.allows(thought + call)
    assert not held.allows(thought + "<|channel|>final<|message|>No.")
    frame = answer_frame(HARMONY, "<|start|>assistant", [], [], parallel=True)
    held = Held(tokenizer, frame, StructuredOutput(json_object=True))
    assert held.allows(f"{thought}<|channel|>final<|message|>{json.dumps({'a': 1})}")
    assert not held.allows(f"{thought}<|channel|>final<|message|>text")

"""Find how a model writes its answers, by rendering its chat template.

A template writes past answers as the model is to write the next one. It is rendered with a text, a thought,
one call, two calls and calls without arguments, and what differs between these tells the markers. The
result is proven: ``render(parse(render(x)))`` must be ``render(x)``.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ....errors import CarryallError
from ....records import dataclass
from ...types.outputs import merged_calls
from .answer import AnswerParser
from .base import ParsedMessage
from .call_form import (
    KEYS,
    VALUES,
    CallForm,
    UnknownFormError,
    shared_end,
    shared_start,
    tag_start,
    up_to_tag,
    without_end,
)
from .formats import (
    GRANITE,
    HARMONY,
    HERMES,
    ID,
    LLAMA,
    MISTRAL,
    NAME,
    PYTHONIC,
    QWEN_XML,
    TOOLCALL,
    AnswerFormat,
    CallFormat,
    Thought,
    tags,
)

Json = dict[str, Any]
Render = Callable[..., str]
"""``render(messages, tools=..., add_generation_prompt=..., **variables)``; raises CarryallError."""

_TEXT, _THOUGHT, _ASKED = "xqcontentqx", "xqthoughtqx", "xqaskedqx"
_NAMES, _IDS = ("xq_first_call", "xq_other_call"), ("xqa1b2c3d", "xqd4e5f6g")
_NUMBER = "xq_number"

# For templates that do not write calls or thoughts: what their text tells of the model's own markers.
_WRITTEN_CALLS: tuple[tuple[str, CallFormat], ...] = (
    ("[TOOL_CALLS]", MISTRAL), ("<|tool_call_start|>", PYTHONIC), ("<|tool_list_start|>", PYTHONIC),
    ("<|tool_call|>", GRANITE), ("<|python_tag|>", LLAMA), ("<TOOLCALL>", TOOLCALL),
    ("<function=", QWEN_XML), ("<tool_call>", HERMES),
)  # fmt: skip
_WRITTEN_THOUGHTS = (Thought("<think>", "</think>"), Thought("[THINK]", "[/THINK]"))
_HARMONY = ("<|channel|>", "<|message|>")


@dataclass(frozen=True, slots=True)
class Derived:
    """The format of a template's answers.

    Args:
        answer: the format.
        notes: what could not be derived, in words; empty if all was derived and proven.
    """

    answer: AnswerFormat
    notes: tuple[str, ...] = ()

    def document(self) -> dict[str, Any]:
        """Return the format as JSON values, for people to read."""
        thought, calls = self.answer.thought, self.answer.calls
        return {
            "thought": None if thought is None else [thought.open, thought.close],
            "call": None if calls is None else calls.example,
            "notes": list(self.notes),
        }


_HARD = "calls with quotes and line breaks"


def derive(source: str, render: Render, *, described: bool = False) -> Derived:
    """Return how the answers of a chat template are written.

    Args:
        source: the template's text.
        render: renders it.
        described: whether tools and calls are written into messages, as ``tool_messages`` does it.
    """
    if all(text in source for text in _HARMONY):
        return Derived(HARMONY)
    probe = _Probe(render)
    notes: list[str] = []
    thought, text_open, text_close = probe.thought()
    answer = AnswerFormat("derived", thought, None, text_open, text_close)
    if thought is not None and not probe.reads_thought(answer):
        answer = dataclasses.replace(answer, thought=None)
    if answer.thought is None:
        written = next((tags for tags in _WRITTEN_THOUGHTS if tags.close in source), None)
        answer = dataclasses.replace(answer, thought=written)
        if written is not None:
            notes.append(f"thoughts: the template leaves them out of past answers; {written.close} is read")
    if described:
        answer = dataclasses.replace(answer, calls=HERMES)
    elif "tools" in source or "tool_calls" in source:
        try:
            answer = dataclasses.replace(answer, calls=probe.calls(answer))
            notes += probe.prove(answer)
        except UnknownFormError as error:
            calls = next((form for text, form in _WRITTEN_CALLS if text in source), None)
            answer = dataclasses.replace(answer, calls=calls)
            marker = f"{calls.marker or '{'} is read" if calls is not None else "they are read as text"
            notes.append(f"calls: {error}; {marker}")
    return Derived(answer, tuple(notes))


def _tool(name: str) -> Json:
    keys: Json = {key: {"type": "string", "description": "text"} for key in KEYS}
    keys[_NUMBER] = {"type": "integer", "description": "number"}
    parameters = {"type": "object", "properties": keys, "required": []}
    return {"type": "function", "function": {"name": name, "description": "x", "parameters": parameters}}


_TOOLS = [_tool(name) for name in _NAMES]


def _call(at: int, arguments: Any) -> Json:
    return {
        "id": _IDS[at], "type": "function", "function": {"name": _NAMES[at], "arguments": arguments},
    }  # fmt: skip


def _answer(content: Any = "", calls: Sequence[Json] = (), thought: str = "") -> Json:
    turn: Json = {"role": "assistant", "content": content}
    if calls:
        turn["tool_calls"] = list(calls)
    if thought:
        turn |= {"reasoning_content": thought, "reasoning": thought, "thinking": thought}
    return turn


class _Probe:
    """Renders probes of one template."""

    def __init__(self, render: Render) -> None:
        self._render, self._as_text = render, False
        self.variables: Json = {}

    def text(self, answer: Json | None, **variables: Any) -> str:
        """Return what the template writes behind the question.

        Raises:
            UnknownFormError: it refuses the conversation, or leaves the question out.
        """
        asked = {"role": "user", "content": _ASKED}
        turns = [asked] if answer is None else [asked, answer]
        try:
            text = self._render(
                turns, tools=_TOOLS, add_generation_prompt=answer is None, **self.variables, **variables
            )
        except CarryallError as error:
            raise UnknownFormError(f"{error}".split("\n")[0][:160]) from error
        _, asked_text, after = text.rpartition(_ASKED)
        if not asked_text:
            raise UnknownFormError("the template leaves the user's message out")
        return after

    def tried(self, answer: Json | None, **variables: Any) -> str:
        """Return the text, empty if the template refuses."""
        try:
            return self.text(answer, **variables)
        except UnknownFormError:
            return ""

    # --- thoughts and texts

    def thought(self) -> tuple[Thought | None, str, str]:
        """Return the texts around a thought, and those around a text."""
        prompts = [self.tried(None, **options) for options in _SWITCHES]
        plain = self.tried(_answer(_TEXT))
        called = self._called(_answer(_TEXT, [_call(0, {KEYS[0]: VALUES[0]})], _THOUGHT))
        for answer in _thinking():
            for options in _SWITCHES:
                text = self.tried(answer, **options)
                before, thought, after = text.partition(_THOUGHT)
                if not thought or re.search(r"""['"]type['"]""", before[-40:]):
                    continue  # it is left out, or written as the object that it is in
                between, content, _ = after.partition(_TEXT)
                if content and _NAMES[0] not in between:
                    self.variables = dict(options)
                    return self._around(before, between, plain, prompts, called)
                if _NAMES[0] in after:
                    self.variables = dict(options)
                    return self._around(before, self._before_call(after, called), plain, prompts, "")
        opened, closed = self._around_text(plain, prompts[0])
        return None, opened, closed

    def _before_call(self, after: str, called: str) -> str:
        """Return what ends a thought, from what is between it and a call."""
        calls = [_call(0, {KEYS[0]: VALUES[0]})]
        behind = after.partition(_NAMES[0])[0]
        plain = self._called(_answer("", calls)).partition(_NAMES[0])[0]
        return behind.removesuffix(shared_end(behind, plain))

    def _called(self, answer: Json) -> str:
        texts = (self.tried(answer | {"tool_calls": _with(answer, form)}) for form in (dict, json.dumps))
        return next((text for text in texts if _NAMES[0] in text), "")

    def _around(
        self, before: str, after: str, plain: str, prompts: Sequence[str], called: str
    ) -> tuple[Thought | None, str, str]:
        texts = [plain.partition(_TEXT)[0], *prompts]
        texts = [text for text in texts if tags(shared_start(before, text))]
        # ``before`` stands in front of the thought of a rendered answer. What it shares with answers and
        # prompts that have no thought is the turn's header; the rest, from the start of a tag, opens the
        # thought. Some templates put the opening into the prompt: then a prompt is longer than ``before``.
        common = shared_start(before, *texts)
        opening = before[tag_start(before, len(common)) :].strip()
        if not opening and (longer := [text for text in texts if text.startswith(before) and text != before]):
            extra = min(longer, key=len)[len(before) :].strip()
            opening = extra if not tags(before)[-1:] or _is_header(before, plain) else ""
        opening = opening or next(iter(tags(before)[-1:]), "")
        closing = after
        bare = self._called(_answer("", [_call(0, {KEYS[0]: VALUES[0]})], _THOUGHT))
        for behind in (text.partition(_THOUGHT)[2] for text in (called, bare) if _THOUGHT in text):
            shared = shared_start(after, behind)
            shorter = after if shared == after else shared[: tag_start(shared, len(shared))]
            closing = min(closing, shorter, key=len) if shorter.strip() else closing
        text_open = after[len(closing) :].strip()
        if not closing.strip():
            return None, "", ""
        text_close = ""
        if text_open:
            end = plain.partition(_TEXT)[2]
            text_close = without_end(
                end, self._called(_answer(_TEXT, [_call(0, {KEYS[0]: VALUES[0]})]))
            ).strip()
        return Thought(opening, closing.strip()), text_open, text_close

    def _around_text(self, plain: str, prompt: str) -> tuple[str, str]:
        """Return what the template writes around the text of an answer, behind the prompt."""
        before, text, after = plain.partition(_TEXT)
        if not text or not prompt or not before.startswith(prompt):
            return "", ""
        opened = before[len(prompt) :].strip()
        if not tags(opened) or not re.search(r"[<\[]", opened):
            return "", ""
        called = self._called(_answer(_TEXT, [_call(0, {KEYS[0]: VALUES[0]})]))
        behind = called.partition(_TEXT)[2]
        return opened, up_to_tag(shared_start(after, behind)).strip() if behind else ""

    def reads_thought(self, answer: AnswerFormat) -> bool:
        """Return whether a thought and a text that the template wrote are read as such."""
        prompt, thought = self.tried(None), answer.thought
        assert thought is not None  # noqa: S101 -- asked only then
        for turn in _thinking():
            text = self.tried(turn)
            if _THOUGHT not in text or _TEXT not in text:
                continue
            begun, place = text.startswith(prompt), text.find(_THOUGHT)
            opening = text.rfind(thought.open, 0, place)
            # A past answer may begin otherwise than the next one: with its thought, with or without a tag.
            start = len(prompt) if begun else opening if opening >= 0 else place
            opened = (begun or opening < 0) and answer.opens_thought(prompt)
            parser = AnswerParser(ParsedMessage(), answer, (), opened=opened)
            parser.push(text[start:])
            parser.end()
            message = parser.message
            return message.reasoning.text == _THOUGHT and message.content.text.startswith(_TEXT)
        return True  # it writes thoughts before calls only

    # --- calls

    def calls(self, answer: AnswerFormat) -> CallFormat:
        """Return the form of calls.

        Raises:
            UnknownFormError: the template does not write them, or in a form that is not known.
        """
        call, self._as_text = self._one_call()
        end = self._turn_end()
        if any(tag in call for tag in ("\x00",)):
            raise UnknownFormError("the template writes control characters")
        behind = self._behind(call, answer)
        two = self.tried(_answer(self._content, self._calls_of(2, 1)))
        pair = self.text(_answer(self._content, self._calls_of(1, 2)))
        form = CallForm(self._slotted(behind), self._slotted(self._behind_of(two, answer)),
                     self._slotted(self._behind(pair, answer)), end).read()  # fmt: skip
        if form.style != "pairs":
            return form
        given = {_NUMBER: 5}
        number = self.text(_answer(self._content, [_call(0, json.dumps(given) if self._as_text else given)]))
        opened = re.search(rf"{_NUMBER}(.{{1,200}}?)5", number, re.DOTALL)
        if opened is None:
            raise UnknownFormError("numbers have another form than texts")
        return dataclasses.replace(form, value_opens=(form.value_opens[0], opened[1]))

    def _one_call(self) -> tuple[str, bool]:
        """Return a text with one call of one argument, and whether its arguments must be text."""
        error = UnknownFormError("the template leaves calls out of past answers")
        for as_text in (False, True):
            for content in (_TEXT, "", None):
                self._as_text, self._content = as_text, content
                try:
                    text = self.text(_answer(content, self._calls_of(1, 1)))
                except UnknownFormError as refused:
                    error = refused
                    continue
                at = text.find(_NAMES[0])
                if at >= 0 and VALUES[0] in text and text.find(_TEXT) < at:
                    return text, as_text
        raise error

    def _calls_of(self, count: int, arguments: int) -> list[Json]:
        given = dict(zip(KEYS[:arguments], VALUES, strict=False))
        return [_call(at, json.dumps(given) if self._as_text else given) for at in range(count)]

    def _behind_of(self, text: str, answer: AnswerFormat) -> str:
        return self._behind(text, answer) if text and _NAMES[1] in text else ""

    def _behind(self, text: str, answer: AnswerFormat) -> str:
        """Return a text from behind what comes before its first call."""
        at = text.find(_NAMES[0])
        before = text[:at]
        if _TEXT in before:
            start = before.rindex(_TEXT) + len(_TEXT)
            if answer.text_close and text[start:].startswith(answer.text_close):
                start += len(answer.text_close)
        else:
            prompts = [self.tried(None, **options) for options in _SWITCHES]
            plain = self.tried(_answer(_TEXT)).partition(_TEXT)[0]
            start = max(len(shared_start(before, prompt)) for prompt in (*prompts, plain))
            start = tag_start(before, start)
        if answer.thought is not None and (closed := before.rfind(answer.thought.close, start)) >= 0:
            start = closed + len(answer.thought.close)
        for wrapper in (answer.text_open, answer.text_close):
            if wrapper and (closed := before.rfind(wrapper, start)) >= 0:
                start = closed + len(wrapper)
        return text[start:]

    def _turn_end(self) -> str:
        return self.tried(_answer(_TEXT)).rpartition(_TEXT)[2]

    @staticmethod
    def _slotted(text: str) -> str:
        for at, name in enumerate(_NAMES):
            text = text.replace(_IDS[at], ID).replace(name, NAME)
        return text

    # --- proof

    def prove(self, answer: AnswerFormat) -> list[str]:
        """Check that parsed answers render as what was parsed; return what the template itself loses.

        Raises:
            UnknownFormError: one does not.
        """
        assert answer.calls is not None  # noqa: S101 -- just derived
        for name, turn in self._proofs(single=answer.calls.single):
            try:
                rendered = self.text(turn)
            except UnknownFormError as error:
                raise UnknownFormError(f"{name} cannot be rendered ({error})") from error
            try:
                parsed = self._parsed(rendered, answer)
            except UnknownFormError:
                if name != _HARD:
                    raise
                parsed = {}
            again = self.tried(parsed | {"content": turn["content"]}) if parsed else ""
            if again == rendered:
                continue
            if name == _HARD:
                return [
                    "calls: the template writes texts with quotes or line breaks in a form that is not unique"
                ]
            raise UnknownFormError(f"{name} do not survive parsing and rendering")
        return []

    def _proofs(self, *, single: bool) -> Iterator[tuple[str, Json]]:
        values: Json = {KEYS[0]: "5", KEYS[1]: "a <b> c {d}", _NUMBER: 5}
        plain: Json = {KEYS[0]: "x"}
        cases: list[tuple[str, list[Json]]] = [
            ("calls", [plain]), ("calls of three arguments", [values]), ("calls without arguments", [{}]),
        ]  # fmt: skip
        if not single:
            cases.append(("two calls", [plain, values]))
        cases.append((_HARD, [{KEYS[0]: "a \"b\" 'c' \\ d\n e"}]))
        for name, arguments in cases:
            calls = [_call(at, json.dumps(one) if self._as_text else one) for at, one in enumerate(arguments)]
            yield name, _answer(self._content, calls)

    def _parsed(self, rendered: str, answer: AnswerFormat) -> Json:
        calls = answer.calls
        assert calls is not None  # noqa: S101 -- just derived
        text = self._behind(rendered, answer)
        parser = AnswerParser(
            ParsedMessage(), dataclasses.replace(answer, thought=None), _TOOLS, opened=False
        )
        parser.push(text)
        parser.end()
        found = merged_calls(parser.message.tool_calls)
        turns = []
        for at, call in enumerate(found):
            try:
                arguments = json.loads(call.arguments)
            except ValueError:
                raise UnknownFormError(f"arguments are read as invalid JSON ({call.arguments:.60})") from None
            turn = _call(min(at, 1), json.dumps(arguments) if self._as_text else arguments)
            turn["function"]["name"] = call.name
            turns.append(turn)
        return _answer("", turns)


_SWITCHES: tuple[Json, ...] = ({}, {"enable_thinking": True, "thinking": True}, {"enable_thinking": False})


def _thinking() -> list[Json]:
    parts = [{"type": "thinking", "thinking": _THOUGHT}, {"type": "text", "text": _TEXT}]
    calls = [_call(0, {KEYS[0]: VALUES[0]})]
    return [_answer(_TEXT, (), _THOUGHT), _answer(parts), _answer("", calls, _THOUGHT)]


def _with(answer: Json, form: Callable[[Any], Any]) -> list[Json]:
    return [_call(at, form(call["function"]["arguments"])) for at, call in enumerate(answer["tool_calls"])]


def _is_header(before: str, plain: str) -> bool:
    return plain.partition(_TEXT)[0].rstrip() == before.rstrip()

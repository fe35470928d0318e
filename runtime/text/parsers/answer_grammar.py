"""Grammars of answers, by the format of the model's chat template: a thought, then text, calls, or a body.

The result is in the Lark syntax of https://github.com/guidance-ai/llguidance.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from ....records import dataclass
from .argument_readers import types_of
from .formats import ARGUMENTS, ID, INDEX, NAME, AnswerFormat, CallFormat, slots

Split = Callable[[str], Sequence[str | int]]
"""Splits a text into plain texts and the ids of the tokens that are no text for a grammar."""

_SLOTS = {ID: "/[A-Za-z0-9]{9}/", INDEX: "/[0-9]{1,2}/"}
_SIMPLE = {"integer": "/-?(0|[1-9][0-9]{0,17})/", "boolean": '("true" | "false")', "null": '"null"',
           "number": r"/-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?([eE][+-]?[0-9]{1,3})?/"}  # fmt: skip
# After a thought, and where a template has line breaks that models leave out.
_SPACE = r"/[ \t\r\n]{0,8}/"


@dataclass(frozen=True, slots=True)
class AnswerFrame:
    """What a grammar holds an answer to. Hashable, since compiled grammars are cached by it.

    Args:
        answer: the format.
        thought: whether the answer begins in a thought, may have one, or has none.
        tools: the tools that may be called, as JSON text; empty if there are none.
        must_call: whether the answer consists of calls; else they may come between text.
        parallel: whether there may be several.
        offered: tools that the model may call or not, as JSON text: a call is held from its first marker on.
    """

    answer: AnswerFormat
    thought: Literal["begun", "possible", "none"] = "none"
    tools: str = ""
    must_call: bool = False
    parallel: bool = True
    offered: str = ""

    @property
    def call_frame(self) -> AnswerFrame | None:
        """What holds calls of the offered tools, once one begins; None if there are none."""
        return replace(self, tools=self.offered, offered="") if self.offered else None

    @property
    def is_needed(self) -> bool:
        """Whether an answer is held without a body: there must be calls, or they are ``strict``."""
        return bool(self.tools)

    def lark(self, split: Split, *, has_body: bool) -> str:
        """Return the grammar; its rule ``@body`` is another grammar.

        Args:
            split: see ``Split``.
            has_body: whether the answer is a body, or calls if the frame has tools.
        """
        return _Lark(self, split).text(has_body=has_body)


def answer_frame(
    answer: AnswerFormat,
    prompt: str,
    tools: Sequence[Mapping[str, Any]],
    called: Collection[str],
    *,
    parallel: bool,
) -> AnswerFrame:
    """Return what a grammar holds the answer to a rendered prompt to.

    Args:
        answer: the format.
        prompt: the prompt, which may end in a thought, or behind one.
        tools: the tools of the request.
        called: the names of those of which one must be called; empty if the model may choose.
        parallel: whether there may be several calls.
    """
    thought: Literal["begun", "possible", "none"] = "possible"
    if answer.thought is None or prompt.rstrip().endswith(answer.thought.close.strip()):
        thought = "none"
    elif answer.opens_thought(prompt):
        thought = "begun"
    functions = [tool.get("function", tool) for tool in tools]
    if called:
        functions = [function for function in functions if function.get("name") in called]
    elif not any(function.get("strict") is True for function in functions):
        # Without a marker the beginning of a call is not known; harmony's are those of all messages.
        marked = answer.calls is not None and bool(answer.calls.marker) and not answer.harmony
        offered = json.dumps(functions) if functions and marked else ""
        return AnswerFrame(answer, thought, parallel=parallel, offered=offered)
    held = json.dumps(functions) if functions else ""
    return AnswerFrame(answer, thought, held, must_call=bool(called), parallel=parallel)


class _Lark:
    """Writes one grammar."""

    def __init__(self, frame: AnswerFrame, split: Split) -> None:
        self._frame, self._split = frame, split
        self._rules: dict[str, str] = {}
        self._terms: dict[str, str] = {}

    def text(self, *, has_body: bool) -> str:
        """Return the grammar."""
        start = f"{self._thought()} {self._answer(has_body=has_body)}"
        rules = {"start": start, **self._rules}
        return "\n".join(f"{name}: {rule}" for name, rule in (rules | self._terms).items())

    def _thought(self) -> str:
        thought = self._frame.answer.thought
        if thought is None or self._frame.thought == "none":
            return ""
        closed = f"{self._until(thought.close.strip())} {_SPACE}"
        return closed if self._frame.thought == "begun" else f"({self._exactly(thought.open)} {closed})?"

    def _answer(self, *, has_body: bool) -> str:
        frame, answer = self._frame, self._frame.answer
        body = f"{self._exactly(answer.text_open)} @body {self._exactly(answer.text_close)}"
        if not frame.tools or answer.calls is None:
            return body
        tools: list[Mapping[str, Any]] = json.loads(frame.tools)
        calls = replace(
            answer.calls, opening=answer.calls.opening.lstrip(), closing=answer.calls.closing.rstrip()
        )
        calls = calls if calls.opening else replace(calls, head=calls.head.lstrip())
        if frame.must_call:
            return self._section(calls, tools, "section")
        if has_body:
            return f"({self._section(calls, tools, 'section')} | {body})" if calls.marker else body
        return self._text_with(calls, tools)

    # --- calls

    def _text_with(self, calls: CallFormat, tools: Sequence[Mapping[str, Any]]) -> str:
        """Return the rule of text in which calls may be."""
        if not calls.marker:
            thought = self._frame.answer.thought
            is_plain = r"/[^{\[ \t\r\n](?s:.*)/"
            no_thought = (
                f" & ~/{_regex_of(thought.open)}(?s:.*)/" if thought is not None and thought.open else ""
            )
            self._terms["PLAIN"] = is_plain + no_thought
            return f"({_SPACE} ({self._section(calls, tools, 'section')} | PLAIN))?"
        if any(isinstance(part, int) for part in self._split(calls.marker)):
            # The marker is a token, which is no text.
            return f"{self._free()} ({self._section(calls, tools, 'section')} {self._free()})*"
        self._terms["PLAIN"] = f"~/(?s:.*){_regex_of(calls.marker)}(?s:.*)/"
        first = calls.opening or calls.head
        behind = first[first.index(calls.marker) + len(calls.marker) :]
        rest = replace(calls, opening=behind) if calls.opening else replace(calls, head=behind)
        if not calls.opening:
            rest = replace(rest, single=True)  # each has the marker
        return f"({self._lazily(calls.marker)} {self._section(rest, tools, 'section')})* PLAIN"

    def _section(self, calls: CallFormat, tools: Sequence[Mapping[str, Any]], name: str) -> str:
        self._rules["call"] = " | ".join(self._call(calls, tool, at) for at, tool in enumerate(tools))
        more = ""
        if self._frame.parallel and not calls.single:
            more = f"({self._exactly(calls.separator)} call)*"
        self._rules[name] = f"{self._exactly(calls.opening)} call {more} {self._exactly(calls.closing)}"
        return name

    def _call(self, calls: CallFormat, tool: Mapping[str, Any], at: int) -> str:
        function = tool.get("function", tool)
        name, schema = function["name"], function.get("parameters") or {"type": "object"}
        head = calls.head
        match calls.style:
            case "object":
                text = head + calls.envelope.replace(NAME, json.dumps(name, ensure_ascii=False)[1:-1])
                arguments = _json(schema)
            case "json":
                text, arguments = head + ARGUMENTS, _json(schema)
            case "pairs":
                text, arguments = head.rstrip() + ARGUMENTS, self._pairs(calls, schema, f"pairs_{at}")
            case "literal":
                arguments = self._literals(calls, schema, f"literals_{at}")
                text = head + calls.brackets[0] + ARGUMENTS + calls.brackets[1]
        text = text.replace(NAME, name) + calls.close
        given = _SLOTS | {ARGUMENTS: f"arguments_{at}"}
        self._rules[f"arguments_{at}"] = arguments
        parts = (given.get(part) or self._exactly(part) for part in slots(text))
        self._rules[f"call_{at}"] = " ".join(filter(None, parts))
        return f"call_{at}"

    # --- arguments that are no JSON

    def _pairs(self, calls: CallFormat, schema: Any, name: str) -> str:
        close = calls.value_close.rstrip()
        separator = calls.value_close[len(close) :]
        before = calls.head[len(calls.head.rstrip()) :]
        items = []
        for key, value in _properties(schema):
            types = types_of(value)
            texts = _texts(value)
            if texts:
                told = f"({' | '.join(self._exactly(text) for text in texts)}) {self._exactly(close)}"
                opened = calls.value_opens[0]
            elif not types or "string" in types:
                told, opened = self._until(close), calls.value_opens[0]
            else:
                told, opened = f"{_json(value, schema)} {self._exactly(close)}", calls.value_opens[1]
            items.append((key, f"{self._exactly(calls.key_open + key + opened)} {told}"))
        if not items:
            return self._exactly(before) + self._open_pairs(calls, close) if _is_open(schema) else '""'
        return self._sequence(items, schema, name, self._exactly(before), self._exactly(separator))

    def _open_pairs(self, calls: CallFormat, close: str) -> str:
        key, opened = self._exactly(calls.key_open), self._exactly(calls.value_opens[0])
        return f" ({key} /[A-Za-z_][A-Za-z0-9_.-]{{0,63}}/ {opened} {self._until(close)} {_SPACE})*"

    def _literals(self, calls: CallFormat, schema: Any, name: str) -> str:
        items = [
            (key, f"{self._exactly(key + calls.assign)} {self._literal(calls, value, f'{name}_{at}')}")
            for at, (key, value) in enumerate(_properties(schema))
        ]
        if items:
            return self._sequence(items, schema, name, "", '","' if calls.brackets == "{}" else '", "')
        if not _is_open(schema):
            return '""'
        pair = f"/[A-Za-z_][A-Za-z0-9_]{{0,63}}/ {self._exactly(calls.assign)} {self._any(calls)}"
        return f'({pair} (","/ {{0,1}}/ {pair})*)?'

    def _literal(self, calls: CallFormat, schema: Any, name: str) -> str:
        types, texts = types_of(schema), _texts(schema)
        if texts:
            quote = self._exactly(calls.quotes[0])
            return f"({' | '.join(f'{quote} {self._exactly(text)} {quote}' for text in texts)})"
        choices = [_SIMPLE[kind] for kind in types if kind in _SIMPLE and (kind != "null" or len(types) > 1)]
        if "string" in types:
            choices.append(self._quoted(calls))
        if "array" in types:
            items = schema.get("items") if isinstance(schema, Mapping) else None
            item = (
                self._literal(calls, items, f"{name}_item")
                if isinstance(items, Mapping)
                else self._any(calls)
            )
            self._rules[name] = f'"[" ({item} ("," / {{0,1}}/ {item})*)? "]"'
            choices.append(name)
        if not types or "object" in types:
            choices = [self._any(calls)]
        return f"({' | '.join(choices)})"

    def _quoted(self, calls: CallFormat) -> str:
        quote = calls.quotes[0]
        if len(quote) > 1:
            return f"{self._exactly(quote)} {self._until(quote)}"
        return rf"/{quote}([^{quote}\\\n]|\\[^\n])*{quote}/"

    def _any(self, calls: CallFormat) -> str:
        """Return the rule of any value."""
        key = "/[A-Za-z_][A-Za-z0-9_]{0,63}/" if len(calls.quotes[0]) > 1 else self._quoted(calls)
        comma = '"," / {0,1}/'
        self._rules["any"] = " | ".join([*_SIMPLE.values(), self._quoted(calls), "any_list", "any_object"])
        self._rules["any_list"] = f'"[" (any ({comma} any)*)? "]"'
        pair = f'{key} ":" / {{0,1}}/ any'
        self._rules["any_object"] = f'"{{" ({pair} ({comma} {pair})*)? "}}"'
        return "any"

    def _sequence(
        self, items: Sequence[tuple[str, str]], schema: Any, name: str, before: str, separator: str
    ) -> str:
        """Return the rule of items in order, of which those that are not required may be left out.

        Args:
            items: the rule of each by its key.
            schema: tells which are required.
            name: begins the names of further rules.
            before: comes before the first item, if there is one.
            separator: comes between two.
        """
        required = schema.get("required") or () if isinstance(schema, Mapping) else ()
        begun = started = '""'  # what may follow when an item was written, and when none was
        for at in range(len(items) - 1, -1, -1):
            key, item = items[at]
            self._rules[f"{name}_k{at}"] = item
            later, first = f"{separator} {name}_k{at} {begun}", f"{before} {name}_k{at} {begun}"
            is_required = key in required
            self._rules[f"{name}_l{at}"] = later if is_required else f"{later} | {begun}"
            self._rules[f"{name}_f{at}"] = first if is_required else f"{first} | {started}"
            begun, started = f"{name}_l{at}", f"{name}_f{at}"
        return started

    # --- texts

    def _exactly(self, text: str) -> str:
        """Return the rule of one text, empty if there is none."""
        return " ".join(
            f"<[{part}]>" if isinstance(part, int) else _quoted(part) for part in self._split(text)
        )

    def _until(self, text: str) -> str:
        """Return the rule of any text up to the end of the first such text."""
        parts = list(self._split(text))
        first = next((at for at, part in enumerate(parts) if isinstance(part, int)), None)
        if first is not None:
            rest = " ".join(
                f"<[{part}]>" if isinstance(part, int) else _quoted(part) for part in parts[first:]
            )
            return f"{self._free()} {rest}"
        return self._lazily(text) if text[:1] in text[1:] else self._in_pieces(text)

    def _lazily(self, text: str) -> str:
        """Return the terminal of any text up to the end of the first such text."""
        name = f"until_{len(self._terms)}"
        term = f"/(?s:.*){_regex_of(text)}/"
        name = next((known for known, rule in self._terms.items() if rule == term), f"{name}[lazy]")
        self._terms[name] = term
        return name.removesuffix("[lazy]")

    def _in_pieces(self, text: str) -> str:
        """Return ``_lazily`` as a rule of terminals, whose masks are found faster.

        llguidance takes a terminal as a whole for most tokens of a mask, but not a lazy one. Here one is
        any text without the first character of ``text``, the other the beginning of ``text`` and no more.
        The first character must be in ``text`` once only: else a beginning could hide another one.
        """
        end = _quoted(text)
        known = {rule: name for name, rule in self._rules.items() if name.startswith("pieces_")}
        name = next((name for rule, name in known.items() if rule.endswith(f")* {end}")), "")
        if name:
            return name
        name = f"pieces_{len(self._rules)}"
        begun = ""
        for character in reversed(text[1:-1]):
            begun = f"({_regex_of(character)}{begun})?"
        first = _regex_of(text[0])
        self._terms[f"FAR_{name}".upper()] = f"/[^{first}]+/"
        pieces = f"FAR_{name}".upper()
        if len(text) > 1:
            self._terms[f"NEAR_{name}".upper()] = f"/{first}{begun}/"
            pieces += f" | NEAR_{name}".upper()
        self._rules[name] = f"({pieces})* {end}"
        return name

    def _free(self) -> str:
        self._terms["FREE"] = "/(?s:.*)/"
        return "FREE"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _json(schema: Any, root: Any = None) -> str:
    """Return the rule of a value by its schema, whose references begin at ``root``."""
    from ..json_schema import held_schema  # loads the library for grammars, for 20 ms of each start

    if isinstance(schema, Mapping) and isinstance(root, Mapping):
        definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
        schema = {**definitions, **schema}
    held = held_schema(json.dumps(schema))
    document = json.loads(held.text)
    if isinstance(document, dict):
        document = {"x-guidance": held.options, **document}
    return f"%json {json.dumps(document, ensure_ascii=False)}"


def _properties(schema: Any) -> list[tuple[str, Any]]:
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return list(properties.items()) if isinstance(properties, Mapping) else []


def _is_open(schema: Any) -> bool:
    return not (isinstance(schema, Mapping) and (schema.get("additionalProperties") is False or
                                                  "properties" in schema))  # fmt: skip


def _texts(schema: Any) -> list[str]:
    """Return the texts that a value may be, empty if it may be something else."""
    if not isinstance(schema, Mapping):
        return []
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if isinstance(values, list) and all(isinstance(value, str) for value in values) else []


def _regex_of(text: str) -> str:
    """Return a regular expression of one text, as it stands between slashes."""
    return re.sub(r"[\\.+*?()|\[\]{}^$#&\-~/]", r"\\\g<0>", text).replace("\n", r"\n")

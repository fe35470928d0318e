"""How a chat model writes an answer: the markers of thoughts, text and calls, and the form of arguments.

A format is data. ``derivation`` finds it by rendering a chat template, ``answer`` parses by it, and
``call_grammar`` constrains by it. ``NAMED`` holds those that a caller may choose by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

from ....records import dataclass

# Stand for what changes from call to call, in the head of a call.
NAME, ID, INDEX = "\x00name\x00", "\x00id\x00", "\x00index\x00"
# What a template may write as a name: functions of OpenAI, and those of MCP servers.
NAME_PATTERN = r"[\w./:-]+"

_SLOT = re.compile("(\x00\\w+\x00)")
_TAG = re.compile(r"<[^<>\x00]*>?|\[[^\[\]]*\]|[^\s<>\[\]]+")

_VALUES = {ID: r"[\w./:-]*", INDEX: r"\d*"}

Style = Literal["object", "json", "pairs", "literal"]


@dataclass(frozen=True, slots=True)
class Thought:
    """The texts around a thought; ``open`` may be the end of the prompt, and is part of no thought."""

    open: str
    close: str


@dataclass(frozen=True, slots=True)
class CallFormat:
    """The texts of calls, with the whitespace of the template; parsers take any whitespace between tags.

    ``opening head arguments close separator head arguments close closing``

    Args:
        style: ``object``: a JSON object holds the name and the arguments; ``json``: the arguments are a JSON
            object; ``pairs``: each argument is text between tags; ``literal``: ``{key: value}`` or
            ``(key=value)`` with values as in Python or JSON.
        opening: before the first call of a section; empty if each call stands alone.
        head: before the arguments, with ``NAME``, and ``ID`` or ``INDEX`` where the template has them; for
            ``object`` what is before the object.
        close: after the arguments.
        separator: between two calls of a section.
        closing: after the last call of a section.
        name_keys: ``object``: the path of keys to the name; empty if the name is the only key.
        argument_keys: ``object``: the path of keys to the arguments.
        listed: ``object``: the objects are items of a list.
        envelope: ``object``: the text of the object with ``NAME`` and, for the arguments, ``ARGUMENTS``.
        key_open: ``pairs``: before a key.
        value_opens: ``pairs``: between a key and its value: for texts, and for other values.
        value_close: ``pairs``: after a value.
        quotes: ``literal``: what may be around a text; the first one is the template's own.
        assign: ``literal``: between a key and its value.
        brackets: ``literal``: around the arguments.
        alternative: another text that begins a section of the same form.
        single: the template takes one call an answer.
    """

    style: Style
    opening: str = ""
    head: str = ""
    close: str = ""
    separator: str = ""
    closing: str = ""
    name_keys: tuple[str, ...] = ("name",)
    argument_keys: tuple[str, ...] = ("arguments",)
    listed: bool = False
    envelope: str = ""
    key_open: str = ""
    value_opens: tuple[str, str] = ("", "")
    value_close: str = ""
    quotes: tuple[str, ...] = ('"',)
    assign: str = ":"
    brackets: str = "{}"
    alternative: str = ""
    single: bool = False

    @property
    def marker(self) -> str:
        """The text that begins a section; empty if only the beginning of the answer can be a call."""
        for text in (self.opening, _SLOT.split(self.head)[0]):
            if found := tags(text):
                return found[0] if self.style != "object" or len(found[0]) > 1 else ""
        return ""

    @property
    def closers(self) -> tuple[str, ...]:
        """The tags that may follow the arguments of a call, the innermost first."""
        return tuple(dict.fromkeys(tag for tag in tags(f"{self.close} {self.closing}") if tag not in "]})"))

    @property
    def example(self) -> str:
        """A call as the template writes it, with names in place of what changes."""
        key, value = "KEY", "VALUE"
        arguments = '{"KEY": VALUE}'
        match self.style:
            case "object":
                call = self.head + self.envelope.replace(ARGUMENTS, arguments)
            case "json":
                call = self.head + arguments
            case "pairs":
                close = self.value_close.rstrip()  # what follows it is between two values
                call = f"{self.head}{self.key_open}{key}{self.value_opens[0]}{value}{close}"
            case "literal":
                text = f"{key}{self.assign}{self.quotes[0]}{value}{self.quotes[0]}"
                call = f"{self.head}{self.brackets[0]}{text}{self.brackets[1]}"
        text = self.opening + call + self.close + self.closing
        return text.replace(NAME, "NAME").replace(ID, "ID").replace(INDEX, "0").strip()

    def head_pattern(self) -> str:
        """Return a regular expression of what follows the marker up to the arguments.

        Groups ``name`` and, if the head has it, ``id``. Whitespace between tags does not count.
        """
        head = self.opening + self.head
        if self.marker:
            head = head[head.index(self.marker) + len(self.marker) :]
        parts = [part for part in _SLOT.split(head) if part.strip()]
        pieces: list[str] = []
        for at, part in enumerate(parts):
            if part == NAME and NAME in parts[:at]:
                pieces.append("(?P=name)")
            elif part == NAME and at + 1 == len(parts) and self.style == "pairs":
                pieces.append(rf"\s*(?P<name>{NAME_PATTERN})(?=[^\w./:-])")  # whatever ends it
            elif part == NAME:
                pieces.append(rf"\s*(?P<name>{NAME_PATTERN}?)")
            elif part in (ID, INDEX):
                # A model may leave out an id with the tag before it.
                tag = pieces.pop() if at and parts[at - 1] not in (NAME, ID, INDEX) else ""
                pieces.append(rf"(?:{tag}{_VALUES[part]})?")
            else:
                pieces.append(spaced(part))
        return "".join(pieces) + (r"\s*" if self.style != "pairs" else "")

    def begins_head(self, text: str) -> bool:
        """Return whether a text after the marker is the beginning of a call that was cut in its head."""
        head = self.opening + self.head
        if self.marker:
            head = head[head.index(self.marker) + len(self.marker) :]
        parts = [part for part in _SLOT.split(head) if part.strip()]
        plain: list[str] = []  # a model may leave out an id with the tag before it
        for at, part in enumerate(parts):
            if part not in _VALUES:
                plain.append(part)
            elif at and parts[at - 1] not in (NAME, *_VALUES):
                plain.pop()
        return any(re.fullmatch(_beginning(some), text) for some in (parts, plain))


ARGUMENTS = "\x00arguments\x00"


def slots(text: str) -> Iterator[str]:
    """Yield the parts of a text with slots: texts and slots in turn."""
    yield from (part for part in _SLOT.split(text) if part)


def tags(text: str) -> list[str]:
    """Return the tags of a text, and the words between them, without whitespace."""
    return _TAG.findall(text)


def spaced(text: str) -> str:
    """Return a regular expression of a text in which whitespace may be any, also around it."""
    words = [re.escape(word) for word in text.split()]
    return r"\s*" + r"\s*".join(words) + r"\s*" if words else r"\s*"


def _beginning(parts: list[str]) -> str:
    """Return a regular expression of each beginning of a head, in which whitespace may be any."""
    units: list[str] = []
    for part in parts:
        if part in (NAME, *_VALUES):
            units.append(_VALUES.get(part, NAME_PATTERN))
        else:
            units += [unit for word in part.split() for unit in (r"\s*", *map(re.escape, word))] + [r"\s*"]
    pattern = ""
    for unit in reversed(units):
        pattern = f"(?:{unit}{pattern})?"
    return pattern


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How a model writes an answer.

    Args:
        source: where the format comes from, for ``inspect`` and logs.
        thought: None if the template has no thoughts.
        calls: None if the template has no calls, or their form is not known.
        text_open: before the text of the answer.
        text_close: after it.
        special: whether tags may be special tokens, which are usually left out of a text.
        harmony: the answer is messages of channels, as gpt-oss writes them; ``harmony`` reads them.
    """

    source: str
    thought: Thought | None = None
    calls: CallFormat | None = None
    text_open: str = ""
    text_close: str = ""
    special: bool = True
    harmony: bool = False

    @property
    def texts(self) -> str:
        """The markers, to look for special tokens in."""
        texts = [self.text_open, self.text_close]
        if self.thought is not None:
            texts += [self.thought.open, self.thought.close]
        if (calls := self.calls) is not None:
            texts += [calls.opening, calls.head, calls.close, calls.separator, calls.closing, calls.key_open]
            texts += [*calls.value_opens, calls.value_close, *calls.quotes, calls.alternative]
        return "\n".join(texts)

    def opens_thought(self, prompt: str) -> bool:
        """Return whether an answer to a rendered prompt begins within a thought."""
        return (
            self.thought is not None
            and bool(self.thought.open)
            and prompt.rstrip().endswith(self.thought.open)
        )


_OBJECT = '{"name": "' + NAME + '", "arguments": ' + ARGUMENTS + "}"

HERMES = CallFormat("object", head="<tool_call>\n", close="\n</tool_call>", separator="\n", envelope=_OBJECT)
# A list, or since version 11 of its tokenizer a call for each marker: the parser takes objects in both.
MISTRAL = CallFormat("json", head=f"[TOOL_CALLS]{NAME}[CALL_ID]{ID}[ARGS]", envelope=_OBJECT)
LLAMA = CallFormat(
    "object", separator="; ", argument_keys=("parameters",), alternative="<|python_tag|>",
    envelope='{"name": "' + NAME + '", "parameters": ' + ARGUMENTS + "}",
)  # fmt: skip
PYTHONIC = CallFormat(
    "literal", opening="<|tool_call_start|>[", head=NAME, separator=", ", closing="]<|tool_call_end|>",
    quotes=('"', "'"), assign="=", brackets="()",
)  # fmt: skip
GRANITE = CallFormat(
    "object", opening="<|tool_call|>[", listed=True, separator=", ", closing="]", envelope=_OBJECT
)

TOOLCALL = CallFormat("object", opening="<TOOLCALL>[", listed=True, separator=", ", closing="]</TOOLCALL>",
                      envelope=_OBJECT)  # fmt: skip
QWEN_XML = CallFormat(
    "pairs", head=f"<tool_call>\n<function={NAME}>\n", close="\n</function>\n</tool_call>", separator="\n",
    key_open="<parameter=", value_opens=(">\n", ">\n"), value_close="\n</parameter>\n",
)  # fmt: skip

HARMONY = AnswerFormat(
    "harmony",
    Thought("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
    CallFormat(
        "json", head=f"<|channel|>commentary to=functions.{NAME} <|constrain|>json<|message|>", single=True
    ),
    text_open="<|channel|>final<|message|>",
    harmony=True,
)

NAMED: dict[str, CallFormat] = {"mistral": MISTRAL, "llama": LLAMA, "hermes": HERMES}

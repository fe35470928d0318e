"""The parser of answers whose format is data; see ``formats``."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from .argument_readers import LiteralReader, PairsReader
from .base import MessageParser, ParsedMessage
from .call_reader import ArgumentsReader, CallReader, name_of_cut
from .formats import NAME, NAME_PATTERN, AnswerFormat, CallFormat
from .json_span import JsonSpan

# Between two objects or calls of a section, and before the first.
_PUNCTUATION = " \t\r\n,;[]"
_BARE = re.compile(rf"\[?\s*{NAME_PATTERN}\(")
_PARTIAL_BARE = re.compile(r"\[\s*[\w./:-]*")
_HEADLESS = re.compile(rf"[\s,\[]*(?P<name>{NAME_PATTERN})\s*")
_NAMED = re.compile(rf"{NAME_PATTERN}\s*")
_LONGEST_HEAD = 512  # characters

Reader = CallReader | ArgumentsReader | LiteralReader | PairsReader


class AnswerParser(MessageParser):
    """Parses thoughts, text and calls.

    Calls to unknown functions are calls: the client refuses them. A call in a thought is part of it, as
    models draft calls there. But where the answer ends behind it, the model forgot to end the thought, and
    it is a call if its function is known. Such a text is held back until what follows it tells.

    Args:
        message: receives the parts.
        answer: the format.
        tools: the tools of the request, whose schemas type the arguments that are text; empty leaves calls
            in the text.
        opened: whether the prompt begins a thought.
    """

    def __init__(
        self,
        message: ParsedMessage,
        answer: AnswerFormat,
        tools: Sequence[Mapping[str, Any]],
        *,
        opened: bool,
    ) -> None:
        super().__init__(message)
        self.needs_special_tokens = answer.special
        self._thought, self._calls = answer.thought, answer.calls if tools else None
        self._properties = {name: properties for name, properties in map(_properties, tools) if name}
        self._opening = ""  # the marker that began the section
        self._reader: Reader | None = None
        self._state = "thought" if opened else "start"
        self._readers = {
            "start": self._read_start, "thought": self._read_thought, "held": self._read_held,
            "ended": self._read_ended, "answer": self._read_answer, "text": self._read_text,
            "section": self._read_section, "arguments": self._read_arguments, "between": self._read_between,
        }  # fmt: skip
        self._held = ""  # the end of the thought that may be calls, with its marker
        self._held_calls: AnswerParser | None = None  # reads it
        self._new_held_calls = functools.partial(
            AnswerParser, answer=dataclasses.replace(answer, thought=None), tools=tools, opened=False
        )
        self._dropped = tuple(text.strip() for text in (answer.text_open, answer.text_close) if text.strip())
        markers = (self._calls.marker, self._calls.alternative) if self._calls else ()
        self._markers = tuple(text for text in markers if text)
        if self._calls is not None:
            inner = dataclasses.replace(self._calls, opening="")
            self._head, self._next_head = map(re.compile, (self._calls.head_pattern(), inner.head_pattern()))
            self._next_marker = inner.marker if self._calls.opening and self._calls.style != "object" else ""
            self._closers = self._calls.closers

    def _advance(self, *, final: bool) -> bool:
        before = self._text, self._state
        more = self._readers[self._state](final=final)
        return more and (self._text, self._state) != before

    # --- thought and text

    def _read_start(self, *, final: bool) -> bool:
        """Find whether the answer begins with a thought."""
        text = self._text.lstrip()
        opening = self._thought.open if self._thought is not None else ""
        if opening and opening.startswith(text) and len(text) < len(opening) and not final:
            return False
        opened = bool(opening) and text.startswith(opening)
        self._text = text[len(opening) :] if opened else self._text
        self._state = "thought" if opened else "answer"
        return True

    def _read_thought(self, *, final: bool) -> bool:
        assert self._thought is not None  # noqa: S101 -- only a thought is in this state
        text, marker = self._until(self._thought.close, *self._markers, final=final)
        self.message.reasoning.add(text)
        if marker == self._thought.close:
            self._state = "answer"
        elif marker:
            self._state, self._opening, self._held = "held", marker, marker
            self._held_calls = self._new_held_calls(ParsedMessage())
            self._held_calls.push(marker)
        return bool(marker)

    def _read_held(self, *, final: bool) -> bool:
        """Read what follows the marker of a call in a thought, up to the end of the thought."""
        assert self._thought is not None  # noqa: S101 -- see _read_thought
        assert self._held_calls is not None  # noqa: S101 -- see _read_thought
        text, marker = self._until(self._thought.close, final=final)
        self._held += text
        self._held_calls.push(text)
        if self._held_calls.message.content.text:
            return self._release(marker)
        if marker:
            self._state = "ended"
            return True
        return final and self._end_held("")

    def _read_ended(self, *, final: bool) -> bool:
        """Read what follows a thought that ended behind what may be calls."""
        assert self._thought is not None  # noqa: S101 -- see _read_thought
        if self._text.strip():
            self.message.reasoning.add(self._held)
            self._state = "answer"
            return True
        return final and self._end_held(self._thought.close)

    def _end_held(self, close: str) -> bool:
        """Add the held calls to the message if they are whole; their text to the thought otherwise."""
        held = self._held_calls
        assert held is not None  # noqa: S101 -- see _read_thought
        names = {call.name for call in held.message.tool_calls if call.id}
        if self._cut or not held.is_behind_calls or not names <= self._properties.keys():
            return self._release(close)
        self.message.tool_calls += held.message.tool_calls
        self._text, self._state = "", "text"
        return False

    def _release(self, close: str) -> bool:
        """Add the held marker to the thought, and read on behind it."""
        self.message.reasoning.add(self._opening)
        self._text, self._state = self._held[len(self._opening) :] + close + self._text, "thought"
        return True

    @property
    def is_behind_calls(self) -> bool:
        """Whether a call was read, and nothing but closing tags behind it."""
        rest = self._text.strip(_PUNCTUATION)
        return self._state in ("between", "text") and bool(self.message.tool_calls) and not rest

    def _read_answer(self, *, final: bool) -> bool:
        """Find whether the answer begins with a call that no marker begins."""
        calls = self._calls
        if calls is None or calls.marker:
            self._state = "text"
            return True
        text = self._text.lstrip()
        if not text:
            return False
        self._opening = ""
        if calls.style == "object":
            self._state = "section" if text.startswith(("{", "[{")) else "text"
        elif calls.style == "literal" and text.startswith("[") and _BARE.match(text):
            self._state = "section"
        elif calls.style == "literal" and not final and _PARTIAL_BARE.fullmatch(text):
            return False
        else:
            self._state = "text"
        return True

    def _read_text(self, *, final: bool) -> bool:
        text, marker = self._until(*self._markers, *self._dropped, final=final)
        self.message.content.add(text)
        if marker in self._markers:
            self._state, self._opening = "section", marker
        return bool(marker)

    # --- calls

    def _read_section(self, *, final: bool) -> bool:
        """Begin a call behind a marker, or behind another call of its section."""
        calls = self._calls
        assert calls is not None  # noqa: S101 -- a marker was read
        begun = self._begin(calls, final=final)
        if begun is None:
            return False
        if begun:
            self._state = "between" if self._reader is None else "arguments"
        elif self._cut and self._is_cut_call(calls):
            self._text, self._state = "", "text"
        else:
            self.message.content.add(self._opening)
            self._state = "text"
        return True

    def _is_cut_call(self, calls: CallFormat) -> bool:
        """Return whether the rest of the text is the beginning of a call; add the call if its name is known.

        Without a marker, an object may be the answer itself, unless it names a tool.
        """
        text = self._text.lstrip(_PUNCTUATION)
        if calls.style == "object" or (calls.envelope and text.startswith("{")):
            name = name_of_cut(text, calls.name_keys[-1]) if calls.name_keys else ""
            is_object = not text or (text.startswith("{") and JsonSpan().end(text) is None)
            is_cut = is_object and (bool(self._opening) or name in self._properties)
        else:
            head = self._head.fullmatch(self._text) if not calls.head.endswith(NAME) else None
            name = head["name"] if head is not None else ""
            is_cut = calls.begins_head(self._text)
        if is_cut and name:
            self.message.call(name, "")
        return is_cut

    def _begin(self, calls: CallFormat, *, final: bool) -> bool | None:
        """Begin a call; None if more text must come first, False if it is none."""
        text = self._text.lstrip(_PUNCTUATION)
        if calls.style == "object" or (calls.envelope and text.startswith("{")):
            return self._begin_object(calls, text, final=final)
        if calls.style == "pairs":
            head = self._head.match(self._text)
            end = head.end() if head is not None else -1
            stuck = final or len(self._text) > _LONGEST_HEAD
        else:
            bracket = self._text.find(calls.brackets[0])
            end = max(bracket, 0)
            head = self._head.fullmatch(self._text, 0, end) or _HEADLESS.fullmatch(self._text, 0, end)
            stuck = final or bracket >= 0 or len(self._text) > _LONGEST_HEAD
        if head is None:
            return False if stuck else None
        name = head["name"]
        self.message.call(name, "")
        self._text = self._text[end:]
        if calls.style == "json":
            self._reader = ArgumentsReader(self.message, None)
        elif calls.style == "literal":
            self._reader = LiteralReader(self.message, calls)
        else:
            self._reader = PairsReader(self.message, calls, self._properties.get(name, {}))
        return True

    def _begin_object(self, calls: CallFormat, text: str, *, final: bool) -> bool | None:
        """Begin a call that is an object; one of an unusual form is read when it is complete."""
        if not text:
            return False if final else None
        if not text.startswith("{"):
            return False
        if len(calls.name_keys) == 1 and CallReader.begins(text, calls.name_keys[0]):
            self._text, self._reader = text, CallReader(self.message, calls.name_keys[0])
            return True
        end = JsonSpan().end(text)
        if end is None and not final and not self._is_closed(text):
            return None
        if end is None or not self.message.call_json(text[:end], calls.name_keys, calls.argument_keys):
            return False
        self._text = text[end:]
        return True

    def _is_closed(self, text: str) -> bool:
        """Return whether an object that is not complete has a closing tag outside of its strings."""
        for closer in self._closers:
            at = text.find(closer)
            while at >= 0:
                span = JsonSpan()
                span.end(text[:at])
                if not span.in_text:
                    return True
                at = text.find(closer, at + 1)
        return False

    def _read_arguments(self, *, final: bool) -> bool:
        reader = self._reader
        assert reader is not None  # noqa: S101 -- a call was begun
        if isinstance(reader, PairsReader):
            text, marker, self._text = self._text, "", ""
        else:
            text, marker = self._until(*self._closers, final=final)
        rest = reader.read(text, final=final)
        if marker and not reader.done:
            if reader.in_text:
                reader.read(marker, final=final)
                return True
            reader.done = True  # the call is not complete
        if not reader.done:
            return False
        self._text, self._reader, self._state = rest + marker + self._text, None, "between"
        return bool(self._text)

    def _read_between(self, *, final: bool) -> bool:
        """Read closing tags; what follows them is another call, or text."""
        calls = self._calls
        assert calls is not None  # noqa: S101 -- a call was read
        is_python = calls.style == "literal" and calls.brackets == "()"
        is_list = is_python or calls.style == "object" or bool(calls.envelope)
        text = self._text.lstrip(_PUNCTUATION if is_list else None)
        for closer in self._closers:
            if text.startswith(closer):
                self._text = text[len(closer) :]
                if closer == self._closers[-1]:
                    self._state = "text"
                return True
        expected = (*self._closers, *self._markers, self._next_marker)
        if not text or any(tag.startswith(text) for tag in expected):
            if not final:
                return False
            if self._cut:  # the beginning of a tag is no text of the answer
                self._text = ""
                return False
        if self._next_marker and text.startswith(self._next_marker):
            self._text, self._head = text[len(self._next_marker) :], self._next_head
            self._state, self._opening = "section", self._next_marker
            return True
        follows = is_python and "," in self._text[: len(self._text) - len(text)]
        if follows and not final and _NAMED.fullmatch(text):
            return False
        if (is_list and text.startswith("{")) or (follows and _BARE.match(text)):
            self._text, self._head = text, _HEADLESS
            self._state, self._opening = "section", ""
            return True
        self._text = self._text.lstrip(" ]" if is_list else "")
        self._state = "text"
        return True


def _properties(tool: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Return the name of a tool and the schemas of its parameters."""
    function = tool.get("function", tool) if isinstance(tool, Mapping) else {}
    name = function.get("name") if isinstance(function, Mapping) else None
    parameters = function.get("parameters") if isinstance(function, Mapping) else None
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return name if isinstance(name, str) else "", properties if isinstance(properties, Mapping) else {}

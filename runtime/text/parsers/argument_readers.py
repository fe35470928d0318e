"""Arguments of calls that are no JSON, read as JSON while they arrive."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

from .base import ParsedMessage, overlap
from .formats import CallFormat

_CONSTANTS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false",
              "null": "null", "none": "null"}  # fmt: skip
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
_WORD = re.compile(r"[^\s,:={}\[\]()'\"<]+")  # a key
_UNQUOTED = re.compile(r"[^,{}\[\]()<]+")  # a value
_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|[^ux]|[ux])", re.DOTALL)
_PLAIN_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": ""}
_MOST_DEEP = 200


class LiteralReader:
    """Reads ``{key: value, ...}`` or ``(key=value, ...)`` up to its closing bracket.

    The quotes of JSON and Python are read too, and commas may be missing. In a text between quotes of several
    characters, one that nothing of the form follows is a part of the text.

    Args:
        message: receives the arguments as JSON text.
        calls: the quotes of texts; those of several characters know no escapes.

    Attributes:
        done: whether the closing bracket was read.
    """

    def __init__(self, message: ParsedMessage, calls: CallFormat) -> None:
        self.done = False
        self._message = message
        self._quotes = tuple(sorted({*calls.quotes, '"', "'"}, key=len, reverse=True))
        self._text = ""
        self._closers: list[str] = []  # in JSON
        self._ends = ""  # what may follow a text
        self._quote = ""  # of the text in progress
        self._between = False  # whether a value was read, so that the next needs a comma
        self._at_value = False  # whether a key was read

    @property
    def in_text(self) -> bool:
        """Whether a tag would be part of a text."""
        return bool(self._quote)

    def read(self, text: str, *, final: bool = False) -> str:
        """Read the next text, and return what follows the arguments; the first begins with a bracket."""
        self._text += text
        pieces: list[str] = []
        while self._text and not self.done:
            piece = self._string(final=final) if self._quote else self._next(final=final)
            if piece is None:
                break
            pieces.append(piece)
        self._message.continue_call("".join(pieces))
        if not self.done:
            return ""
        rest, self._text = self._text, ""
        return rest

    def _string(self, *, final: bool) -> str | None:
        """Return the next piece of a text in JSON; None if more must come first."""
        quote, escapes = self._quote, len(self._quote) == 1
        at = self._text.find(quote)
        if escapes and (slash := self._text.find("\\")) >= 0 and (at < 0 or slash < at):
            if slash:
                return self._taken(slash)
            escape = _ESCAPE.match(self._text)
            digits = {"u": 6, "x": 4}.get(self._text[1:2], 2)
            if escape is None or (len(self._text) < digits and not final):
                return None
            self._text = self._text[escape.end() :]
            return _json_escape(escape.group())
        if at > 0:
            return self._taken(at)
        if at == 0:
            closes = escapes or self._closes(self._text[len(quote) :], final=final)
            if closes is None:
                return None
            self._text = self._text[len(quote) :]
            if not closes:
                return '\\"'
            self._quote, self._between = "", True
            return '"'
        most = len(self._text) - overlap(self._text, quote)
        return self._taken(most) if most else None

    def _closes(self, after: str, *, final: bool) -> bool | None:
        """Whether a quote ends the text, by what follows it; None if more must come first."""
        quote = re.escape(self._quote)
        if re.match(rf"\s*(?:[{self._ends}]|[A-Za-z_]\w*[:=](?:{quote}|[\d\[{{tfn-]))", after):
            return True
        if final:
            return not after.strip()
        beginning = re.fullmatch(r"\s*(?:[A-Za-z_]\w*[:=]?)?(.*)", after, re.DOTALL)
        return None if beginning is not None and self._quote.startswith(beginning[1]) else False

    def _taken(self, count: int) -> str:
        piece, self._text = self._text[:count], self._text[count:]
        return _json_text(piece)

    def _next(self, *, final: bool) -> str | None:
        text = self._text = self._text.lstrip()
        if not text:
            return None
        for quote in self._quotes:
            if text.startswith(quote):
                self._text, self._quote = text[len(quote) :], quote
                return self._separated('"')
            if quote.startswith(text) and not final:
                return None
        first = text[0]
        if first in "([{":
            closer = "}" if first == "{" or not self._closers else "]"
            self._ends = self._ends or (r",:}\]" if first == "{" else r",=)}\]")
            if len(self._closers) >= _MOST_DEEP:
                self.done = True
                return ""
            self._text = text[1:]
            piece = self._separated("{" if closer == "}" else "[")
            self._closers.append(closer)
            self._between = False
            return piece
        if first in ")]}":
            self._text, self._between = text[1:], True
            closer = self._closers.pop() if self._closers else ""
            self.done = not self._closers
            return closer
        if first in ",:=":
            self._text = text[1:]
            if first == ",":
                return ""
            self._between, self._at_value = False, True
            return ": "
        return self._word(text, final=final)

    def _word(self, text: str, *, final: bool) -> str | None:
        """Return a key, constant or number in JSON; any other word is a text."""
        is_value = self._at_value or self._closers[-1:] == ["]"]
        word = (_UNQUOTED if is_value else _WORD).match(text)
        end = word.end() if word is not None else 1
        if end == len(text) and not final:
            return None
        self._text, known = text[end:], text[:end].rstrip()
        piece = json.dumps(known, ensure_ascii=False)
        if is_value and known in _CONSTANTS:
            piece = _CONSTANTS[known]
        elif is_value and _NUMBER.fullmatch(known):
            piece = known
        piece = self._separated(piece)
        self._between = True
        return piece

    def _separated(self, piece: str) -> str:
        """Return the beginning of a key or value, behind a comma if it follows another."""
        comma, self._at_value = self._between, False
        return f", {piece}" if comma else piece


def _json_text(text: str) -> str:
    """Return a piece of a text as it is written in JSON."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _json_escape(escape: str) -> str:
    """Return an escape of Python in JSON; halves of surrogate pairs stay escapes."""
    kind = escape[1]
    if kind in "ux" and len(escape) > 2:
        return rf"\u{escape[2:]:>04}"
    return _json_text(_PLAIN_ESCAPES.get(kind, kind))


class PairsReader:
    """Reads arguments between tags up to the tag that closes the call.

    A tag in a value is a part of it: the tag that closes a value is followed by another argument or by the
    end of the call. Models spell it wrongly (``</parameter_>``, or with the key's name) or leave it out: then
    the value ends before the tag of a parameter that was not given, on a line of its own, or before the end
    of the call.

    Args:
        message: receives the arguments as JSON text.
        calls: the tags.
        properties: the schemas of the parameters by name.

    Attributes:
        done: whether something else than an argument was read.
    """

    def __init__(self, message: ParsedMessage, calls: CallFormat, properties: Mapping[str, Any]) -> None:
        self.done = False
        self._message, self._calls, self._properties = message, calls, properties
        self._text = ""
        self._keys: set[str] = set()  # of the arguments that were read
        self._value = ""  # of the argument in progress, as far as it is not passed on
        self._state = "between"
        self._types: tuple[str, ...] = ()
        self._streams = False  # whether the value is a text, passed on as it arrives
        self._first = False  # whether nothing of the value was read
        self._opens = [text.strip() for text in calls.value_opens]
        self._key_open, self._value_close = calls.key_open.strip(), calls.value_close.strip()
        self._followers = (self._key_open, *calls.closers) if calls.closers else ()
        self._trailing = calls.value_close[: len(calls.value_close) - len(calls.value_close.lstrip())]
        message.continue_call("{")

    @property
    def in_text(self) -> bool:
        """Whether a tag would be part of a value."""
        return self._state == "value"

    def read(self, text: str, *, final: bool = False) -> str:
        """Read the next text, and return what follows the arguments."""
        self._text += text
        readers = {"between": self._read_between, "key": self._read_key, "value": self._read_value}
        while not self.done and readers[self._state](final=final):
            pass
        if not self.done:
            return ""
        rest, self._text = self._text, ""
        return rest

    def _read_between(self, *, final: bool) -> bool:
        text = self._text.lstrip()
        if text.startswith(self._key_open):
            self._text, self._state = text[len(self._key_open) :], "key"
            return True
        if self._key_open.startswith(text):  # also at the end: the beginning of a tag is no text
            return False
        self.done = bool(text)
        if self.done:
            self._message.continue_call("}")
        return False

    def _read_key(self, *, final: bool) -> bool:
        """Read a key, and the tag between it and its value, which may tell that the value is a text."""
        at = {text: self._text.find(text) for text in self._opens}
        present = [(place, -len(text), text) for text, place in at.items() if place >= 0]
        end = self._text.find(self._value_close)
        if end >= 0 and (not present or min(present)[0] > end):
            return self._read_without_opening(end)
        if not present:
            return False
        place, _, text = min(present)
        key, line, _ = self._text[:place].strip().partition("\n")
        if line:  # the rest of the key's tag is cut: the value begins with the line
            place, text = self._text.index("\n", self._text.index(key)), ""
        opening = next(opened for opened in self._calls.value_opens if opened.strip().endswith(text))
        self._leading = opening[len(opening.rstrip()) :]
        self._text, self._state = self._text[place + len(text) :], "value"
        self._types = types_of(self._properties.get(key))
        if self._opens[0] != self._opens[1]:
            self._streams = text == self._opens[0]
            self._types = self._types or ("object", "array", "number", "boolean", "null")
        else:
            self._streams = self._types in ((), ("string",))
        self._first, self._value = True, ""
        self._ends, self._named_close = self._ends_of(key), f"</{key}>"
        self._begin(key, '"' * self._streams)
        return True

    def _read_without_opening(self, end: int) -> bool:
        """Read an argument whose tag between key and value is cut: the value begins behind its part."""
        key, bracket, value = self._text[:end].partition(self._opens[0][:1])
        if bracket:
            value = value.partition(">")[2]
        else:
            key, _, value = key.strip().partition("\n")
        types = types_of(self._properties.get(key.strip())) or ("string",)
        self._begin(key.strip(), typed(value.strip(), types))
        self._text, self._state = self._text[end + len(self._value_close) :], "between"
        return True

    def _begin(self, key: str, value: str) -> None:
        head = ", " if self._keys else ""
        self._keys.add(key)
        self._message.continue_call(f"{head}{json.dumps(key, ensure_ascii=False)}: {value}")

    def _read_value(self, *, final: bool) -> bool:
        at, behind = self._end_of_value(final=final)
        if at < 0:
            most = behind
            if not final:
                while most and self._trailing and self._text[most - 1].isspace():
                    most -= 1
            piece, self._text = self._text[:most], self._text[most:]
        else:
            piece, self._text = self._text[:at], self._text[behind:]
        self._add(piece, last=at >= 0)
        if at >= 0:
            self._state = "between"
        return at >= 0

    def _end_of_value(self, *, final: bool) -> tuple[int, int]:
        """Return where the value ends and what follows begins; or -1, and the end of what is surely value."""
        for event in self._ends.finditer(self._text):
            if event["close"] is None:
                key = self._key_behind(event.end())
                if key is None and not final:
                    return -1, event.start("key")
                if key in self._properties.keys() - self._keys:
                    return event.start("key"), event.start("key")
                continue
            rest = self._text[event.end() :].lstrip()
            if any(rest.startswith(tag) for tag in self._followers) or not self._followers:
                return event.span()
            if any(tag.startswith(rest) for tag in self._followers):  # not known yet, or the end
                return event.span() if final else (-1, event.start())
        at = self._text.find(self._followers[1]) if self._followers else -1
        if at >= 0 and final:
            return at, at
        tags = (self._value_close, self._named_close, *self._followers)
        known = len(self._text) - max(overlap(self._text, tag) for tag in tags)
        return -1, known if at < 0 else min(known, at)

    def _ends_of(self, key: str) -> re.Pattern[str]:
        """Return a regular expression of the tags that may end the value of a key, or begin another."""
        close = re.escape(self._value_close)
        if self._value_close.startswith("</"):
            close = rf"{re.escape(self._value_close.rstrip('>'))}[\w/]*>?|</{re.escape(key)}>"
        return re.compile(rf"(?P<close>{close})|\n[ \t]*(?P<key>{re.escape(self._key_open)})")

    def _key_behind(self, at: int) -> str | None:
        """Return the key behind the tag that opens one; None if its end has not arrived."""
        ends = [place for text in self._opens if (place := self._text.find(text, at)) >= 0]
        if ends:
            return self._text[at : min(ends)].strip()
        return "" if "\n" in self._text[at:] else None

    def _add(self, piece: str, *, last: bool) -> None:
        if self._first and self._leading:
            if not last and self._leading.startswith(self._value + piece):
                self._value += piece
                return
            piece, self._value = (self._value + piece).removeprefix(self._leading), ""
        self._first = self._first and not piece and not last
        if last and self._trailing:
            piece = piece.removesuffix(self._trailing)
        if self._streams:
            self._message.continue_call(_json_text(piece) + '"' * last)
            return
        self._value += piece
        if last:
            self._message.continue_call(typed(self._value, self._types))


def types_of(schema: Any) -> tuple[str, ...]:
    """Return the types that a schema allows, empty if it does not tell."""
    if not isinstance(schema, Mapping):
        return ()
    kind = schema.get("type")
    types = [kind] if isinstance(kind, str) else []
    types += [item for item in kind if isinstance(item, str)] if isinstance(kind, list) else []
    for name in ("anyOf", "oneOf"):
        branches = schema.get(name)
        types += (
            [item for branch in branches for item in types_of(branch)] if isinstance(branches, list) else []
        )
    if "$ref" in schema or "allOf" in schema:
        types += ["object", "string"]
    if not types:
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list) and all(isinstance(value, str) for value in values):
            types = ["string"]
    if schema.get("nullable") is True:
        types.append("null")
    return tuple(dict.fromkeys(types))


_PYTHON: dict[str, tuple[type, ...]] = {
    "integer": (int,), "number": (int, float), "boolean": (bool,), "object": (dict,), "array": (list,),
    "null": (type(None),),
}  # fmt: skip


def typed(text: str, types: tuple[str, ...]) -> str:
    """Return the value of an argument as JSON text.

    The text is a value of the first of the types that takes it, in JSON or, as many templates write it, in
    Python; a text of none of them is a string, so that nothing is lost.
    """
    stripped = text.strip()
    for read in (_from_json, ast.literal_eval):
        try:
            value = read({"True": "true", "False": "false", "None": "null"}.get(stripped, stripped))
        except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
            continue
        for kind in types:
            if kind == "integer" and isinstance(value, float) and value.is_integer():
                value = int(value)
            if isinstance(value, _PYTHON.get(kind, ())) and isinstance(value, bool) is (kind == "boolean"):
                try:
                    return json.dumps(value, ensure_ascii=False, allow_nan=False)
                except (ValueError, TypeError):
                    break
    return json.dumps(text, ensure_ascii=False)


def _from_json(text: str) -> Any:
    return json.loads(text)

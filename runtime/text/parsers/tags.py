"""Answers in tags of Donut (https://arxiv.org/abs/2111.15664), written as JSON.

``<s_menu><s_name>Tea</s_name><s_price>2</s_price></s_menu>`` is ``{"menu": {"name": "Tea", "price": "2"}}``.
Values between ``<sep/>`` are a list; ``<yes/>``, a token of its own, is the value ``yes``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any

from .base import MessageParser, ParsedMessage

_OPEN, _SEPARATOR = "<s_", "<sep/>"
_ANY_OPEN = re.compile(_OPEN, re.IGNORECASE)
_FIRST_TAG = re.compile(r"<[^>]*>")
_MOST_DEEP = 100  # objects within each other; what is deeper stays a text


def has_tags(texts: Collection[str]) -> bool:
    """Return whether tokens of these texts open fields."""
    return any(text.startswith(_OPEN) for text in texts)


class TagParser(MessageParser):
    """Writes an answer as one JSON text when it has ended; its content is empty before.

    Args:
        message: receives the text.
        prompt: what the answer continues. Its first tag names the task.
        tokens: the texts of added tokens, which may be values.
    """

    def __init__(self, message: ParsedMessage, prompt: str, tokens: Collection[str]) -> None:
        super().__init__(message)
        self._text, self._tokens = _FIRST_TAG.sub("", prompt, count=1), tokens

    def _advance(self, *, final: bool) -> bool:
        if final:
            value = tags_value(self._text.strip(), self._tokens)
            self.message.content.add(json.dumps(value, ensure_ascii=False))
            self._text = ""
        return False


def tags_value(text: str, tokens: Collection[str]) -> Any:
    """Return what a text in tags says, as transformers' ``DonutProcessor.token2json`` does.

    Args:
        text: with tags; a tag that is not closed is left out.
        tokens: the texts of added tokens, which may be values.

    Returns:
        An object of texts, lists and objects, those within 100 others as texts; a list of these if ``<sep/>``
        parts them; ``{"text_sequence": text}`` for a text without tags.
    """
    objects, rest, ended = _objects(text, tokens)
    if not ended:
        return objects
    return objects[0] if objects else {"text_sequence": rest}


def _objects(text: str, tokens: Collection[str], depth: int = 0) -> tuple[list[Any], str, bool]:
    """Return the objects of a text, what is left of it, and whether no separator parts them."""
    objects: list[Any] = []
    fields: dict[str, Any] = {}
    while (opened := _opening(text)) is not None:
        begin, end = opened
        tag, key = text[begin:end], text[begin + len(_OPEN) : end - 1]
        closing = re.compile(rf"</s_{re.escape(key)}>", re.IGNORECASE)
        closed = closing.search(text)
        if closed is None:
            text = text.replace(tag, "")
            continue
        behind = closed if closed.start() >= end else closing.search(text, end)
        if behind is not None:
            _add(fields, key, text[end : behind.start()].strip(), tokens, depth)
        text = text[text.find(closed[0]) + len(closed[0]) :].strip()
        if text.startswith(_SEPARATOR):
            objects.append(fields)
            text, fields = text[len(_SEPARATOR) :], {}
    parted = bool(objects)
    return [*objects, *([fields] if fields else [])], text, not parted


def _opening(text: str) -> tuple[int, int] | None:
    """Return where the first tag that opens a field begins and ends; None if there is none."""
    begin = _ANY_OPEN.search(text)
    end = -1 if begin is None else text.find(">", begin.start())
    return None if begin is None or end < 0 else (begin.start(), end + 1)


def _add(fields: dict[str, Any], key: str, inside: str, tokens: Collection[str], depth: int) -> None:
    """Add the value of a field; one without objects, in spite of its tags, is left out."""
    if _OPEN in inside and "</s_" in inside and depth < _MOST_DEEP:
        objects, _, _ = _objects(inside, tokens, depth + 1)
        if objects:
            fields[key] = objects[0] if len(objects) == 1 else objects
        return
    values = [each.strip() for each in inside.split(_SEPARATOR)]
    values = [each[1:-2] if each in tokens and each.endswith("/>") else each for each in values]
    fields[key] = values[0] if len(values) == 1 else values

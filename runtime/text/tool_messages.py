"""Tools in messages of plain text, for chat templates that have no place for them.

Calls have the form of Hermes, which most tool-trained models know and ``parsers.formats.HERMES`` tells:
https://github.com/NousResearch/Hermes-Function-Calling.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ...errors import ChatTemplateError

_Part = str | Mapping[str, Any]  # a text, or a picture

_INTRODUCTION = """\
You can call these functions, described in JSON:
<tools>
{tools}
</tools>
To call one, answer with its name and its arguments in JSON between tags:
<tool_call>
{{"name": "NAME", "arguments": {{"PARAMETER": "VALUE"}}}}
</tool_call>"""


def as_text(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], *, system: bool
) -> list[dict[str, Any]]:
    """Return a conversation in which tools, calls and results are text.

    Args:
        messages: as for ``ChatTemplate.render``.
        tools: JSON schemas of functions; empty adds no description, but calls and results become text.
        system: whether the template accepts a system message; else the first message of the user
            describes the tools.

    Returns:
        The messages. A content that was changed is a text, or a list of parts if it has pictures.

    Raises:
        ChatTemplateError: a tool or an argument is no JSON, or a part of a changed content is neither a text
            nor a picture.
    """
    told = list(_told(messages))
    if not tools:
        return told
    description = _INTRODUCTION.format(tools="\n".join(map(_json, tools)))
    if not told or told[0]["role"] != ("system" if system else "user"):
        return [{"role": "system" if system else "user", "content": description}, *told]
    pieces: list[Sequence[_Part]] = [_parts(told[0].get("content")), [description]]
    if not system:
        pieces.reverse()
    return [{**told[0], "content": _joined(pieces, "\n\n")}, *told[1:]]


def _told(messages: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the messages with calls and results as text; results in a row are one message of the user."""
    results: list[list[_Part]] = []
    for message in messages:
        if message["role"] == "tool":
            parts = _parts(message.get("content"))
            results.append(["<tool_response>\n", *parts, "\n</tool_response>"])
            continue
        if results:
            yield {"role": "user", "content": _joined(results, "\n")}
            results = []
        calls = message.get("tool_calls")
        if not calls:
            yield dict(message)
            continue
        pieces: list[Sequence[_Part]] = [_parts(message.get("content")), *([_call(call)] for call in calls)]
        rest = {name: value for name, value in message.items() if name != "tool_calls"}
        yield {**rest, "content": _joined(pieces, "\n")}
    if results:
        yield {"role": "user", "content": _joined(results, "\n")}


def _call(call: Any) -> str:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ChatTemplateError(
            f"a tool call must be an object with the name of a function, not {call!r:.100}"
        )
    arguments = function.get("arguments", {})
    told = arguments if isinstance(arguments, str) else _json(arguments)
    return f'<tool_call>\n{{"name": {_json(function["name"])}, "arguments": {told}}}\n</tool_call>'


def text_of(part: Any) -> str | None:
    """Return the text of a part of a content; None if it is no text."""
    if isinstance(part, Mapping):
        part = part.get("text") if part.get("type", "text") == "text" else None
    return part if isinstance(part, str) else None


def _parts(content: Any) -> list[_Part]:
    """Return the texts and pictures of a content: a text, None, or a list of parts."""
    parts = content if isinstance(content, list | tuple) else [content or ""]
    found = [part if _is_picture(part) else text_of(part) for part in parts]
    if None in found:
        raise ChatTemplateError(f"the content of a message must be text or pictures, not {content!r:.100}")
    return [part for part in found if part]


def _is_picture(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "image"


def _joined(pieces: Iterable[Sequence[_Part]], separator: str) -> str | list[Mapping[str, Any]]:
    """Return contents as one, a text or with pictures a list; the separator is between those with parts."""
    joined: list[_Part] = []
    for piece in filter(None, pieces):
        joined += [separator, *piece] if joined else piece
    texts = [part for part in joined if isinstance(part, str)]
    if len(texts) == len(joined):
        return "".join(texts)
    return [{"type": "text", "text": part} if isinstance(part, str) else part for part in joined]


def _json(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ChatTemplateError(f"tools and their arguments must be JSON: {error}") from error

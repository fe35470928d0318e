"""Tools in messages of plain text, for chat templates that have no place for them.

Calls have the form of Hermes, which most tool-trained models know and ``parsers.formats.HERMES`` tells:
https://github.com/NousResearch/Hermes-Function-Calling.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...errors import ChatTemplateError

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

    Raises:
        ChatTemplateError: a tool or an argument is no JSON, or the content of a changed message is no text.
    """
    told = list(_told(messages))
    if not tools:
        return told
    description = _INTRODUCTION.format(tools="\n".join(map(_json, tools)))
    if not told or told[0]["role"] != ("system" if system else "user"):
        return [{"role": "system" if system else "user", "content": description}, *told]
    content = _text(told[0].get("content"))
    pieces = [content, description] if system else [description, content]
    return [{**told[0], "content": "\n\n".join(filter(None, pieces))}, *told[1:]]


def _told(messages: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the messages with calls and results as text; results in a row are one message of the user."""
    results: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            results.append(f"<tool_response>\n{_text(message.get('content'))}\n</tool_response>")
            continue
        if results:
            yield {"role": "user", "content": "\n".join(results)}
            results = []
        calls = message.get("tool_calls")
        if not calls:
            yield dict(message)
            continue
        pieces = [_text(message.get("content")), *map(_call, calls)]
        rest = {name: value for name, value in message.items() if name != "tool_calls"}
        yield {**rest, "content": "\n".join(filter(None, pieces))}
    if results:
        yield {"role": "user", "content": "\n".join(results)}


def _call(call: Any) -> str:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ChatTemplateError(
            f"a tool call must be an object with the name of a function, not {call!r:.100}"
        )
    arguments = function.get("arguments", {})
    told = arguments if isinstance(arguments, str) else _json(arguments)
    return f'<tool_call>\n{{"name": {_json(function["name"])}, "arguments": {told}}}\n</tool_call>'


def _text(content: Any) -> str:
    """Return the text of a content: a text, None, or a list of parts of type ``text``."""
    parts = content if isinstance(content, list) else [{"text": content or ""}]
    found = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    texts = [text for text in found if isinstance(text, str)]
    if len(texts) < len(found):
        raise ChatTemplateError(f"the content of a message must be text, not {content!r:.100}")
    return "".join(texts)


def _json(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ChatTemplateError(f"tools and their arguments must be JSON: {error}") from error

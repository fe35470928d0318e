"""What a program writes into a conversation: texts, turns, pictures, and places for the model to fill."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

from ...errors import UsageError
from ...options import shown
from ...records import dataclass
from ..api.requests import RENDER_OPTIONS
from ..images.data_url import is_data_url, read_data_url
from ..text.chat_template import check_variables
from ..types.outputs import ToolCall
from ..types.sampling_params import SamplingParams
from ..types.structured_output import StructuredOutput

Json = dict[str, Any]
DEFAULT_MAX_TOKENS = 128

# Options of sampling that a place cannot have: it has one answer, and no code of the caller's for a service.
_NOT_OPTIONS = {"n", "best_of", "logits_processors", "structured_output"}


@dataclass(frozen=True, slots=True)
class ImageItem:
    """A picture, as the address of its data (``data:image/png;base64,...``)."""

    url: str


@dataclass(frozen=True, slots=True)
class Place:
    """A place for an answer of the model.

    Args:
        name: the variable that holds the answer; None keeps it in the text only.
        options: fields of ``SamplingParams``; missing ones have the values of the program or of the model.
        tools: JSON schemas of functions that the model may call.
        tool_choice: ``auto``, ``required``, or the name of a function that must be called.
        template: variables of the chat template, such as ``enable_thinking``.
        choices: texts of which the likeliest is taken; empty generates.
    """

    name: str | None
    options: Mapping[str, Any] = field(default_factory=dict)
    tools: tuple[Json, ...] = ()
    tool_choice: str = "auto"
    template: Mapping[str, Any] = field(default_factory=dict)
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Turn:
    """A message of a role; ``call_id`` is that of the call that a tool's result answers."""

    role: str
    items: tuple[str | ImageItem | Place, ...]
    call_id: str | None = None


Item = str | ImageItem | Place | Turn


@dataclass(frozen=True, slots=True)
class Parts:
    """A sequence of parts; ``+`` joins sequences and texts."""

    items: tuple[Item, ...]

    def __add__(self, other: Parts | str) -> Parts:
        return Parts((*self.items, *parts_of(other).items))

    def __radd__(self, other: str) -> Parts:
        return parts_of(other) + self


def parts_of(value: Parts | str) -> Parts:
    """Return a text, or parts, as parts.

    Raises:
        UsageError: the value is neither.
    """
    if isinstance(value, Parts):
        return value
    if not isinstance(value, str):
        raise UsageError(
            f"a conversation takes texts and what gen, user and the like return, not {shown(value)}"
        )
    return Parts((value,) if value else ())


def _turn(role: str, parts: Iterable[Parts | str], call_id: str | None = None) -> Parts:
    items = [item for part in parts for item in parts_of(part).items]
    inner = tuple(item for item in items if not isinstance(item, Turn))
    if len(inner) < len(items):
        raise UsageError(f"a turn of the role {role} cannot hold another turn; add it after this one")
    if role != "assistant" and any(isinstance(item, Place) for item in inner):
        raise UsageError(
            f"the model writes turns of the assistant only; put gen and select after {role}(...)"
        )
    return Parts((Turn(role, inner, call_id),))


def system(*parts: Parts | str) -> Parts:
    """Return a message of the system."""
    return _turn("system", parts)


def user(*parts: Parts | str) -> Parts:
    """Return a message of the user: texts and pictures."""
    return _turn("user", parts)


def assistant(*parts: Parts | str) -> Parts:
    """Return a message of the assistant: texts, and places that the model fills."""
    return _turn("assistant", parts)


def tool_result(call: ToolCall, text: str) -> Parts:
    """Return what a tool answered to a call of the model.

    Args:
        call: one of ``PlaceAnswer.tool_calls``.
        text: the result, such as JSON.
    """
    if not isinstance(call, ToolCall):
        raise UsageError(f"call must be one of an answer's tool_calls, not {shown(call)}")
    return _turn("tool", (text,), call.id)


def image(source: str | Path | bytes) -> Parts:
    """Return a picture: a file, its bytes, or the address of its data (``data:...``).

    Raises:
        RequestError: the source is an address of another kind, or its data is damaged.
        UsageError: the file cannot be read, or the source is of another type.
    """
    if isinstance(source, str) and (is_data_url(source) or "://" in source):
        read_data_url(source)
        return Parts((ImageItem(source),))
    if isinstance(source, str | Path):
        try:
            source = Path(source).read_bytes()
        except (OSError, ValueError) as error:
            raise UsageError(f"cannot read the picture {shown(source)}: {error}") from error
    if not isinstance(source, bytes):
        raise UsageError(f"a picture is a path or bytes, not {shown(source)}")
    # Pictures are opened by their content, so that the type here has no meaning.
    return Parts((ImageItem(f"data:image/png;base64,{base64.b64encode(source).decode()}"),))


def gen(
    name: str | None = None,
    *,
    max_tokens: int | None = None,
    stop: str | Sequence[str] = (),
    regex: str | None = None,
    choices: Sequence[str] | None = None,
    schema: Any = None,
    grammar: str | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
    tool_choice: str = "auto",
    template: Mapping[str, Any] | None = None,
    **options: Any,
) -> Parts:
    """Return a place that the model fills with text.

    Args:
        name: the variable that holds the text.
        max_tokens: maximum number of tokens; 128 unless the program sets another.
        stop: end before one of these texts.
        regex: a regular expression that the text must match.
        choices: the text must be one of these, drawn token by token; ``select`` compares whole texts.
        schema: a JSON schema that the text must follow, or a class with ``model_json_schema`` (Pydantic).
        grammar: a grammar in Lark or GBNF that the text must follow.
        tools: JSON schemas of functions that the model may call, in a chat.
        tool_choice: ``auto``, ``required``, or the name of a function that must be called.
        template: variables of the chat template, such as ``enable_thinking``.
        **options: further fields of ``SamplingParams``: ``temperature``, ``top_p``, ``seed``, ...

    Raises:
        UsageError: an option is invalid, several formats are given, or ``tool_choice`` names no tool.
        ChatTemplateError: the name of a variable of the template is taken.
    """
    if hasattr(schema, "model_json_schema"):
        schema = schema.model_json_schema()
    if isinstance(schema, str):
        schema = _parsed(schema)
    if choices is not None and (isinstance(choices, str) or not choices):
        raise UsageError(f"choices must be at least one text, not {shown(choices)}")
    choice = None if choices is None else tuple(choices)
    formats = {"regex": regex, "choice": choice, "json_schema": schema, "grammar": grammar}
    wanted = {key: value for key, value in formats.items() if value is not None}
    chosen = checked_options(options)
    if max_tokens is not None:
        chosen["max_tokens"] = max_tokens
    if stop:
        chosen["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    if wanted:
        chosen["structured_output"] = StructuredOutput(**wanted)
    SamplingParams(**chosen)
    listed = tuple(map(_tool, tools))
    place = Place(_name(name), chosen, listed, _choice(tool_choice, listed), _template(template))
    return Parts((place,))


def select(name: str | None, choices: Sequence[str], *, template: Mapping[str, Any] | None = None) -> Parts:
    """Return a place for the likeliest of several texts.

    Each choice is scored by the mean log-probability of its tokens after the text before it, as SGLang does
    by default: a sum would favour short choices. 128 choices are a batch, and all share the text before them.

    Args:
        name: the variable that holds the choice; ``PlaceAnswer.scores`` has the scores.
        choices: at least two different texts.
        template: variables of the chat template.

    Raises:
        UsageError: there are fewer choices, or one is empty.
        ChatTemplateError: the name of a variable of the template is taken.
    """
    texts = tuple(choices) if isinstance(choices, Sequence) and not isinstance(choices, str | bytes) else ()
    if (
        len(set(texts)) < 2
        or len(set(texts)) < len(texts)
        or not all(isinstance(t, str) and t for t in texts)
    ):
        raise UsageError(f"choices must be at least two different texts, not {shown(choices)}")
    return Parts((Place(_name(name), template=_template(template), choices=texts),))


def checked_options(options: Mapping[str, Any]) -> Json:
    """Return options of sampling.

    Raises:
        UsageError: one is unknown, invalid, or cannot be set for a place.
    """
    SamplingParams.from_dict(options)
    if refused := _NOT_OPTIONS & options.keys():
        raise UsageError(f"{sorted(refused)[0]} is no option of a program; fork gives several answers")
    return dict(options)


def _name(name: Any) -> str | None:
    if name is not None and (not isinstance(name, str) or not name):
        raise UsageError(f"the name of a variable must be a text, not {shown(name)}")
    return name


def _tool(tool: Any) -> Json:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        raise UsageError(
            f"a tool is {{'type': 'function', 'function': {{'name': ..., ...}}}}, not {shown(tool)}"
        )
    _check_json(tool, f"the tool {shown(name)}")
    return dict(tool)


def _choice(choice: Any, tools: Sequence[Json]) -> str:
    if not isinstance(choice, str) or not choice:
        raise UsageError(f"tool_choice must be auto, required or the name of a function, not {shown(choice)}")
    names = [tool["function"]["name"] for tool in tools]
    if choice != "auto" and not (tools if choice == "required" else choice in names):
        known = ", ".join(names) or "none"
        raise UsageError(f"tool_choice demands {shown(choice)}; the tools of the place are: {shown(known)}")
    return choice


def _template(variables: Any) -> Json:
    if variables is None:
        return {}
    if not isinstance(variables, Mapping):
        raise UsageError(f"template must be variables of the chat template by name, not {shown(variables)}")
    check_variables(variables, RENDER_OPTIONS)
    _check_json(variables, "the variables of the chat template")
    return dict(variables)


def _parsed(schema: str) -> Any:
    try:
        parsed = json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"schema {shown(schema)} is no JSON: {error}") from error
    if not isinstance(parsed, dict | bool):
        raise UsageError(f"schema {shown(schema)} is no JSON schema, which is an object, true or false")
    return parsed


def _check_json(value: Any, what: str) -> None:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"{what} cannot be written as JSON: {error}") from error

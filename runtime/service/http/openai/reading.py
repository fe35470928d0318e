"""What OpenAI's request bodies have in common, and what it means here."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping
from typing import Any

from .....errors import RequestError
from ....types.sampling_params import SamplingParams
from ...core.messages import GenerationRequest, Prompt, checked_timeout

Json = dict[str, Any]

# They describe the caller or the bill, not the generation; or choose the model, which is done before.
IGNORED = ("metadata", "model", "prompt_cache_key", "prompt_cache_retention", "safety_identifier",
           "service_tier", "store")  # fmt: skip
# What every request for text understands.
COMMON = frozenset(
    {field.name for field in dataclasses.fields(SamplingParams)}
    | {*IGNORED, "cache_salt", "priority", "response_format", "stream", "stream_options", "timeout", "user"}
)


def known_fields(body: Mapping[str, Any], known: Collection[str], *, strict: bool) -> tuple[Json, list[str]]:
    """The fields of a body that mean something, and the names of those that were left out.

    Raises:
        RequestError: with ``strict``, where there are any of the latter.
    """
    unknown = [name for name in body if name not in known]
    if unknown and strict:
        raise RequestError(f"unknown fields: {', '.join(unknown)}; without --strict they are ignored")
    return {name: value for name, value in body.items() if name in known}, unknown


def read_options(body: Mapping[str, Any], only: Mapping[str, Any]) -> Json:
    """What is left to be read: null means the default, and some options have one possible value.

    Args:
        body: of a request.
        only: options that are accepted with the one value that asks for what is done anyway.

    Raises:
        RequestError: an option has another value.
    """
    options = {name: value for name, value in body.items() if value is not None and name not in IGNORED}
    for name, value in only.items():
        given = options.pop(name, value)
        if given != value:
            raise RequestError(f"'{name}': {given!r} is not supported, only {value!r}")
    if "response_format" in options:
        options["structured_output"] = structured_output(options.pop("response_format"))
    return options


def structured_output(response_format: Any) -> Json | None:
    """Read ``response_format``: text, json_object, or json_schema with its ``schema``.

    Raises:
        RequestError: it is none of these.
    """
    match response_format:
        case {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return {"json_object": True}
        case {"type": "json_schema", "json_schema": {"schema": schema}}:
            return {"json_schema": schema}
    raise RequestError(
        f"'response_format' cannot be {response_format!r}; its type is text, json_object or json_schema"
    )


def generation_request(prompt: Prompt, options: Json) -> GenerationRequest:
    """A request of a prompt and what is left of the options.

    Raises:
        RequestError: an option is unknown or wrong.
    """
    priority = options.pop("priority", 0)
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise RequestError(f"'priority' must be a whole number, not {priority!r}")
    salt, tenant = (text_field(name, options.pop(name, None)) for name in ("cache_salt", "user"))
    timeout = options.pop("timeout", None)
    if isinstance(timeout, bool) or not isinstance(timeout, int | float | None):
        raise RequestError(f"'timeout' must be a number of seconds, not {timeout!r}")
    return GenerationRequest(
        prompt=prompt,
        params=SamplingParams.from_dict(options),
        priority=priority,
        cache_salt=salt,
        tenant=tenant,
        timeout=None if timeout is None else checked_timeout(timeout),
    )


def text_field(name: str, value: Any) -> str | None:
    """A text or None.

    Raises:
        RequestError: it is something else.
    """
    if value is not None and not isinstance(value, str):
        raise RequestError(f"'{name}' must be a text, not {value!r}")
    return value


def bool_field(name: str, value: Any) -> bool:
    """True or false.

    Raises:
        RequestError: it is something else.
    """
    if not isinstance(value, bool):
        raise RequestError(f"'{name}' must be true or false, not {value!r}")
    return value


def objects_field(name: str, value: Any) -> list[Json]:
    """A list of objects.

    Raises:
        RequestError: it is something else.
    """
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise RequestError(f"'{name}' must be a list of objects")
    return value


def is_token_ids(value: Any) -> bool:
    """Whether it is a list of whole numbers."""
    return isinstance(value, list) and all(
        isinstance(item, int) and not isinstance(item, bool) for item in value
    )


def read_json(text: Any, what: str) -> Any:
    """A value given as JSON text, or as itself.

    Raises:
        RequestError: the text is no JSON.
    """
    try:
        return json.loads(text) if isinstance(text, str) else text
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{what} are not JSON: {error}") from error

"""Read the fields that OpenAI's request bodies share."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from .....errors import RequestError
from .....options import shown
from ....types.sampling_params import SamplingParams
from ...core.chat import Conversation, converse, read_message, read_tools
from ...core.messages import GenerationRequest, Prompt, checked_timeout

Json = dict[str, Any]

# These fields do not affect generation. The model is selected before a body is read.
IGNORED = ("metadata", "model", "safety_identifier", "service_tier", "store")
# vLLM's fields for structured output, those of its releases before 0.12 in the second line.
_VLLM_FORMS = {"json": "json_schema", "json_object": "json_object", "regex": "regex", "choice": "choice",
               "grammar": "grammar"}  # fmt: skip
_NO_BUDGET = 2**31 - 1  # of a thought that may be ended while it is written
_GUIDED = {f"guided_{name}": name for name in _VLLM_FORMS}
# The fields that all endpoints for text generation accept.
COMMON = frozenset(
    {field.name for field in dataclasses.fields(SamplingParams)}
    | {"structured_outputs", *_GUIDED}
    | {*IGNORED, "cache_salt", "priority", "response_format", "stream", "stream_options", "timeout", "user"}
    | {"prompt_cache_key", "prompt_cache_retention", "return_progress", "return_token_ids"}
    | {"reasoning_control"}
)


def known_fields(body: Mapping[str, Any], known: Collection[str], *, strict: bool) -> tuple[Json, list[str]]:
    """Return the known fields of a body and the names of the unknown ones.

    Raises:
        RequestError: ``strict`` is true and a field is unknown.
    """
    unknown = [name for name in body if name not in known]
    if unknown and strict:
        raise RequestError(
            f"unknown fields: {', '.join(unknown)}; remove them, or start the service without --strict"
        )
    return {name: value for name, value in body.items() if name in known}, unknown


def read_options(body: Mapping[str, Any], only: Mapping[str, Any]) -> Json:
    """Return the options of a body. Null values and ignored fields are removed.

    Args:
        body: the request body.
        only: options that have 1 supported value, with that value.

    Raises:
        RequestError: an option has an unsupported value.
    """
    options = {name: value for name, value in body.items() if value is not None and name not in IGNORED}
    for name, value in only.items():
        given = options.pop(name, value)
        if given != value:
            raise RequestError(f"'{name}': {shown(given)} is not supported, only {shown(value)}")
    forms = [structured_output(options.pop("response_format"))] if "response_format" in options else []
    forms += _vllm_forms(options)
    forms = [form for form in forms if form is not None]
    if "structured_output" in options:
        forms.append(options.pop("structured_output"))
    if len(forms) > 1:
        raise RequestError(
            "an answer has one form: give one of response_format, structured_outputs, structured_output and "
            "guided_json, guided_regex, guided_choice, guided_grammar"
        )
    if forms:
        options["structured_output"] = forms[0]
    return options


def _vllm_forms(options: Json) -> list[Json | None]:
    """Return the structured outputs of vLLM's fields, and remove these from the options."""
    guided = {name: options.pop(field) for field, name in _GUIDED.items() if field in options}
    stated = options.pop("structured_outputs", {})
    if not isinstance(stated, dict):
        raise RequestError(f"'structured_outputs' must be an object, not {shown(stated)}")
    if stated.get("structural_tag") is not None:
        raise RequestError(
            "'structured_outputs.structural_tag' is not supported, only json, json_object, regex, choice and "
            "grammar; tools with 'strict': true hold calls between free text"
        )
    return [
        {_VLLM_FORMS[name]: value}
        for form in (guided, stated)
        for name, value in form.items()
        if name in _VLLM_FORMS and value is not None and (name, value) != ("json_object", False)
    ]


def structured_output(response_format: Any) -> Json | None:
    """Return the structured output options for ``response_format``, or None for plain text.

    Raises:
        RequestError: the type is not text, json_object, or json_schema with a ``schema``.
    """
    match response_format:
        case {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return {"json_object": True}
        case {"type": "json_schema", "json_schema": {"schema": schema}}:
            return {"json_schema": schema}
    raise RequestError(
        f"'response_format' must have the type text, json_object or json_schema, not {shown(response_format)}"
    )


def text_or_conversation(body: Mapping[str, Any], name: str) -> str | Conversation:
    """Return the text that field ``name`` of a body holds, or the conversation of its ``messages``.

    Raises:
        RequestError: both or neither are there, or one is invalid.
    """
    text, messages = body.get(name), body.get("messages")
    if isinstance(text, str) and messages is None:
        return text
    if not isinstance(messages, list) or not messages or text is not None:
        raise RequestError(f"give either '{name}' (a string) or 'messages' (a list)")
    variables = body.get("chat_template_kwargs") or {}
    if not isinstance(variables, dict):
        raise RequestError(f"'chat_template_kwargs' must be an object, not {shown(variables)}")
    return converse(
        [read_message(message) for message in messages],
        {},
        tools=read_tools(body.get("tools") or []),
        variables=variables,
        continues=read_continues(dict(body)),
    )


def read_continues(options: Json) -> bool:
    """Return whether the last message is to be continued, and remove the options that tell.

    Raises:
        RequestError: they contradict each other.
    """
    continues = bool_field("continue_final_message", options.pop("continue_final_message", False))
    if bool_field("add_generation_prompt", options.pop("add_generation_prompt", not continues)) == continues:
        raise RequestError(
            "'continue_final_message' needs 'add_generation_prompt': false, which is not supported without it"
        )
    return continues


def generation_request(prompt: Prompt, options: Json) -> GenerationRequest:
    """Return a request for a prompt with the given options.

    Raises:
        RequestError: an option is unknown or invalid.
    """
    priority = options.pop("priority", 0)
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise RequestError(f"'priority' must be an integer, not {shown(priority)}")
    salt, tenant = (text_field(name, options.pop(name, None)) for name in ("cache_salt", "user"))
    progress, tokens = (
        bool_field(name, options.pop(name, False)) for name in ("return_progress", "return_token_ids")
    )
    if bool_field("reasoning_control", options.pop("reasoning_control", False)):
        options.setdefault("reasoning_budget", _NO_BUDGET)
    pin = pin_of(options)
    timeout = options.pop("timeout", None)
    if isinstance(timeout, bool) or not isinstance(timeout, int | float | None):
        raise RequestError(f"'timeout' must be a number of seconds, not {shown(timeout)}")
    params = SamplingParams.from_dict(_without_minus_one(options))
    left_out = prompt.left_out if isinstance(prompt, Conversation) else ()
    return GenerationRequest(
        prompt=prompt,
        params=params,
        priority=priority,
        cache_salt=salt,
        tenant=tenant,
        timeout=None if timeout is None else checked_timeout(timeout),
        left_out=left_out,
        pin_seconds=pin,
        return_progress=progress,
        return_token_ids=tokens,
    )


# Seconds that a named prefix is kept before others: OpenAI keeps it in memory for 5 to 10 minutes, or for a
# day (https://platform.openai.com/docs/guides/prompt-caching).
_RETENTION = {"in_memory": 600.0, "in-memory": 600.0, "24h": 86_400.0}


def pin_of(options: Json) -> float:
    """Return how long the KV of a request is pinned, and remove the options that tell; 0 is not at all.

    Raises:
        RequestError: an option is invalid.
    """
    key = text_field("prompt_cache_key", options.pop("prompt_cache_key", None))
    kept = text_field("prompt_cache_retention", options.pop("prompt_cache_retention", None))
    if kept is not None and kept not in _RETENTION:
        raise RequestError(f"'prompt_cache_retention' must be in_memory or 24h, not {shown(kept)}")
    return _RETENTION[kept or "in_memory"] if key or kept else 0.0


def _without_minus_one(options: Json) -> Json:
    """Return the options without the values by which llama.cpp, vLLM, Ollama and LM Studio mean none."""
    plain = {name: value for name, value in options.items() if type(value) is int and value < 0}
    if "seed" in plain:
        options["seed"] = None
    if plain.get("top_k") == -1:
        options["top_k"] = 0
    if plain.get("max_tokens") in (-1, -2):  # without end, and as far as the context goes
        options["max_tokens"] = None
    return options


def text_field(name: str, value: Any) -> str | None:
    """Return a field that must be a string or None.

    Raises:
        RequestError: the value has another type.
    """
    if value is not None and not isinstance(value, str):
        raise RequestError(f"'{name}' must be a string, not {shown(value)}")
    return value


def bool_field(name: str, value: Any) -> bool:
    """Return a field that must be true or false.

    Raises:
        RequestError: the value has another type.
    """
    if not isinstance(value, bool):
        raise RequestError(f"'{name}' must be true or false, not {shown(value)}")
    return value


def is_token_ids(value: Any) -> bool:
    """Return whether a value is a list of integers."""
    return isinstance(value, list) and all(
        isinstance(item, int) and not isinstance(item, bool) for item in value
    )

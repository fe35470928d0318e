"""Requests and responses of /v1/responses in batches. The ids are the same in every run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ....errors import RequestError
from ...service.core.messages import Generation
from ...service.http.openai.response_builder import ResponseBuilder
from ...service.http.openai.responses import KNOWN, ResponseAsk, not_included, read_response

Json = dict[str, Any]

# Options that need stored responses or a streaming client. A batch accepts only these values.
_ONLY: dict[str, Any] = {"stream": False, "background": False, "previous_response_id": None}
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}


def read_line(body: Mapping[str, Any], defaults: Mapping[str, Any]) -> ResponseAsk:
    """Return the parsed body of a line.

    Args:
        body: the body of the line.
        defaults: default sampling options.

    Raises:
        RequestError: a field is invalid, or not supported in a batch.
    """
    fields = {name: value for name, value in body.items() if value is not None}
    for name in (*fields, *not_included(fields)):
        if name not in KNOWN:
            raise RequestError(f"unknown field '{name}'; known fields: {', '.join(sorted(KNOWN))}")
    for name, value in _ONLY.items():
        if fields.get(name, value) != value:
            raise RequestError(f"'{name}': {fields[name]!r} is not supported in a batch, only {value!r}")
    return read_response({**fields, "store": False}, defaults, [])


def response_body(ask: ResponseAsk, result: Generation, model: str, created: int) -> Json:
    """Return the response object of a finished generation.

    Args:
        ask: the parsed request.
        result: the generation; its first choice is the answer.
        model: the model name in the response.
        created: the creation time, as Unix time.
    """
    builder = ResponseBuilder(ask, model)
    answer = dataclasses.replace(result.choices[0], usage=result.usage)
    for _ in builder.of(answer):  # a batch does not need the events
        pass
    output = [
        {**item, "id": f"{_PREFIXES[item['type']]}_{result.request_id}_{position}"}
        for position, item in enumerate(builder.output)
    ]
    return {**builder.response, "id": f"resp_{result.request_id}", "created_at": created, "output": output}

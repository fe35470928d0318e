"""Lines for /v1/responses: what the service reads and writes, with ids that are the same in every run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ....errors import RequestError
from ...service.core.messages import Delta, Generation
from ...service.http.openai.responses import KNOWN, ResponseAsk, ResponseBuilder, read_response

Json = dict[str, Any]

# What needs stored responses, or somebody who reads along.
_ONLY: dict[str, Any] = {"stream": False, "background": False, "previous_response_id": None}
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


def read_line(body: Mapping[str, Any], defaults: Mapping[str, Any]) -> ResponseAsk:
    """Read a body.

    Args:
        body: of the line.
        defaults: sampling options that it leaves out.

    Raises:
        RequestError: something in it is wrong, or cannot be done in a batch.
    """
    given = {name: value for name, value in body.items() if value is not None}
    for name in given:
        if name not in KNOWN:
            raise RequestError(f"unknown field '{name}'; there are: {', '.join(sorted(KNOWN))}")
    for name, value in _ONLY.items():
        if given.get(name, value) != value:
            raise RequestError(f"'{name}': {given[name]!r} is not supported in a batch, only {value!r}")
    return read_response({**given, "store": False}, defaults, [])


def response_body(ask: ResponseAsk, result: Generation, model: str, created: int) -> Json:
    """The response object of a whole answer.

    Args:
        ask: what was asked.
        result: its first choice is the answer.
        model: its name.
        created: Unix time.
    """
    choice, builder = result.choices[0], ResponseBuilder(ask, model)
    delta = Delta(
        request_id=result.request_id,
        index=0,
        text=choice.text,
        token_ids=choice.token_ids,
        reasoning=choice.reasoning,
        tool_calls=choice.tool_calls,
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
        usage=result.usage,
    )
    for _ in builder.of(delta):  # the events, which nobody reads
        pass
    output = [
        {**item, "id": f"{_PREFIXES[item['type']]}_{result.request_id}_{position}"}
        for position, item in enumerate(builder.output)
    ]
    return {**builder.response, "id": f"resp_{result.request_id}", "created_at": created, "output": output}

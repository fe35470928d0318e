"""The endpoints that answer one body with one generation. Batch jobs use them without HTTP.

Bodies follow https://platform.openai.com/docs/api-reference, with vLLM's further sampling options
(`top_k`, `min_p`, `repetition_penalty`, `stop_token_ids`, `ignore_eos`, `min_tokens`, ...).
Unknown and unsupported options are errors; they are not ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .....records import dataclass
from ...core.messages import Generation, GenerationRequest
from .chat import chat_request, chat_response
from .completions import completion_request, completion_response
from .reading import Json


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The functions that read a request body and write the response body of one URL path."""

    request: Callable[[Mapping[str, Any]], GenerationRequest]
    response: Callable[[GenerationRequest, Generation, str], Json]  # the str is the model name


ENDPOINTS = {
    "/v1/completions": Endpoint(completion_request, completion_response),
    "/v1/chat/completions": Endpoint(chat_request, chat_response),
}

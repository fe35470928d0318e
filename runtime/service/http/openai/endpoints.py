"""The endpoints that answer one body with one generation, for whoever has bodies and an engine.

Bodies follow https://platform.openai.com/docs/api-reference, with vLLM's further sampling options
(`top_k`, `min_p`, `repetition_penalty`, `stop_token_ids`, `ignore_eos`, `min_tokens`, ...).
An option that would have to be ignored to be accepted is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ...core.messages import Generation, GenerationRequest
from .chat import chat_request, chat_response
from .completions import completion_request, completion_response
from .reading import Json


@dataclass(frozen=True, slots=True)
class Endpoint:
    """How one url's bodies are read and answered."""

    request: Callable[[Mapping[str, Any]], GenerationRequest]
    response: Callable[[GenerationRequest, Generation, str], Json]  # str: the model's name


ENDPOINTS = {
    "/v1/completions": Endpoint(completion_request, completion_response),
    "/v1/chat/completions": Endpoint(chat_request, chat_response),
}

"""Between the wire messages of `carryall.v1` and the service's own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ...errors import RequestError
from ...proto import carryall_pb2 as pb
from ..types.outputs import FinishReason, Logprob
from ..types.sampling_params import SamplingParams
from .messages import Conversation, Delta, GenerationRequest, ModelInfo, Prompt, by_rank, checked_timeout

FINISH_REASONS: dict[FinishReason | None, pb.FinishReason] = {
    None: pb.FINISH_REASON_UNSPECIFIED,
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "cancelled": pb.FINISH_REASON_CANCELLED,
}


def from_request(message: pb.GenerateRequest, defaults: Mapping[str, Any]) -> GenerationRequest:
    """Read a request; ``defaults`` are the model's own sampling options.

    Raises:
        RequestError: it has no prompt, or a sampling option is out of range.
    """
    prompt = _prompt(message)
    # An answer in a chat goes on until the model ends it, a continuation might never end.
    limit = {"max_tokens": None} if isinstance(prompt, Conversation) else {}
    return GenerationRequest(
        prompt=prompt,
        params=SamplingParams.from_dict({**limit, **defaults, **_options(message.sampling)}),
        request_id=message.request_id or None,
        priority=message.priority,
        cache_salt=message.cache_salt or None,
        tenant=message.tenant or None,
        timeout=checked_timeout(message.timeout_seconds) if message.HasField("timeout_seconds") else None,
    )


def _prompt(message: pb.GenerateRequest) -> Prompt:
    match message.WhichOneof("prompt"):
        case "text":
            return message.text
        case "token_ids":
            return list(message.token_ids.ids)
        case "chat":
            return _conversation(message.chat)
        case _:
            raise RequestError("the request has no prompt; set one of text, token_ids, chat")


def _conversation(chat: pb.Chat) -> Conversation:
    try:
        tools = [json.loads(tool) for tool in chat.tools]
        return Conversation([_turn(turn) for turn in chat.messages], tools)
    except ValueError as error:
        raise RequestError(f"a tool, or the arguments of a tool call, are not JSON: {error}") from error


def _turn(message: pb.ChatMessage) -> dict[str, Any]:
    turn: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_call_id:
        turn["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        turn["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.loads(call.arguments or "{}")},
            }
            for call in message.tool_calls
        ]
    return turn


def _options(message: pb.SamplingOptions) -> dict[str, Any]:
    """Return the options that were set; their names are those of SamplingParams."""
    options = {field.name: value for field, value in message.ListFields()}
    others = options.pop("others", {})
    try:
        options |= {name: json.loads(value) for name, value in others.items()}
    except (ValueError, RecursionError) as error:
        raise RequestError(f"a value in 'others' of the sampling options is not JSON: {error}") from error
    if options.get("max_tokens") == 0:
        options["max_tokens"] = None
    if message.bad_words:
        options["bad_words"] = [_bad_word(word) for word in message.bad_words]
    if message.HasField("structured_output"):
        options["structured_output"] = _structured_output(message.structured_output)
    return options


def _structured_output(message: pb.StructuredOutput) -> dict[str, Any]:
    form = message.WhichOneof("form")
    if form == "choice":
        return {form: message.choice.texts}
    return {form: getattr(message, form)} if form else {}


def _bad_word(word: pb.BadWord) -> str | list[int]:
    return word.text if word.WhichOneof("word") == "text" else list(word.token_ids.ids)


def to_response(delta: Delta, top_logprobs: int) -> pb.GenerateResponse:
    """Write a delta, with the ``top_logprobs`` most likely candidates of each token that has logprobs."""
    message = pb.GenerateResponse(
        request_id=delta.request_id,
        index=delta.index,
        text_delta=delta.text,
        token_ids=delta.token_ids,
        logprobs=[
            _token_logprobs(token, candidates, top_logprobs)
            for token, candidates in zip(delta.token_ids, delta.logprobs, strict=False)
        ],
        finish_reason=FINISH_REASONS[delta.finish_reason],
        reasoning_delta=delta.reasoning,
        tool_calls=[
            pb.ToolCall(id=call.id, name=call.name, arguments=call.arguments) for call in delta.tool_calls
        ],
        # The prompt's own token comes first in each.
        prompt_logprobs=[
            _token_logprobs(next(iter(entry)), entry, len(entry)) for entry in delta.prompt_logprobs if entry
        ],
    )
    if isinstance(delta.stop_reason, str):
        message.stop_string = delta.stop_reason
    elif delta.stop_reason is not None:
        message.stop_token_id = delta.stop_reason
    if delta.usage is not None:
        message.usage.prompt_tokens = delta.usage.prompt_tokens
        message.usage.completion_tokens = delta.usage.completion_tokens
        message.usage.cached_tokens = delta.usage.cached_tokens
    return message


def _token_logprobs(token: int, candidates: Mapping[int, Logprob], top: int) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(
        chosen=_logprob(candidates[token]), top=[_logprob(entry) for entry in by_rank(candidates, top)]
    )


def _logprob(entry: Logprob) -> pb.Logprob:
    return pb.Logprob(token_id=entry.token_id, logprob=entry.logprob, rank=entry.rank, text=entry.text)


def to_model_info(info: ModelInfo) -> pb.GetModelInfoResponse:
    """Write the model's description."""
    return pb.GetModelInfoResponse(
        model=info.model,
        provider=info.provider,
        vocab_size=info.vocab_size,
        context_length=info.context_length,
        max_slots=info.max_slots,
        server_version=info.server_version,
    )

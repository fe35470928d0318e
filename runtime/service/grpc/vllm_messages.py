"""Convert messages of `vllm.grpc.engine` to generation requests, and deltas to messages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ....errors import RequestError, UnsupportedTaskError
from ....proto import vllm_engine_pb2 as pb
from ...types.outputs import Logprob
from ...types.sampling_params import SamplingParams
from ..core.messages import Delta, GenerationRequest, by_rank

_REASONS = {"stop": "stop", "length": "length", "cancelled": "abort", "error": "error"}
# Fields without presence: 0 means that the option is not set.
_ZERO_IS_UNSET = ("top_p", "repetition_penalty", "n")
_PLAIN = (
    *("top_k", "min_p", "frequency_penalty", "presence_penalty", "min_tokens"),
    *("skip_special_tokens", "ignore_eos", "include_stop_str_in_output"),
)
_OPTIONAL = ("temperature", "max_tokens", "logprobs", "prompt_logprobs", "seed")


def generation_request(message: pb.GenerateRequest) -> GenerationRequest:
    """Return the request of a message.

    Unset options have the defaults of SamplingParams, since routers send the model's defaults themselves.

    Raises:
        RequestError: the message has no prompt, or an option is out of range.
        UnsupportedTaskError: the message has media, or uses an unsupported feature.
    """
    if message.HasField("mm_inputs") or message.HasField("media_refs") or message.extra_mm_inputs:
        raise UnsupportedTaskError("this server supports text only, not media")
    if message.HasField("kv_transfer_params_json"):
        raise UnsupportedTaskError("this server does not transfer KV caches between engines")
    if message.data_parallel_rank:
        raise UnsupportedTaskError(f"there is no data-parallel rank {message.data_parallel_rank}, only 0")
    match message.WhichOneof("input"):
        case "tokenized":
            prompt: str | list[int] = list(message.tokenized.input_ids)
        case "text":
            prompt = message.text
        case _:
            raise RequestError("the request has no input; set one of tokenized, text")
    return GenerationRequest(
        prompt=prompt,
        params=sampling_params(message.sampling_params),
        request_id=message.request_id or None,
    )


def sampling_params(message: pb.SamplingParams) -> SamplingParams:
    """Return the sampling options of a message.

    Raises:
        InvalidSamplingError: an option is out of range.
        UnsupportedTaskError: an option is not supported.
    """
    if message.HasField("truncate_prompt_tokens"):
        raise UnsupportedTaskError("truncate_prompt_tokens is not supported; truncate the prompt before")
    options: dict[str, Any] = {"max_tokens": None}
    options |= {name: getattr(message, name) for name in _PLAIN}
    options |= {name: value for name in _ZERO_IS_UNSET if (value := getattr(message, name))}
    options |= {name: getattr(message, name) for name in _OPTIONAL if message.HasField(name)}
    options |= {"stop": list(message.stop), "stop_token_ids": list(message.stop_token_ids)}
    options["logit_bias"] = dict(message.logit_bias)
    form = message.WhichOneof("constraint")
    if form == "structural_tag":
        raise UnsupportedTaskError("structural_tag is not supported; use json_schema, regex or grammar")
    if form is not None:
        value = list(message.choice.choices) if form == "choice" else getattr(message, form)
        options["structured_output"] = {form: value}
    return SamplingParams.from_dict(options)


class GenerationWriter:
    """Converts the deltas of one request to messages.

    Args:
        stream: whether to send chunks during generation.
        params: the request's options.
    """

    def __init__(self, *, stream: bool, params: SamplingParams) -> None:
        self._stream, self._params = stream, params
        self._tokens = defaultdict[int, list[int]](list)
        self._logprobs = defaultdict[int, pb.OutputLogProbs](pb.OutputLogProbs)
        self._prompt: pb.InputLogProbs | None = None
        self._cached = 0

    def responses(self, delta: Delta, prompt: Sequence[int]) -> Iterator[pb.GenerateResponse]:
        """Yield the messages of the next delta; ``prompt`` is the prompt's token ids."""
        if delta.usage is not None:
            self._cached = delta.usage.cached_tokens
        tokens = self._tokens[delta.index]
        tokens.extend(delta.token_ids)
        news = _output_logprobs(delta, self._params.logprobs or 0) if delta.logprobs else None
        if news is not None:
            self._logprobs[delta.index].MergeFrom(news)
        if delta.prompt_logprobs:
            top = self._params.prompt_logprobs or 0
            self._prompt = _input_logprobs(delta.prompt_logprobs, prompt, top)
        counts = {
            "prompt_tokens": delta.prompt_tokens,
            "completion_tokens": len(tokens),
            "index": delta.index,
        }
        if self._stream and delta.token_ids:
            chunk = pb.GenerateStreamChunk(
                token_ids=delta.token_ids,
                output_logprobs=news,
                input_logprobs=self._prompt if delta.prompt_logprobs else None,
                cached_tokens=self._cached,
                **counts,
            )
            yield pb.GenerateResponse(chunk=chunk)
        if delta.finish_reason is not None:
            yield pb.GenerateResponse(complete=self._complete(delta, counts))

    def _complete(self, delta: Delta, counts: Mapping[str, Any]) -> pb.GenerateComplete:
        complete = pb.GenerateComplete(
            output_ids=self._tokens[delta.index],
            finish_reason=_REASONS[str(delta.finish_reason)],
            output_logprobs=self._logprobs.get(delta.index),
            input_logprobs=self._prompt if delta.index == 0 else None,
            cached_tokens=self._cached,
            **counts,
        )
        if isinstance(delta.stop_reason, int):
            complete.matched_token_id = delta.stop_reason
        elif delta.stop_reason is not None and delta.finish_reason == "stop":
            complete.matched_stop_str = delta.stop_reason
        return complete


def _output_logprobs(delta: Delta, top: int) -> pb.OutputLogProbs:
    pairs = list(zip(delta.token_ids, delta.logprobs, strict=True))
    return pb.OutputLogProbs(
        token_logprobs=[entry[token].logprob for token, entry in pairs],
        token_ids=delta.token_ids,
        top_logprobs=[_top(entry, top) for _, entry in pairs],
    )


def _input_logprobs(
    entries: Sequence[Mapping[int, Logprob] | None], prompt: Sequence[int], top: int
) -> pb.InputLogProbs:
    pairs = list(zip(prompt, entries, strict=True))
    return pb.InputLogProbs(
        token_logprobs=[
            pb.InputTokenLogProb(value=None if entry is None else entry[token].logprob)
            for token, entry in pairs
        ],
        token_ids=prompt,
        top_logprobs=[_top(entry or {}, top) for _, entry in pairs],
    )


def _top(entry: Mapping[int, Logprob], most: int) -> pb.TopLogProbs:
    best = by_rank(entry, most)
    return pb.TopLogProbs(values=[one.logprob for one in best], token_ids=[one.token_id for one in best])

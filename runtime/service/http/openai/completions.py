"""``/v1/completions``: read request bodies and write response bodies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .....errors import RequestError
from .....options import shown
from .....records import dataclass
from ....text.infill import Infill
from ....types.outputs import Logprob
from ...core.messages import Delta, Generation, GenerationRequest, Prompt, Usage
from .reading import COMMON, Json, bool_field, generation_request, is_token_ids, read_options, text_field
from .stream_options import StreamOptions, take_stream_options
from .writing import completion_logprobs, response

KNOWN = COMMON | {"prompt", "echo", "suffix"}
MOST_PROMPTS = 2048


@dataclass(frozen=True, slots=True)
class CompletionAsk:
    """The content of a request body.

    Args:
        requests: one request per prompt, in order.
        stream: the stream options.
        echo: whether each answer begins with its prompt.
        no_tokens: ``max_tokens`` is 0. The engine generates 1 token, which the response omits.
    """

    requests: list[GenerationRequest]
    stream: StreamOptions
    echo: bool = False
    no_tokens: bool = False


def completion_request(body: Mapping[str, Any]) -> GenerationRequest:
    """Return the request of a body with one prompt and without ``stream`` or ``echo``.

    Raises:
        RequestError: a field is invalid or not supported.
    """
    ask = read_completion({**body, "echo": None})
    for name, value in (("echo", body.get("echo")), ("stream", ask.stream.stream)):
        if value:
            raise RequestError(f"'{name}': {shown(value)} is not supported, only False")
    if len(ask.requests) != 1:
        raise RequestError("'prompt' must be 1 prompt; write 1 line for each prompt")
    return ask.requests[0]


def read_completion(body: Mapping[str, Any]) -> CompletionAsk:
    """Return the content of a body.

    Raises:
        RequestError: a field is invalid or not supported.
    """
    options = read_options(body, {})
    stream = take_stream_options(options)
    prompts: list[Prompt] = [*_prompts(options.pop("prompt", None))]
    if suffix := text_field("suffix", options.pop("suffix", None)):
        prompts = [_gap(prompt, suffix) for prompt in prompts]
    echo = bool_field("echo", options.pop("echo", False))
    if echo and suffix:
        raise RequestError("'echo' is not supported with 'suffix'")
    no_tokens = echo and options.get("max_tokens") == 0
    if no_tokens:
        options["max_tokens"] = 1
    if echo and isinstance(options.get("logprobs"), int):
        options.setdefault("prompt_logprobs", options["logprobs"])
    requests = [generation_request(prompt, {**options}) for prompt in prompts]
    return CompletionAsk(requests, stream, echo, no_tokens)


def _prompts(prompt: Any) -> list[str | list[int]]:
    """Return one or several prompts as a list."""
    if isinstance(prompt, str) or (prompt and is_token_ids(prompt)):
        return [prompt]
    several = isinstance(prompt, list) and all(isinstance(one, str) or is_token_ids(one) for one in prompt)
    if not several or not prompt:
        raise RequestError("'prompt' must be a string, a list of token ids, or a list of these")
    if len(prompt) > MOST_PROMPTS:
        raise RequestError(f"'prompt' has {len(prompt)} prompts; the maximum is {MOST_PROMPTS}")
    return list(prompt)


def _gap(prompt: Prompt, suffix: str) -> Infill:
    if not isinstance(prompt, str):
        raise RequestError("with 'suffix', 'prompt' must be a string or a list of strings")
    return Infill(prompt, suffix)


def completion_response(request: GenerationRequest, result: Generation, model: str) -> Json:
    """Return the response to a body with one prompt."""
    choices = [
        choice_json(choice, choice.index) | token_ids_json(request, result, choice)
        for choice in result.choices
    ]
    return response("cmpl", "text_completion", result, model, choices)


def completions_response(
    ask: CompletionAsk, results: Sequence[Generation], prompts: Sequence[Echo], model: str
) -> Json:
    """Return the response to a body.

    Args:
        ask: the content of the body.
        results: one result per prompt.
        prompts: one entry per prompt with ``echo``, else empty.
        model: the name of the model.
    """
    choices = []
    for position, result in enumerate(results):
        for choice in result.choices:
            index = position * len(result.choices) + choice.index
            echoed = prompts[position].with_logprobs(result.prompt_logprobs) if ask.echo else None
            written = choice_json(choice, index, echoed, no_tokens=ask.no_tokens)
            choices.append(written | token_ids_json(ask.requests[position], result, choice))
    usage = Usage(
        prompt_tokens=sum(result.usage.prompt_tokens for result in results),
        completion_tokens=0 if ask.no_tokens else sum(result.usage.completion_tokens for result in results),
        cached_tokens=sum(result.usage.cached_tokens for result in results),
    )
    whole = Generation(request_id=results[0].request_id, choices=[], usage=usage)
    if len(results) == 1 and not ask.echo:  # with echo, the choices hold them
        whole = Generation(
            request_id=whole.request_id,
            choices=[],
            usage=usage,
            prompt_logprobs=results[0].prompt_logprobs,
        )
    return response("cmpl", "text_completion", whole, model, choices)


def token_ids_json(request: GenerationRequest, result: Generation, choice: Delta) -> Json:
    """Return the tokens of a choice and of its prompt, if the request asked for them, as vLLM names them."""
    if not request.return_token_ids:
        return {}
    return {"prompt_token_ids": list(result.prompt_token_ids), "token_ids": choice.token_ids}


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt that is repeated before its continuation.

    Args:
        text: the text of the prompt.
        token_ids: the tokens of the prompt.
        first: the text of the first token, which has no log-probability.
        logprobs: one entry per token if requested, else empty.
    """

    text: str
    token_ids: Sequence[int]
    first: str
    logprobs: Sequence[Mapping[int, Logprob] | None] = ()

    def with_logprobs(self, logprobs: Sequence[Mapping[int, Logprob] | None]) -> Echo:
        """Return a copy with log-probabilities."""
        return Echo(self.text, self.token_ids, self.first, logprobs)


def choice_json(choice: Delta, index: int, echo: Echo | None = None, *, no_tokens: bool = False) -> Json:
    """Return one choice as JSON."""
    text, token_ids, logprobs = choice.text, choice.token_ids, choice.logprobs
    if no_tokens:
        text, token_ids, logprobs = "", [], []
    all_ids: Sequence[int] = token_ids
    entries: Sequence[Any] = logprobs
    if echo is not None:
        text = echo.text + text
        wanted = bool(choice.logprobs)
        all_ids = [*echo.token_ids, *token_ids] if wanted else []
        entries = [*echo.logprobs, *logprobs] if wanted else []
    return {
        "index": index,
        "text": text,
        "logprobs": completion_logprobs(all_ids, entries, echo.first if echo else "") if entries else None,
        "finish_reason": "length" if no_tokens else choice.finish_reason,
    }

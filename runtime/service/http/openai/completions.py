"""``/v1/completions``: bodies to requests, and results to bodies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .....errors import RequestError
from ....types.outputs import Logprob
from ...core.messages import Choice, Generation, GenerationRequest, Usage
from .reading import COMMON, Json, bool_field, generation_request, is_token_ids, read_options
from .stream_options import StreamOptions, take_stream_options
from .writing import completion_logprobs, response

KNOWN = COMMON | {"prompt", "echo", "suffix"}
MOST_PROMPTS = 2048


@dataclass(frozen=True, slots=True)
class CompletionAsk:
    """What a body asks for.

    Args:
        requests: one a prompt, in their order.
        stream: how to answer.
        echo: begin each answer with its prompt.
        no_tokens: nothing is to be generated; the one token that is, is left out.
    """

    requests: list[GenerationRequest]
    stream: StreamOptions
    echo: bool = False
    no_tokens: bool = False


def completion_request(body: Mapping[str, Any]) -> GenerationRequest:
    """Read a body with one prompt that does not ask for a stream.

    Raises:
        RequestError: something in it is wrong or cannot be done.
    """
    ask = read_completion({**body, "echo": None})
    for name, value in (("echo", body.get("echo")), ("stream", ask.stream.stream)):
        if value:
            raise RequestError(f"'{name}': {value!r} is not supported, only False")
    if len(ask.requests) != 1:
        raise RequestError("'prompt' must be one prompt; put several prompts in lines of their own")
    return ask.requests[0]


def read_completion(body: Mapping[str, Any]) -> CompletionAsk:
    """Read a body.

    Raises:
        RequestError: something in it is wrong or cannot be done.
    """
    options = read_options(body, {"suffix": ""})
    stream = take_stream_options(options)
    prompts = _prompts(options.pop("prompt", None))
    echo = bool_field("echo", options.pop("echo", False))
    no_tokens = echo and options.get("max_tokens") == 0
    if no_tokens:
        options["max_tokens"] = 1
    if echo and isinstance(options.get("logprobs"), int):
        options.setdefault("prompt_logprobs", options["logprobs"])
    requests = [generation_request(prompt, {**options}) for prompt in prompts]
    return CompletionAsk(requests, stream, echo, no_tokens)


def _prompts(given: Any) -> list[str | list[int]]:
    """One text or list of tokens, or several."""
    if isinstance(given, str) or (given and is_token_ids(given)):
        return [given]
    several = isinstance(given, list) and all(isinstance(one, str) or is_token_ids(one) for one in given)
    if not several or not given:
        raise RequestError("'prompt' must be one text or one list of token ids, or a list of these")
    if len(given) > MOST_PROMPTS:
        raise RequestError(f"'prompt' has {len(given)} prompts, more than {MOST_PROMPTS}")
    return list(given)


def completion_response(request: GenerationRequest, result: Generation, model: str) -> Json:
    """Answer a body with one prompt."""
    choices = [choice_json(choice, choice.index) for choice in result.choices]
    return response("cmpl", "text_completion", result, model, choices)


def completions_response(
    ask: CompletionAsk, results: Sequence[Generation], prompts: Sequence[Echo], model: str
) -> Json:
    """Answer a body.

    Args:
        ask: what it asks for.
        results: one a prompt.
        prompts: one a request, if they are echoed.
        model: its name.
    """
    choices = []
    for position, result in enumerate(results):
        for choice in result.choices:
            index = position * len(result.choices) + choice.index
            echoed = prompts[position].with_logprobs(result.prompt_logprobs) if ask.echo else None
            choices.append(choice_json(choice, index, echoed, no_tokens=ask.no_tokens))
    usage = Usage(
        prompt_tokens=sum(result.usage.prompt_tokens for result in results),
        completion_tokens=0 if ask.no_tokens else sum(result.usage.completion_tokens for result in results),
        cached_tokens=sum(result.usage.cached_tokens for result in results),
    )
    whole = Generation(request_id=results[0].request_id, choices=[], usage=usage)
    if len(results) == 1 and not ask.echo:  # in an echo they are in the choices
        whole = Generation(
            request_id=whole.request_id,
            choices=[],
            usage=usage,
            prompt_logprobs=results[0].prompt_logprobs,
        )
    return response("cmpl", "text_completion", whole, model, choices)


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt that stands in front of its continuation.

    Args:
        text: of the prompt.
        token_ids: its tokens.
        first: the text of the first of them, which has no log-probability.
        logprobs: one entry a token, if they were asked for.
    """

    text: str
    token_ids: Sequence[int]
    first: str
    logprobs: Sequence[Mapping[int, Logprob] | None] = ()

    def with_logprobs(self, logprobs: Sequence[Mapping[int, Logprob] | None]) -> Echo:
        """The same with log-probabilities."""
        return Echo(self.text, self.token_ids, self.first, logprobs)


def choice_json(choice: Choice, index: int, echo: Echo | None = None, *, no_tokens: bool = False) -> Json:
    """One continuation."""
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

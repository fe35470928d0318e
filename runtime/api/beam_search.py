"""Beam search on an engine: each step of each beam is a request for one token.

A beam shares all tokens except the last with its parent, so the prefix cache reuses or copies the parent's
KV.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from ...errors import InvalidSamplingError, PromptTooLongError, ProviderRuntimeError
from ...providers.base import EncoderOutput
from ..engine.requests.output_text import OutputText
from ..engine.requests.prompt_images import PromptImages
from ..engine.sampling.beam_search import Beam, BeamSearch, BeamSearchOptions
from ..text.tokenizer import Tokenizer
from ..types.outputs import CompletionOutput, RequestOutput
from ..types.sampling_params import MAX_LOGPROBS, SamplingParams
from .prompts import ChatPrompt, Prompt

Seen = tuple[PromptImages | None, EncoderOutput | None]
Generate = Callable[[list[Prompt], SamplingParams], list[RequestOutput]]


def beam_search(
    generate: Generate,
    prompts: Sequence[Sequence[int]],
    seen: Sequence[Seen],
    options: BeamSearchOptions,
    end_token_ids: Collection[int],
    context_length: int,
    tokenizer: Tokenizer | None,
) -> list[RequestOutput]:
    """Search for the most likely outputs of each prompt, all prompts in one batch.

    Args:
        generate: runs requests, given prompts and options.
        prompts: token ids of each prompt.
        seen: the pictures of each prompt, in it or in its encoder.
        options: options of the search.
        end_token_ids: tokens that finish a beam.
        context_length: maximum tokens of prompt and output together.
        tokenizer: makes the texts; None leaves them empty.

    Raises:
        InvalidSamplingError: the beams need more log-probabilities than ``MAX_LOGPROBS``.
        PromptTooLongError: a prompt fills the context.
        ProviderRuntimeError: a request failed.
    """
    longest = max(map(len, prompts), default=0)
    if longest >= context_length:
        told = f"the context holds {context_length}, including at least one generated token"
        raise PromptTooLongError(told, longest, context_length - 1)
    searches = [
        BeamSearch(replace(options, max_tokens=min(options.max_tokens, room)), end_token_ids)
        for room in (context_length - len(prompt) for prompt in prompts)
    ]
    wanted = max((search.num_candidates for search in searches), default=0)
    if wanted > MAX_LOGPROBS:
        raise InvalidSamplingError(
            f"{options.num_beams} beams need {wanted} candidates a step, the maximum is {MAX_LOGPROBS}; "
            "lower num_beams"
        )
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=wanted, ignore_eos=True)
    while any(not search.done for search in searches):
        open_searches = [i for i, search in enumerate(searches) if not search.done]
        beams = [(i, beam) for i in open_searches for beam in searches[i].running]
        asked = [_prompt([*prompts[i], *beam.token_ids], seen[i]) for i, beam in beams]
        states = generate(asked, params)
        found = iter([_logprobs(state) for state in states])
        for i in open_searches:
            searches[i].advance([next(found) for _ in searches[i].running])
    outputs = zip(prompts, searches, strict=True)
    return [_output(i, prompt, search, tokenizer) for i, (prompt, search) in enumerate(outputs)]


def _prompt(token_ids: list[int], seen: Seen) -> Prompt:
    images, encoder = seen
    if images is None and encoder is None:
        return token_ids
    return ChatPrompt(token_ids, lambda: None, images=images, encoder=encoder)


def _logprobs(state: RequestOutput) -> dict[int, float]:
    if state.error is not None:
        raise ProviderRuntimeError(state.error)
    (choices,) = state.outputs[0].logprobs or [{}]
    return {token: entry.logprob for token, entry in choices.items()}


def _output(
    index: int, prompt: Sequence[int], search: BeamSearch, tokenizer: Tokenizer | None
) -> RequestOutput:
    completions = [
        CompletionOutput(
            index=place,
            text=_text(prompt, beam, search, tokenizer),
            token_ids=list(beam.token_ids),
            finish_reason="stop" if search.ends(beam) else "length",
            stop_reason=beam.token_ids[-1] if search.ends(beam) else None,
            cumulative_logprob=beam.logprob,
        )
        for place, beam in enumerate(search.finished)
    ]
    return RequestOutput(f"beam-search-{index}", None, list(prompt), completions, finished=True)


def _text(prompt: Sequence[int], beam: Beam, search: BeamSearch, tokenizer: Tokenizer | None) -> str:
    if tokenizer is None:
        return ""
    text = OutputText(tokenizer, prompt, SamplingParams())
    tokens = beam.token_ids[: -1 if search.ends(beam) else None]
    for token in tokens:
        text.push(token, check_stop=False)
    text.end()
    return text.take(len(tokens), ended=True).text

"""Checks of new requests against the model: vocabulary, context, hidden states."""

from __future__ import annotations

from collections.abc import Sequence

from ....errors import InvalidSamplingError, PromptTooLongError, RequestError, UsageError
from ....providers.base import RunnerInfo
from ...types.sampling_params import SamplingParams
from ..requests.request import Request


def check_prompt(prompt: Sequence[int], vocab_size: int) -> None:
    """Check that a prompt has tokens, all of them in the vocabulary. Ids may be integers of any size.

    Raises:
        RequestError: the prompt is empty or has a token id outside the vocabulary.
    """
    if not prompt:
        raise RequestError("the prompt is empty; give it at least one token")
    low, high = min(prompt), max(prompt)
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise RequestError(f"prompt token id {wrong} is outside the vocabulary [0, {vocab_size})")


def check_token_ids(prompt: Sequence[int], params: SamplingParams, vocab_size: int) -> None:
    """Check the token ids of a prompt and its options. Ids may be integers of any size.

    Raises:
        RequestError: the prompt is empty or has a token id outside the vocabulary.
        InvalidSamplingError: an option has a token id outside the vocabulary.
    """
    check_prompt(prompt, vocab_size)
    unknown = [token for token in params.token_ids if not 0 <= token < vocab_size]
    if unknown:
        raise InvalidSamplingError(
            f"token id {unknown[0]} in the options is outside the vocabulary [0, {vocab_size})"
        )


def checked_room(request: Request, info: RunnerInfo, max_length: int) -> int:
    """Return how many tokens may be generated for a request.

    Args:
        request: a new request.
        info: the model.
        max_length: maximum tokens of a sequence, limited by the context or the KV budget.

    Raises:
        PromptTooLongError: the prompt leaves no room for a generated token.
        RequestError: the prompt is empty or has a token id outside the vocabulary.
        InvalidSamplingError: an option has a token id outside the vocabulary.
        UsageError: an embedding is wanted, and the runner has no hidden states.
    """
    check_token_ids(request.prompt_token_ids, request.params, info.vocab_size)
    if request.pooling is not None and not info.embedding_size:
        raise UsageError("this model was loaded without hidden states; embeddings need them")
    room: int = max_length - request.num_tokens
    if room < 1:
        limit = "the context" if max_length == info.context_length else "the KV cache's byte budget"
        raise PromptTooLongError(
            f"{limit} holds {max_length}, including at least one generated token; shorten the prompt or load "
            "the model with a larger limit",
            request.num_tokens,
            max_length - 1,
        )
    return room

"""Which requests a model can serve at all."""

from __future__ import annotations

from collections.abc import Sequence

from ....errors import InvalidSamplingError, PromptTooLongError, RequestError, UsageError
from ....providers.base import RunnerInfo
from ...types.sampling_params import SamplingParams
from ..requests.request import Request


def check_prompt(prompt: Sequence[int], vocab_size: int) -> None:
    """Refuse a prompt without tokens, or with tokens that do not exist, whatever their size.

    Raises:
        RequestError: it is one.
    """
    if not prompt:
        raise RequestError("the prompt is empty; give it at least one token")
    low, high = min(prompt), max(prompt)
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise RequestError(f"prompt token id {wrong} is outside the vocabulary [0, {vocab_size})")


def check_token_ids(prompt: Sequence[int], params: SamplingParams, vocab_size: int) -> None:
    """Refuse what names tokens that do not exist, whatever their size.

    Raises:
        RequestError: the prompt is empty or does.
        InvalidSamplingError: an option does.
    """
    check_prompt(prompt, vocab_size)
    unknown = [token for token in params.token_ids if not 0 <= token < vocab_size]
    if unknown:
        raise InvalidSamplingError(
            f"the options name token id {unknown[0]}, outside the vocabulary [0, {vocab_size})"
        )


def checked_room(request: Request, info: RunnerInfo, max_length: int) -> int:
    """How many tokens may be generated for a request.

    Args:
        request: a new one.
        info: the model.
        max_length: most tokens of a sequence, which the context or the KV cache's budget limits.

    Raises:
        PromptTooLongError: there is no room.
        RequestError: the prompt is empty or names tokens that do not exist.
        InvalidSamplingError: an option does.
        UsageError: hidden states are wanted, and the runner has none.
    """
    check_token_ids(request.prompt_token_ids, request.params, info.vocab_size)
    if request.pooling is not None and not info.embedding_size:
        raise UsageError("this model has no hidden states to give here")
    room: int = max_length - request.num_tokens
    if room < 1:
        limit = "the context" if max_length == info.context_length else "the KV cache's byte budget"
        raise PromptTooLongError(
            f"the prompt has {request.num_tokens} tokens, but {limit} holds {max_length}, at least "
            "one of them generated; shorten the prompt or load the model with room for more"
        )
    return room

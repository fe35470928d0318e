"""Embeddings from a decoder: its last hidden states, pooled over the tokens of a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import ProviderRuntimeError, RequestError
from ..engine.requests.pooled_states import Pooling as Pooling
from ..types.outputs import RequestOutput
from ..types.sampling_params import SamplingParams
from .requests import PooledPrompt
from .scoring import Questions
from .vectors import Vectors as Vectors

Input = str | list[int] | dict[str, Any]  # a text, token ids, or a picture

_NO_TOKENS = SamplingParams(temperature=0.0, max_tokens=1)


def check_pooling(pooling: str) -> None:
    """Check the name of a pooling.

    Raises:
        RequestError: there is no such pooling.
    """
    if not isinstance(pooling, str) or pooling not in ("last", "mean"):
        raise RequestError(f"pooling must be 'last' or 'mean', not {pooling!r}")


def text_inputs(inputs: Sequence[Input]) -> list[str | list[int]]:
    """Return inputs that are texts and token ids.

    Raises:
        RequestError: one is a picture.
    """
    texts: list[str | list[int]] = []
    for each in inputs:
        if isinstance(each, Mapping):
            raise RequestError("this model embeds texts only, not images")
        texts.append(each)
    return texts


def embedding_questions(prompts: Sequence[PooledPrompt]) -> Questions[Vectors]:
    """Return the requests that embed prompts; each result is a vector [hidden_size]."""
    return Questions(prompts, [_NO_TOKENS] * len(prompts), lambda outputs: [_vector(o) for o in outputs])


def encoded_tokens(prompts: Sequence[PooledPrompt]) -> list[list[int]]:
    """Return the tokens of prompts for an encoder beside the engine, which reads no pictures.

    Raises:
        RequestError: a prompt has pictures.
    """
    if any(prompt.images is not None for prompt in prompts):
        raise RequestError(
            "embeddings of pictures need hidden states beside the logits, which this provider does not give; "
            "load the model with provider cpu"
        )
    return [prompt.token_ids for prompt in prompts]


def _vector(output: RequestOutput) -> Vectors:
    if output.embedding is None:
        raise ProviderRuntimeError(output.error or "the request ended without an embedding")
    return output.embedding

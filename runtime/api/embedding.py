"""Embeddings from a decoder: its last hidden states, pooled over the tokens of a text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ...errors import ProviderRuntimeError, RequestError
from ..engine.requests.pooled_states import Pooling as Pooling
from ..types.outputs import RequestOutput
from ..types.sampling_params import SamplingParams
from .requests import PooledPrompt
from .scoring import Questions

Vectors = npt.NDArray[np.float32]  # [texts, hidden_size]

_NO_TOKENS = SamplingParams(temperature=0.0, max_tokens=1)


def check_pooling(pooling: str) -> None:
    """Check the name of a pooling.

    Raises:
        RequestError: there is no such pooling.
    """
    if not isinstance(pooling, str) or pooling not in ("last", "mean"):
        raise RequestError(f"pooling must be 'last' or 'mean', not {pooling!r}")


def embedding_questions(texts: Sequence[list[int]], pooling: Pooling) -> Questions[Vectors]:
    """Return the requests that embed texts; each result is a vector [hidden_size]."""
    prompts = [PooledPrompt(token_ids, pooling) for token_ids in texts]
    return Questions(prompts, [_NO_TOKENS] * len(prompts), lambda outputs: [_vector(o) for o in outputs])


def stacked(vectors: Sequence[npt.NDArray[np.floating]], size: int, *, normalize: bool) -> Vectors:
    """Stack vectors to float32 [n, size], also for n = 0; ``normalize`` scales each to length 1."""
    array = np.array(vectors, np.float32).reshape(len(vectors), size)
    if normalize:
        array /= np.maximum(np.linalg.norm(array, axis=1, keepdims=True), np.finfo(np.float32).tiny)
    return array


def _vector(output: RequestOutput) -> Vectors:
    if output.embedding is None:
        raise ProviderRuntimeError(output.error or "the request ended without an embedding")
    return output.embedding

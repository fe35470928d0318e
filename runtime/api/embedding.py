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


def stacked(vectors: Sequence[npt.NDArray[np.floating]], size: int, *, normalize: bool) -> Vectors:
    """Stack vectors to float32 [n, size], also for n = 0; ``normalize`` scales each to length 1."""
    array = np.array(vectors, np.float32).reshape(len(vectors), size)
    return scaled(array) if normalize else array


def scaled(vectors: Vectors) -> Vectors:
    """Return vectors [n, size] of length 1; a vector of zeros stays one."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.asarray(vectors / np.maximum(lengths, np.finfo(np.float32).tiny), np.float32)


def cut_vectors(vectors: Vectors, dimensions: int, normalize: bool) -> Vectors:
    """Return the first ``dimensions`` elements of vectors, scaled to length 1 again if they were.

    Raises:
        RequestError: the vectors have fewer.
    """
    if type(dimensions) is not int or not 1 <= dimensions <= vectors.shape[1]:
        raise RequestError(f"'dimensions' is {dimensions!r}, but the model's vectors have {vectors.shape[1]}")
    cut = vectors[:, :dimensions]
    return scaled(cut) if normalize else cut


def similarities(first: Vectors, second: Vectors, measure: str) -> Vectors:
    """Return the similarity [n, m] of vectors [n, size] and [m, size].

    Args:
        first: the vectors of the rows.
        second: the vectors of the columns.
        measure: cosine, dot, or euclidean or manhattan, whose distances are negated.
    """
    if measure == "cosine":
        return np.asarray(scaled(first) @ scaled(second).T, np.float32)
    if measure == "dot":
        return np.asarray(first @ second.T, np.float32)
    apart = first[:, None] - second[None]
    far = np.abs(apart).sum(-1) if measure == "manhattan" else np.sqrt((apart * apart).sum(-1))
    return np.asarray(-far, np.float32)


def _vector(output: RequestOutput) -> Vectors:
    if output.embedding is None:
        raise ProviderRuntimeError(output.error or "the request ended without an embedding")
    return output.embedding

"""Vectors of texts: stacked, scaled to length 1, cut, and compared."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ...errors import RequestError

Vectors = npt.NDArray[np.float32]  # [texts, size]


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


def probabilities(logits: Vectors, *, independent: bool) -> Vectors:
    """Return the sigmoid of logits, or their softmax over the last axis where labels exclude each other."""
    logits = logits.astype(np.float64)
    if independent:
        return np.asarray(0.5 + 0.5 * np.tanh(logits / 2), np.float32)
    powers = np.exp(logits - logits.max(-1, keepdims=True, initial=-np.inf))
    return np.asarray(powers / powers.sum(-1, keepdims=True), np.float32)


def hypotheses(sentence: str, labels: Sequence[str]) -> list[str]:
    """Return a sentence for each label of a zero-shot classification.

    Args:
        sentence: with {} in place of the label.
        labels: names of classes.

    Raises:
        RequestError: there are no labels, or the sentence has no {}.
    """
    if isinstance(labels, str) or not labels or not all(isinstance(label, str) for label in labels):
        raise RequestError("zero-shot classification needs a list of at least one label")
    if not isinstance(sentence, str) or "{}" not in sentence:
        raise RequestError(f"a hypothesis has {{}} in place of the label, unlike {sentence!r}")
    return [sentence.replace("{}", label) for label in labels]

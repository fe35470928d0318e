"""Vectors of texts by an encoder: an ONNX model with a tokenizer, in the folders of sentence-transformers.

`modules.json` and the folders of modules: https://www.sbert.net ("Creating Custom Models").
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ...contract import TERM_WEIGHTS, TOKEN_VECTORS, TOKEN_WEIGHTS
from ...errors import (
    ProviderRuntimeError,
    RequestError,
    UnsupportedModelError,
    UnsupportedTaskError,
    UsageError,
)
from ...exporter.encoders.modules import (
    Dense,
    Pooling,
    read_dense,
    read_modules,
    read_pooling,
    read_prompts,
    read_skipped,
)
from ..types.arguments import checked_arguments
from ..types.providers import Providers
from .load_encoder import prepared_encoder
from .text_session import Floats
from .token_batches import Text, TokenBatch, TokenBatches, Tokens
from .vectors import Vectors, cut_vectors, scaled, similarities, stacked

_SENTENCE = "sentence_embedding"
_HEADS = {TERM_WEIGHTS, TOKEN_WEIGHTS, TOKEN_VECTORS}

Ids = npt.NDArray[np.int64]
# Of states [tokens, size], where each text begins in them and the last ends [texts + 1], and the number of
# each token in its text, from 1 on.
Pool = Callable[[Floats, Ids, Ids], Floats]


def _by_text(reduce: np.ufunc, states: Floats, begins: Ids, empty: float = 0.0) -> Floats:
    """Reduce the states of each text; a text without tokens gets ``empty``."""
    counts = np.diff(begins)
    result = np.full((len(counts), *states.shape[1:]), empty, np.float32)
    if counts.any():
        result[counts > 0] = reduce.reduceat(states, begins[:-1][counts > 0], axis=0)
    return result


def _counts(begins: Ids) -> Floats:
    return np.maximum(np.diff(begins), 1)[:, None].astype(np.float32)


def _mean(states: Floats, begins: Ids, _: Ids) -> Floats:
    return np.asarray(_by_text(np.add, states, begins) / _counts(begins), np.float32)


def _mean_sqrt_len(states: Floats, begins: Ids, _: Ids) -> Floats:
    return np.asarray(_by_text(np.add, states, begins) / np.sqrt(_counts(begins)), np.float32)


def _weighted_mean(states: Floats, begins: Ids, numbers: Ids) -> Floats:
    weights = numbers[:, None].astype(np.float32)
    totals = np.maximum(_by_text(np.add, weights, begins), 1e-9)
    return np.asarray(_by_text(np.add, states * weights, begins) / totals, np.float32)


def _max(states: Floats, begins: Ids, _: Ids) -> Floats:
    return _by_text(np.maximum, states, begins, -np.inf)


def _first(states: Floats, begins: Ids, _: Ids) -> Floats:
    return _at(states, begins, begins[:-1])


def _last(states: Floats, begins: Ids, _: Ids) -> Floats:
    return _at(states, begins, begins[1:] - 1)


def _at(states: Floats, begins: Ids, places: Ids) -> Floats:
    """Return a state of each text, zeros of a text without tokens."""
    result = np.zeros((len(places), states.shape[1]), np.float32)
    kept = np.diff(begins) > 0
    result[kept] = states[places[kept]]
    return result


POOLINGS: dict[str, Pool] = {
    "cls": _first,
    "mean": _mean,
    "max": _max,
    "last": _last,
    "mean_sqrt_len": _mean_sqrt_len,
    "weightedmean": _weighted_mean,
}


@dataclass(frozen=True, slots=True)
class SparseVector:
    """A vector of the size of the vocabulary: its positive elements, by ascending token id.

    ``indices`` is int64 [n], ``values`` float32 [n].
    """

    indices: npt.NDArray[np.int64]
    values: Floats


class TextEncoder:
    """Embeds texts. Thread-safe.

    Args:
        folder: a package of ``carryall export``; a checkpoint, which is prepared in the cache; or a folder
            with ``model.onnx`` or ``onnx/model.onnx``, and ``tokenizer.json``. ``modules.json`` and the other
            files of sentence-transformers say what is not given here.
        providers: as for ``InferenceSession``.
        pooling: a name of ``POOLINGS``; None reads it from the folder. A model with an output
            ``sentence_embedding`` pools itself.
        normalize: scale vectors to length 1; None reads it from the folder.
        max_tokens: tokens of the longest text, special tokens included; None reads it from the folder.
        truncate: cut longer texts, instead of refusing them, unless a call says otherwise.

    Attributes:
        prompts: texts that ``embed`` puts before a text, by name.
        kinds: the kinds of vectors that it computes, of dense, sparse and multi.

    Raises:
        ModelNotFoundError: the folder has no model or no tokenizer.
        UnsupportedModelError: the model has inputs or modules that are not known, or no output to pool.
        PackageError: a file of the folder is damaged.
        CheckpointError: a module of the folder is damaged.
        UsageError: the pooling is neither given nor in the folder, or there is none of that name.
    """

    @checked_arguments
    def __init__(
        self,
        folder: str | Path,
        *,
        providers: Providers | None = ("cpu",),
        pooling: str | None = None,
        normalize: bool | None = None,
        max_tokens: int | None = None,
        truncate: bool = False,
    ) -> None:
        source = Path(folder)
        folder = prepared_encoder(source)
        self._batches = TokenBatches(folder, providers, max_tokens)
        modules = {module.kind for module in read_modules(folder)}
        self._dense, self._prompts = read_dense(folder), read_prompts(folder)
        self._normalize = "Normalize" in modules if normalize is None else normalize
        self._truncate = truncate
        ranks = self._batches.session.ranks
        self.prompts: Mapping[str, str] = self._prompts.texts
        stated = read_pooling(folder) if pooling is None else Pooling((pooling,))
        self._heads = _HEADS & ranks.keys()
        self._per_token = "MultiVectorMask" in modules
        self._skipped = {
            task: {self._batches.tokenizer.token_to_id(word) for word in words} - {None}
            for task, words in read_skipped(folder).items()
        }
        pools_itself = ranks.get(_SENTENCE) == 2
        kinds = {"sparse"} if self._heads & {TERM_WEIGHTS, TOKEN_WEIGHTS} else set()
        kinds |= {"multi"} if TOKEN_VECTORS in self._heads or self._per_token else set()
        if pools_itself or stated is not None or not kinds:
            _check_pooling(source, stated, pooling, pools_itself=pools_itself)
            kinds.add("dense")
        self.kinds: frozenset[str] = frozenset(kinds)
        self._pooling = None if pools_itself else stated
        self._output = _SENTENCE if pools_itself else _states(self._batches, ranks)

    def embed(
        self,
        texts: Sequence[Text],
        *,
        prompt: str | None = None,
        dimensions: int | None = None,
        truncate: bool | None = None,
    ) -> Vectors:
        """Return a vector of each text, float32 [texts, size].

        Args:
            texts: texts, or lists of token ids.
            prompt: the name of one of ``prompts``; None takes the folder's default, "" none.
            dimensions: how many of the first elements to keep (https://arxiv.org/abs/2205.13147); None keeps
                all.
            truncate: cut texts that are too long; None does as the constructor says.

        Raises:
            RequestError: ``texts`` is one text, a text has no token, there is no such prompt, or the vectors
                have fewer dimensions.
            PromptTooLongError: a text is too long.
            UnsupportedTaskError: the model has no dense vectors.
            ProviderRuntimeError: a vector is not finite.
        """
        self._require("dense")
        encoded, skipped = self._encoded(texts, prompt, truncate)
        rows: list[Floats] = self._batches.run(
            encoded, [self._output], lambda found, batch: list(self._pooled(found[0], batch, skipped))
        )
        size = len(rows[0]) if rows else 0
        vectors = stacked(rows, size, normalize=self._normalize)
        _check_finite(vectors)
        if dimensions is None or not rows:
            return vectors
        return cut_vectors(vectors, dimensions, self._normalize)

    def embed_sparse(
        self, texts: Sequence[Text], *, prompt: str | None = None, truncate: bool | None = None
    ) -> list[SparseVector]:
        """Return a weight of each token of the vocabulary that is not 0, for each text; see ``embed``."""
        self._require("sparse")
        encoded, _ = self._encoded(texts, prompt, truncate)
        if TERM_WEIGHTS in self._heads:
            return self._batches.run(
                encoded, [TERM_WEIGHTS], lambda found, batch: [_sparse(row) for row in found[0]]
            )
        special = self._special()

        def reduce(found: list[Floats], batch: TokenBatch) -> list[SparseVector]:
            return [
                _highest(text, row[:, 0], special)
                for text, row in zip(batch.texts, batch.rows(found[0]), strict=True)
            ]

        return self._batches.run(encoded, [TOKEN_WEIGHTS], reduce)

    def embed_tokens(
        self, texts: Sequence[Text], *, prompt: str | None = None, truncate: bool | None = None
    ) -> list[Floats]:
        """Return a vector of each token of each text, float32 [tokens, size]; see ``embed``.

        Of a model for late interaction (ColBERT, https://arxiv.org/abs/2004.12832) the vectors have length
        1, and the special token in front is left out where BGE-M3 leaves it out. Of another model they are
        its states. Tokens that a
        MultiVectorMask skips have none; with the prompt "query", those that it skips in queries.
        """
        encoded, _ = self._encoded(texts, prompt, truncate)
        if TOKEN_VECTORS in self._heads:
            first = int(self._pooling is not None)  # BGE-M3, which pools the first token besides
            return self._batches.run(
                encoded,
                [TOKEN_VECTORS],
                lambda found, batch: [scaled(row[first:]) for row in batch.rows(found[0])],
            )
        if self._output == _SENTENCE:
            raise RequestError("this model pools itself; it has no vectors of tokens")
        layers = self._dense if self._per_token else []
        scale = self._per_token and self._normalize

        skipped = self._skipped.get("query" if prompt == "query" else "document", set())

        def reduce(found: list[Floats], batch: TokenBatch) -> list[Floats]:
            rows = [_through(layers, row) for row in batch.rows(found[0])]
            rows = [scaled(row) for row in rows] if scale else rows
            if not skipped:
                return rows
            kept = [[number not in skipped for number in text.ids] for text in batch.texts]
            return [row[places] for row, places in zip(rows, kept, strict=True)]

        return self._batches.run(encoded, [self._output], reduce)

    def similarity(self, first: Vectors, second: Vectors) -> Vectors:
        """Return the similarity [n, m] of vectors [n, size] and [m, size], by the measure of the folder.

        It is cosine unless ``config_sentence_transformers.json`` names dot, euclidean or manhattan, whose
        distances are negated.
        """
        return similarities(first, second, self._prompts.similarity)

    def token_counts(self, texts: Sequence[Text]) -> list[int]:
        """Number of tokens of each text, special tokens included, after the cut at ``max_tokens``."""
        return self._batches.token_counts(texts)

    def _require(self, kind: str) -> None:
        if kind not in self.kinds:
            raise UnsupportedTaskError(
                f"this model has no {kind} vectors; it has {', '.join(sorted(self.kinds))}"
            )

    def _encoded(
        self, texts: Sequence[Text], prompt: str | None, truncate: bool | None
    ) -> tuple[list[Tokens], int]:
        """Return the tokens of texts behind their prompt, and how many tokens in front are not pooled."""
        words = self._prompt(prompt)
        if isinstance(texts, str):
            raise RequestError("texts is a list of texts, not a text")
        if words and not all(isinstance(text, str) for text in texts):
            raise RequestError("a prompt is put before texts, not before token ids")
        texts = [words + text if isinstance(text, str) else text for text in texts] if words else texts
        encoded = self._batches.encode(texts, truncate=self._truncate if truncate is None else truncate)
        if not words or self._pooling is None or self._pooling.prompt:
            return encoded, 0
        (alone,) = self._batches.encode([words], truncate=True)
        behind = next((n for n, special in enumerate(reversed(alone.special)) if not special), 0)
        return encoded, len(alone.ids) - behind

    def _prompt(self, name: str | None) -> str:
        name = self._prompts.default if name is None else name
        if not name:
            return ""
        if name not in self.prompts:
            known = ", ".join(self.prompts) or "none"
            raise RequestError(f"the encoder has no prompt {name!r}; it has {known}")
        return self.prompts[name]

    def _pooled(self, states: Floats, batch: TokenBatch, skipped: int) -> Floats:
        if self._pooling is not None:
            begins = batch.begins
            numbers = np.arange(begins[-1]) - np.repeat(begins[:-1], np.diff(begins)) + 1
            if skipped:
                kept = numbers > skipped
                states, begins = states[kept], np.concatenate([[0], np.cumsum(kept)])[begins]
                numbers = numbers[kept]
            states = np.concatenate(
                [POOLINGS[mode](states, begins, numbers) for mode in self._pooling.modes], axis=-1
            )
        return _through([] if self._per_token else self._dense, states)

    def _special(self) -> set[int]:
        added = self._batches.tokenizer.get_added_tokens_decoder()
        return {number for number, token in added.items() if token.special}


def _check_pooling(folder: Path, stated: Pooling | None, pooling: str | None, *, pools_itself: bool) -> None:
    modes = stated.modes if stated else ()
    if (pools_itself and pooling is None) or (modes and set(modes) <= POOLINGS.keys()):
        return
    raise UsageError(
        f"{folder} does not say how to pool; give pooling as {', '.join(POOLINGS)}, not {pooling!r}"
    )


def _states(batches: TokenBatches, ranks: Mapping[str, int]) -> str:
    """Return the output with the states of tokens."""
    states = [name for name, rank in ranks.items() if rank == 3 and name not in _HEADS]
    if len(states) != 1:
        raise UnsupportedModelError(
            f"{batches.path}: needs an output {_SENTENCE} [texts, size] or one output [texts, tokens, size], "
            f"not {', '.join(ranks)}"
        )
    return states[0]


def _through(layers: Sequence[Dense], x: Floats) -> Floats:
    """Apply Dense modules to the last axis."""
    for layer in layers:
        y = x @ layer.weight.T
        y = y if layer.bias is None else y + layer.bias
        y = _ACTIVATIONS[layer.activation](y)
        if layer.residual is not None:
            y = y + (x @ layer.residual.T if isinstance(layer.residual, np.ndarray) else x)
        x = np.asarray(y, np.float32)
    return x


def _gelu(x: Floats) -> Any:
    from math import erf

    return 0.5 * x * (1 + np.vectorize(erf, otypes=[np.float32])(x / np.sqrt(2)))


def _sigmoid(x: Floats) -> Any:
    return 0.5 + 0.5 * np.tanh(x / 2)


_ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "Identity": lambda x: x,
    "Tanh": np.tanh,
    "ReLU": lambda x: np.maximum(x, 0),
    "GELU": _gelu,
    "Sigmoid": _sigmoid,
    "SiLU": lambda x: x * _sigmoid(x),
}


def _sparse(row: Floats) -> SparseVector:
    indices = np.flatnonzero(row > 0)
    return SparseVector(indices.astype(np.int64), row[indices])


def _highest(text: Tokens, weights: Floats, special: set[int]) -> SparseVector:
    """Return the highest weight of each token of a text that is not special."""
    best: dict[int, float] = {}
    for token, weight in zip(text.ids, weights.tolist(), strict=False):
        if token not in special and weight > best.get(token, 0.0):
            best[token] = weight
    indices = sorted(best)
    return SparseVector(np.array(indices, np.int64), np.array([best[each] for each in indices], np.float32))


def _check_finite(vectors: Vectors) -> None:
    broken = np.flatnonzero(~np.isfinite(vectors).all(1))
    if len(broken):
        raise ProviderRuntimeError(
            f"the model returned NaN or infinity for text {broken[0]}; its weights are damaged, or too "
            f"large for "
            "their type"
        )

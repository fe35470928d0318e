"""Embeddings by an encoder: an ONNX model with a tokenizer, in the folder layout of sentence-transformers.

`modules.json` and the folders of modules: https://www.sbert.net ("Creating Custom Models").
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ...errors import UnsupportedModelError, UsageError
from ...exporter.encoders.modules import read_modules, read_pooling
from ..types.arguments import checked_arguments
from .embedding import Vectors, stacked
from .session import Providers
from .token_batches import Mask, TokenBatches

States = npt.NDArray[np.float32]  # [texts, tokens, hidden_size]

_SENTENCE = "sentence_embedding"


def _mean(states: States, mask: Mask) -> npt.NDArray[np.float32]:
    weights = mask[:, :, None].astype(np.float32)
    total: npt.NDArray[np.float32] = (states * weights).sum(1) / np.maximum(weights.sum(1), 1e-9)
    return total


def _max(states: States, mask: Mask) -> npt.NDArray[np.float32]:
    highest: npt.NDArray[np.float32] = np.where(mask[:, :, None] > 0, states, -np.inf).max(1)
    return highest


def _last(states: States, mask: Mask) -> npt.NDArray[np.float32]:
    last: npt.NDArray[np.float32] = states[np.arange(len(states)), mask.sum(1) - 1]
    return last


POOLINGS: dict[str, Callable[[States, Mask], npt.NDArray[np.float32]]] = {
    "cls": lambda states, mask: states[:, 0],
    "mean": _mean,
    "max": _max,
    "last": _last,
}


class TextEncoder:
    """Embeds texts. Thread-safe.

    Args:
        folder: a package of ``carryall export``, or a folder with ``model.onnx`` or ``onnx/model.onnx``, and
            ``tokenizer.json``; ``modules.json`` and ``sentence_bert_config.json`` of sentence-transformers
            say what is not given here.
        providers: as for ``InferenceSession``.
        pooling: cls, mean, max or last; None reads it from the folder. A model with an output
            ``sentence_embedding`` pools itself.
        normalize: scale vectors to length 1; None reads it from the folder.
        max_tokens: tokens after which a text is cut, special tokens included; None reads it from the folder.

    Raises:
        ModelNotFoundError: the folder has no model or no tokenizer.
        UnsupportedModelError: the model has inputs or modules that are not known, or no output to pool.
        PackageError: a file of the folder is damaged.
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
    ) -> None:
        folder = Path(folder)
        self._batches = TokenBatches(folder, providers, max_tokens)
        modules = read_modules(folder)
        self._output, rank = _output(self._batches)
        self._pool = None if rank == 2 else POOLINGS[_pooling(folder, pooling)]
        self._normalize = "Normalize" in modules if normalize is None else normalize

    def embed(self, texts: Sequence[str]) -> Vectors:
        """Vectors of texts, float32 [texts, hidden_size].

        Raises:
            RequestError: ``texts`` is one text, or a text has no token.
        """
        vectors = self._batches.run(texts, self._output, self._pool or (lambda states, mask: states))
        return stacked(vectors, len(vectors[0]) if vectors else 0, normalize=self._normalize)

    def token_counts(self, texts: Sequence[str]) -> list[int]:
        """Number of tokens of each text, special tokens included, after the cut at ``max_tokens``."""
        return self._batches.token_counts(texts)


def _pooling(folder: Path, given: str | None) -> str:
    given = read_pooling(folder) if given is None else given
    if given not in POOLINGS:
        raise UsageError(
            f"{folder} does not say how to pool; give pooling as {', '.join(POOLINGS)}, not {given!r}"
        )
    return given


def _output(batches: TokenBatches) -> tuple[str, int]:
    """The output to read, and its rank: vectors of texts, else hidden states of tokens."""
    ranks = {value.name: len(value.shape or ()) for value in batches.session.get_outputs()}
    if ranks.get(_SENTENCE) == 2:
        return _SENTENCE, 2
    states = [name for name, rank in ranks.items() if rank == 3]
    if len(states) != 1:
        raise UnsupportedModelError(
            f"{batches.path}: needs an output {_SENTENCE} [texts, size] or one output [texts, tokens, size], "
            f"not {', '.join(ranks)}"
        )
    return states[0], 3

"""Embeddings by a second session of the model without its output head.

Used if the engine's runner has no hidden states.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from ...errors import EngineClosedError, PromptTooLongError, RequestError, UsageError
from ...providers.base import Row, Runner
from ..engine.requests.pooled_states import Pooling
from ..process.at_exit import NATIVE

_CHUNK = 128


class Encoder:
    """Embed texts with a runner that returns hidden states; it is opened at first use. Thread-safe.

    Args:
        open_encoder: opens a runner that returns hidden states as its logits; None if there is none.
    """

    def __init__(self, open_encoder: Callable[[], Runner] | None) -> None:
        self._open_encoder = open_encoder
        self._encoder: Runner | None = None
        self._closed = False
        self._lock = threading.Lock()

    def embed(
        self, texts: Sequence[Sequence[int]], pooling: Pooling
    ) -> tuple[list[npt.NDArray[np.float64]], int]:
        """Embed texts, as many in a run as the runner has slots.

        Args:
            texts: token ids of each text.
            pooling: the hidden state of the last token, or the mean over all tokens.

        Returns:
            A float64 vector [hidden_size] per text, and hidden_size.

        Raises:
            RequestError: a text is empty or too long.
            UsageError: the model cannot return hidden states.
            ProviderRuntimeError: the run failed.
            EngineClosedError: ``close`` was called.
        """
        with NATIVE, self._lock:
            if self._closed:
                raise EngineClosedError("the model was closed")
            encoder = self._encoder = self._encoder or self._open()
            for text in texts:
                _check(text, encoder.info.context_length)
            step = encoder.info.max_slots
            vectors = [
                vector
                for start in range(0, len(texts), step)
                for vector in _run(encoder, texts[start : start + step], pooling)
            ]
        return vectors, encoder.info.vocab_size

    def _open(self) -> Runner:
        if self._open_encoder is None:
            raise UsageError("this model cannot return hidden states; embeddings need them")
        return self._open_encoder()

    def close(self) -> None:
        """Free the encoder."""
        with self._lock:
            self._closed = True
            if self._encoder is not None:
                self._encoder.close()
                self._encoder = None


def _check(text: Sequence[int], most: int) -> None:
    if not text:
        raise RequestError("a text to embed is empty; it needs at least one token")
    if len(text) > most:
        raise PromptTooLongError(f"the context holds {most} tokens of a text to embed", len(text), most)


def _run(encoder: Runner, texts: Sequence[Sequence[int]], pooling: Pooling) -> list[npt.NDArray[np.float64]]:
    """Return the pooled hidden states of a few texts, one slot each, computed in chunks."""
    tokens = [np.array(text, np.int64) for text in texts]
    pooled = [np.zeros(encoder.info.vocab_size) for _ in texts]
    try:
        for start in range(0, max(map(len, tokens)), _CHUNK):
            slots = [slot for slot, text in enumerate(tokens) if start < len(text)]
            rows = [_row(slot, tokens[slot], start, pooling) for slot in slots]
            for row, states in zip(rows, encoder.forward(rows), strict=True):
                pooled[row.slot] += states.sum(axis=0, dtype=np.float64)
    finally:
        for slot in range(len(texts)):
            encoder.release(slot)
    if pooling == "mean":
        return [total / len(text) for total, text in zip(pooled, tokens, strict=True)]
    return pooled


def _row(slot: int, text: npt.NDArray[np.int64], start: int, pooling: Pooling) -> Row:
    piece = text[start : start + _CHUNK]
    last = start + len(piece) == len(text)
    return Row(slot, piece, start, num_logits=len(piece) if pooling == "mean" else int(last))

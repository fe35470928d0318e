"""Requests to a text encoder: embeddings, and documents ranked by their similarity to a query."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ....errors import CarryallError, QueueFullError, RequestError, ServiceUnavailableError
from ...api.scoring import RERANK_INSTRUCTION
from .caller import check_tokens, spend
from .handler import STOPPING
from .messages import Embeddings

if TYPE_CHECKING:
    from ...api.embedding import Pooling
    from ...api.text_classifier import TextClassifier
    from ...api.text_encoder import TextEncoder
    from ...api.token_batches import Text

Vectors = npt.NDArray[np.float32]

_MOST_WAITING = 1024  # requests
_MOST_TEXTS = 256  # of one run


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A request in the queue."""

    texts: list[Any]
    result: asyncio.Future[tuple[Vectors, int]]


class EncoderHandler:
    """Serves requests with one encoder. Requests that arrive during a run share the next one.

    Use it in one event loop only.

    Args:
        name: the name of the model.
        encoder: the encoder. A classifier with one label ranks documents, but has no vectors.
    """

    def __init__(self, name: str, encoder: TextEncoder | TextClassifier) -> None:
        from ...api.text_classifier import TextClassifier  # imports onnxruntime

        self.name = name
        self._encoder = encoder
        self._classifies = isinstance(encoder, TextClassifier)
        self._run: Callable[[list[Any]], Vectors]
        self._run = encoder.scores if isinstance(encoder, TextClassifier) else encoder.embed
        self._waiting: list[_Waiting] = []
        self._running: asyncio.Task[None] | None = None
        self._refusal: str | None = None
        self.active = 0  # requests that wait or run

    async def embed(
        self, prompts: Sequence[str | list[int]], *, pooling: Pooling | None = None, normalize: bool = True
    ) -> Embeddings:
        """Return the vectors of texts.

        Args:
            prompts: the texts.
            pooling: must be None, because an encoder has its own pooling.
            normalize: whether to scale vectors to length 1.

        Raises:
            RequestError: a prompt is empty or not a text, or a pooling is given.
            QueueFullError: too many requests wait.
            ServiceUnavailableError: the service is shutting down.
            RateLimitError: the caller's tokens are used up.
        """
        if self._classifies:
            raise RequestError(f"the model '{self.name}' classifies texts; it has no embeddings")
        if pooling is not None:
            raise RequestError(f"the encoder '{self.name}' has its own pooling; omit 'pooling'")
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        if len(texts) < len(prompts):
            raise RequestError(f"the encoder '{self.name}' needs texts, not token ids")
        vectors, tokens = await self._vectors(texts)
        if normalize:
            vectors = vectors / np.maximum(
                np.linalg.norm(vectors, axis=1, keepdims=True), np.finfo(np.float32).tiny
            )
        return Embeddings(vectors, tokens)

    async def rerank(
        self, query: str, documents: Sequence[str], *, instruction: str = RERANK_INSTRUCTION
    ) -> list[float]:
        """Return the cosine similarity of each document to the query; of a classifier, its probability.

        Args:
            query: the query.
            documents: the documents.
            instruction: must be the default, because an encoder takes none.

        Raises:
            RequestError: an instruction is given, or a text is empty.
            CarryallError: see ``embed``.
        """
        if instruction != RERANK_INSTRUCTION:
            raise RequestError(f"the encoder '{self.name}' takes no 'instruction'; omit it")
        if self._classifies:
            scores, _ = await self._vectors([(query, document) for document in documents])
            if scores.shape[-1] != 1:
                raise RequestError(f"'{self.name}' has {scores.shape[-1]} labels; a model that ranks has one")
            ranks: list[float] = scores[:, 0].tolist()
            return ranks
        found = (await self.embed([query, *documents])).vectors
        similarities: list[float] = (found[1:] @ found[0]).tolist()
        return similarities

    async def drain(self, grace_seconds: float) -> bool:
        """Refuse new requests and wait for those in progress; return whether all ended in time."""
        self._refusal = STOPPING
        if self._running is not None:
            await asyncio.wait([self._running], timeout=grace_seconds)
        left = self.active
        for one in self._waiting:
            if not one.result.done():
                one.result.set_exception(ServiceUnavailableError(STOPPING))
        self._waiting.clear()
        return not left

    async def _vectors(self, texts: Sequence[Text]) -> tuple[Vectors, int]:
        check_tokens()
        if self._refusal is not None:
            raise ServiceUnavailableError(self._refusal)
        if self.active >= _MOST_WAITING:
            raise QueueFullError(f"{self.active} requests wait for the encoder '{self.name}'; retry later")
        one = _Waiting(list(texts), asyncio.get_running_loop().create_future())
        self._waiting.append(one)
        self.active += 1
        if self._running is None:
            self._running = asyncio.create_task(self._work())
        try:
            vectors, tokens = await one.result
        finally:
            self.active -= 1
        spend(tokens)
        return vectors, tokens

    async def _work(self) -> None:
        """Run the waiting requests together until none is left."""
        while batch := self._next():
            try:
                found = await asyncio.to_thread(self._encoded, [text for one in batch for text in one.texts])
            except CarryallError as error:
                if len(batch) > 1:  # each alone, so that only the one at fault fails
                    await asyncio.gather(*[self._alone(one) for one in batch])
                else:
                    _fail(batch[0], error)
                continue
            except BaseException as error:  # noqa: BLE001 -- each request must end
                for one in batch:
                    _fail(one, error)
                continue
            _deliver(batch, *found)
        self._running = None

    def _next(self) -> list[_Waiting]:
        """Take the oldest requests that fit one run, without those whose client left."""
        self._waiting = [one for one in self._waiting if not one.result.done()]
        size = taken = 0
        while taken < len(self._waiting):
            size += len(self._waiting[taken].texts)
            if taken and size > _MOST_TEXTS:
                break
            taken += 1
        batch, self._waiting = self._waiting[:taken], self._waiting[taken:]
        return batch

    async def _alone(self, one: _Waiting) -> None:
        try:
            _deliver([one], *await asyncio.to_thread(self._encoded, one.texts))
        except BaseException as error:  # noqa: BLE001 -- each request must end
            _fail(one, error)

    def _encoded(self, texts: list[Any]) -> tuple[Vectors, list[int]]:
        return self._run(texts), self._encoder.token_counts(texts)


def _deliver(batch: list[_Waiting], vectors: Vectors, counts: list[int]) -> None:
    start = 0
    for one in batch:
        end = start + len(one.texts)
        if not one.result.done():
            one.result.set_result((vectors[start:end], sum(counts[start:end])))
        start = end


def _fail(one: _Waiting, error: BaseException) -> None:
    if not one.result.done():
        one.result.set_exception(error)

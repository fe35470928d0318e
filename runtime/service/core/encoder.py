"""Requests to a text encoder: embeddings, and documents ranked by their similarity to a query."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ....errors import (
    CarryallError,
    QueueFullError,
    RequestError,
    ServiceUnavailableError,
    UnsupportedTaskError,
)
from ...api.scoring import RERANK_INSTRUCTION
from ...api.vectors import scaled
from .caller import check_tokens, spend
from .handler import STOPPING
from .messages import Embeddings

if TYPE_CHECKING:
    from ...api.embedding import Pooling
    from ...api.text_classifier import TextClassifier
    from ...api.text_encoder import SparseVector, TextEncoder
    from ...api.token_batches import Text
    from ...api.token_classifier import Aggregation, Entity, TokenClassifier

Vectors = npt.NDArray[np.float32]

_MOST_WAITING = 1024  # requests
_MOST_TEXTS = 256  # of one run


Task = Callable[[list[Any]], Sequence[Any]]  # texts to a result for each


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A request in the queue; those of one ``key`` have the same task, and may share a run."""

    key: Hashable
    task: Task
    texts: list[Any]
    result: asyncio.Future[tuple[Sequence[Any], int]]


class EncoderHandler:
    """Serves requests with one encoder. Requests of one kind that arrive during a run share the next one.

    Use it in one event loop only.

    Args:
        name: the name of the model.
        encoder: the encoder. A classifier has no vectors; one with one label ranks documents.
    """

    def __init__(self, name: str, encoder: TextEncoder | TextClassifier | TokenClassifier) -> None:
        self.name = name
        self._encoder = encoder
        self._waiting: list[_Waiting] = []
        self._running: asyncio.Task[None] | None = None
        self._refusal: str | None = None
        self.active = 0  # requests that wait or run

    async def embed(
        self,
        prompts: Sequence[str | list[int]],
        *,
        pooling: Pooling | None = None,
        normalize: bool = True,
        prompt: str | None = None,
        truncate: bool | None = None,
    ) -> Embeddings:
        """Return the vectors of texts.

        Args:
            prompts: texts, or lists of token ids.
            pooling: must be None, because an encoder has its own pooling.
            normalize: whether to scale vectors to length 1.
            prompt: see ``TextEncoder.embed``.
            truncate: see ``TextEncoder.embed``.

        Raises:
            RequestError: a prompt is empty, a pooling is given, or there is no such prompt.
            PromptTooLongError: a text is too long.
            UnsupportedTaskError: the model has no such vectors.
            QueueFullError: too many requests wait.
            ServiceUnavailableError: the service is shutting down.
            RateLimitError: the caller's tokens are used up.
        """
        encoder = self._vectors()
        if pooling is not None:
            raise RequestError(f"the encoder '{self.name}' has its own pooling; omit 'pooling'")
        vectors, tokens = await self._run(
            ("embed", prompt, truncate),
            lambda texts: list(encoder.embed(texts, prompt=prompt, truncate=truncate)),
            prompts,
        )
        array = np.array(vectors, np.float32)
        return Embeddings(scaled(array) if normalize else array, tokens)

    async def embed_sparse(
        self, texts: Sequence[str], *, prompt: str | None = None, truncate: bool | None = None
    ) -> list[SparseVector]:
        """Return the sparse vectors of texts; see ``embed``."""
        encoder = self._vectors()
        vectors, _ = await self._run(
            ("sparse", prompt, truncate),
            lambda texts: encoder.embed_sparse(texts, prompt=prompt, truncate=truncate),
            texts,
        )
        return list(vectors)

    async def embed_tokens(
        self, texts: Sequence[str], *, prompt: str | None = None, truncate: bool | None = None
    ) -> list[Vectors]:
        """Return the vectors of the tokens of texts; see ``embed``."""
        encoder = self._vectors()
        vectors, _ = await self._run(
            ("tokens", prompt, truncate),
            lambda texts: encoder.embed_tokens(texts, prompt=prompt, truncate=truncate),
            texts,
        )
        return list(vectors)

    async def similarity(
        self,
        source: str,
        texts: Sequence[str],
        *,
        prompt: str | None = None,
        truncate: bool | None = None,
    ) -> list[float]:
        """Return the similarity of each text to ``source``, by the measure of the encoder; see ``embed``."""
        encoder = self._vectors()
        vectors = (
            await self.embed([source, *texts], normalize=False, prompt=prompt, truncate=truncate)
        ).vectors
        similarities: list[float] = encoder.similarity(vectors[:1], vectors[1:])[0].tolist()
        return similarities

    async def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        instruction: str = RERANK_INSTRUCTION,
        truncate: bool | None = None,
        raw: bool = False,
    ) -> list[float]:
        """Return the cosine similarity of each document to the query; of a classifier, its probability.

        Args:
            query: the query.
            documents: the documents.
            instruction: must be the default, because an encoder takes none.
            truncate: see ``TextEncoder.embed``.
            raw: return the logits of a classifier instead.

        Raises:
            RequestError: an instruction is given, or a text is empty.
            CarryallError: see ``embed``.
        """
        from ...api.text_classifier import TextClassifier  # imports onnxruntime

        if instruction != RERANK_INSTRUCTION:
            raise RequestError(f"the encoder '{self.name}' takes no 'instruction'; omit it")
        if isinstance(self._encoder, TextClassifier):
            pairs = [(query, document) for document in documents]
            scores = await self.classify(pairs, truncate=truncate, raw=raw)
            if scores.shape[-1] != 1:
                raise RequestError(f"'{self.name}' has {scores.shape[-1]} labels; a model that ranks has one")
            ranks: list[float] = scores[:, 0].tolist()
            return ranks
        vectors = (await self.embed([query, *documents], truncate=truncate)).vectors
        similarities: list[float] = (vectors[1:] @ vectors[0]).tolist()
        return similarities

    @property
    def labels(self) -> list[str]:
        """The labels of a classifier, in the order of its scores.

        Raises:
            UnsupportedTaskError: the model is no classifier.
        """
        return self._classifier().labels

    async def classify(
        self, texts: Sequence[Text], *, truncate: bool | None = None, raw: bool = False
    ) -> Vectors:
        """Return the probability, or the logit, of each label of texts or pairs of texts, [texts, labels].

        Raises:
            UnsupportedTaskError: the model is no classifier.
            CarryallError: see ``embed``.
        """
        classifier = self._classifier()
        run = classifier.logits if raw else classifier.scores
        scores, _ = await self._run(
            ("classify", raw, truncate), lambda given: list(run(given, truncate=truncate)), texts
        )
        return np.array(scores, np.float32).reshape(len(scores), len(classifier.labels))

    async def zero_shot(
        self,
        texts: Sequence[str],
        labels: Sequence[str],
        *,
        hypothesis: str = "This example is {}.",
        independent: bool = False,
        truncate: bool | None = None,
    ) -> Vectors:
        """Return the probability [texts, labels] of labels that a request brings; see ``TextClassifier``.

        Raises:
            UnsupportedTaskError: the model is no classifier.
            CarryallError: see ``TextClassifier.zero_shot``.
        """
        classifier = self._classifier()

        def run(given: list[Any]) -> list[Any]:
            scores = classifier.zero_shot(
                given, labels, hypothesis=hypothesis, independent=independent, truncate=truncate
            )
            return list(scores)

        key = ("zero_shot", tuple(labels), hypothesis, independent, truncate)
        scores, _ = await self._run(key, run, texts)
        return np.array(scores, np.float32)

    async def entities(
        self, texts: Sequence[str], *, aggregation: Aggregation = "simple", truncate: bool | None = None
    ) -> list[list[Entity]]:
        """Return the parts of texts that a classifier of tokens finds; see ``TokenClassifier.entities``.

        Raises:
            UnsupportedTaskError: the model classifies no tokens.
            CarryallError: see ``embed``.
        """
        from ...api.token_classifier import TokenClassifier

        finder = self._encoder
        if not isinstance(finder, TokenClassifier):
            raise UnsupportedTaskError(f"the model '{self.name}' does not classify tokens")
        entities, _ = await self._run(
            ("entities", aggregation, truncate),
            lambda given: finder.entities(given, aggregation=aggregation, truncate=truncate),
            texts,
        )
        return list(entities)

    @property
    def finds_entities(self) -> bool:
        """Whether the model classifies tokens."""
        from ...api.token_classifier import TokenClassifier

        return isinstance(self._encoder, TokenClassifier)

    @property
    def embeds(self) -> bool:
        """Whether the model makes dense vectors of texts."""
        from ...api.text_encoder import TextEncoder

        return isinstance(self._encoder, TextEncoder) and "dense" in self._encoder.kinds

    def _classifier(self) -> TextClassifier:
        from ...api.text_classifier import TextClassifier

        if not isinstance(self._encoder, TextClassifier):
            raise UnsupportedTaskError(f"the model '{self.name}' does not classify texts")
        return self._encoder

    def _vectors(self) -> TextEncoder:
        from ...api.text_classifier import TextClassifier
        from ...api.token_classifier import TokenClassifier

        if isinstance(self._encoder, TextClassifier | TokenClassifier):
            raise UnsupportedTaskError(f"the model '{self.name}' classifies texts; it has no embeddings")
        return self._encoder

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

    async def _run(self, key: Hashable, task: Task, texts: Sequence[Any]) -> tuple[Sequence[Any], int]:
        """Return the results of a task and the number of tokens of the texts."""
        check_tokens()
        if self._refusal is not None:
            raise ServiceUnavailableError(self._refusal)
        if self.active >= _MOST_WAITING:
            raise QueueFullError(f"{self.active} requests wait for the encoder '{self.name}'; retry later")
        one = _Waiting(key, task, list(texts), asyncio.get_running_loop().create_future())
        self._waiting.append(one)
        self.active += 1
        if self._running is None:
            self._running = asyncio.create_task(self._work())
        try:
            results, tokens = await one.result
        finally:
            self.active -= 1
        spend(tokens)
        return results, tokens

    async def _work(self) -> None:
        """Run the waiting requests together until none is left."""
        while batch := self._next():
            try:
                texts = [text for one in batch for text in one.texts]
                found = await asyncio.to_thread(self._results, batch[0].task, texts)
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
        """Take the oldest request and those of its kind that fit one run, without those whose client left."""
        self._waiting = [one for one in self._waiting if not one.result.done()]
        batch: list[_Waiting] = []
        for one in self._waiting:
            size = sum(len(other.texts) for other in batch) + len(one.texts)
            if not batch or (one.key == batch[0].key and size <= _MOST_TEXTS):
                batch.append(one)
        self._waiting = [one for one in self._waiting if one not in batch]
        return batch

    async def _alone(self, one: _Waiting) -> None:
        try:
            _deliver([one], *await asyncio.to_thread(self._results, one.task, one.texts))
        except BaseException as error:  # noqa: BLE001 -- each request must end
            _fail(one, error)

    def _results(self, task: Task, texts: list[Any]) -> tuple[Sequence[Any], list[int]]:
        return task(texts), self._encoder.token_counts(texts)


def _deliver(batch: list[_Waiting], results: Sequence[Any], counts: list[int]) -> None:
    start = 0
    for one in batch:
        end = start + len(one.texts)
        if not one.result.done():
            one.result.set_result((results[start:end], sum(counts[start:end])))
        start = end


def _fail(one: _Waiting, error: BaseException) -> None:
    if not one.result.done():
        one.result.set_exception(error)

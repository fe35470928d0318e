"""Requests to a text encoder: embeddings, and documents ranked by their similarity to a query."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from ....errors import (
    CarryallError,
    QueueFullError,
    RequestError,
    ServiceUnavailableError,
    UnsupportedTaskError,
)
from ....records import dataclass
from ...api.scoring import RERANK_INSTRUCTION
from ...api.vectors import scaled
from .caller import check_tokens, spend
from .fetching import PictureFetcher
from .handler import STOPPING
from .messages import Embeddings

if TYPE_CHECKING:
    from ...api.embedding import Input, Pooling
    from ...api.text_classifier import TextClassifier
    from ...api.text_encoder import SparseVector, TextEncoder
    from ...api.text_session import Tokens
    from ...api.token_batches import Text
    from ...api.token_classifier import Aggregation, Entity, TokenClassifier

Vectors = npt.NDArray[np.float32]

MOST_WAITING = 1024  # requests
_MOST_TEXTS = 256  # of one run


Task = Callable[[list[Any]], tuple[Sequence[Any], Sequence[int]]]  # texts to a result and tokens of each


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
        fetcher: fetches pictures that a request gives by their address.
    """

    def __init__(
        self,
        name: str,
        encoder: TextEncoder | TextClassifier | TokenClassifier,
        fetcher: PictureFetcher | None = None,
    ) -> None:
        self.name = name
        self._fetcher = fetcher or PictureFetcher()
        self._encoder = encoder
        self._waiting: list[_Waiting] = []
        self._running: asyncio.Task[None] | None = None
        self._refusal: str | None = None
        self.active = 0  # requests that wait or run

    async def embed(
        self,
        prompts: Sequence[Input],
        *,
        pooling: Pooling | None = None,
        normalize: bool = True,
        prompt: str | None = None,
        truncate: bool | None = None,
        late_chunking: bool = False,
    ) -> Embeddings:
        """Return the vectors of texts and pictures.

        Args:
            prompts: texts, lists of token ids, or pictures; see ``TextEncoder.embed``.
            pooling: must be None, because an encoder has its own pooling.
            normalize: whether to scale vectors to length 1.
            prompt: see ``TextEncoder.embed``.
            truncate: see ``TextEncoder.embed``.
            late_chunking: see there; all texts are pieces of one document.

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
        if late_chunking:
            (array,), tokens = await self._run(
                ("pieces", prompt),
                lambda documents: encoder.embed_pieces(documents, prompt=prompt),
                [prompts],
            )
        else:
            task = self._embedding(encoder, encoder.embed, prompt, truncate)
            vectors, tokens = await self._run(("embed", prompt, truncate), task, prompts)
            array = np.array(vectors, np.float32)
        return Embeddings(scaled(array) if normalize else array, tokens)

    async def embed_sparse(
        self, texts: Sequence[str], *, prompt: str | None = None, truncate: bool | None = None
    ) -> list[SparseVector]:
        """Return the sparse vectors of texts; see ``embed``."""
        encoder = self._vectors()
        task = self._embedding(encoder, encoder.embed_sparse, prompt, truncate)
        vectors, _ = await self._run(("sparse", prompt, truncate), task, texts)
        return list(vectors)

    async def embed_kinds(
        self,
        texts: Sequence[Any],
        kinds: Sequence[str],
        *,
        prompt: str | None = None,
        truncate: bool | None = None,
    ) -> tuple[dict[str, list[Any]], int]:
        """Return vectors of several kinds from one pass, by kind, and the tokens of the texts.

        Raises:
            CarryallError: see ``embed`` and ``TextEncoder.embed_kinds``.
        """
        encoder, names = self._vectors(), tuple(kinds)

        def task(texts: list[Any]) -> tuple[Sequence[Any], Sequence[int]]:
            tokens = encoder.encode(texts, prompt=prompt, truncate=truncate)
            found = encoder.embed_kinds(tokens, names, prompt=prompt)
            return list(zip(*found.values(), strict=True)), [len(text.ids) for text in tokens]

        rows, tokens = await self._run(("kinds", names, prompt, truncate), task, texts)
        return {kind: [row[place] for row in rows] for place, kind in enumerate(names)}, tokens

    async def embed_tokens(
        self, texts: Sequence[str], *, prompt: str | None = None, truncate: bool | None = None
    ) -> list[Vectors]:
        """Return the vectors of the tokens of texts; see ``embed``."""
        encoder = self._vectors()
        task = self._embedding(encoder, encoder.embed_tokens, prompt, truncate)
        vectors, _ = await self._run(("tokens", prompt, truncate), task, texts)
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
        """Return the similarity of each document to the query; of a classifier, its probability.

        Args:
            query: the query.
            documents: the documents.
            instruction: must be the default, because an encoder takes none.
            truncate: see ``TextEncoder.embed``.
            raw: return the logits of a classifier instead.

        Raises:
            RequestError: an instruction is given, or the model does not rank.
            CarryallError: see ``TextEncoder.relevance`` and ``TextClassifier.relevance``.
        """
        from ...api.token_classifier import TokenClassifier  # imports onnxruntime

        if instruction != RERANK_INSTRUCTION:
            raise RequestError(f"the encoder '{self.name}' takes no 'instruction'; omit it")
        ranker = self._encoder
        if isinstance(ranker, TokenClassifier):
            raise UnsupportedTaskError(f"the model '{self.name}' classifies tokens; it does not rank")
        scores, _ = await self._run(
            ("relevance", truncate, raw),
            lambda pairs: ranker.relevance(pairs, truncate=truncate, raw=raw),
            [(query, document) for document in documents],
        )
        return list(scores)

    @property
    def labels(self) -> list[str]:
        """The labels of a classifier of texts or tokens, in the order of its scores.

        Raises:
            UnsupportedTaskError: the model is no classifier.
        """
        from ...api.token_classifier import TokenClassifier

        return (self._encoder if isinstance(self._encoder, TokenClassifier) else self._classifier()).labels

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

        def task(texts: list[Any]) -> tuple[Sequence[Any], Sequence[int]]:
            tokens = classifier.encode(texts, truncate=truncate)
            return list(run(tokens)), [len(text.ids) for text in tokens]

        scores, _ = await self._run(("classify", raw, truncate), task, texts)
        return np.array(scores, np.float32).reshape(len(scores), len(classifier.labels))

    async def zero_shot(
        self,
        texts: Sequence[Input],
        labels: Sequence[str],
        *,
        hypothesis: str | None = None,
        independent: bool = False,
        truncate: bool | None = None,
    ) -> Vectors:
        """Return the probability [texts, labels] of labels that a request brings; see ``TextClassifier``.

        ``texts`` are pictures for an encoder that sees them, see ``TextEncoder``. ``hypothesis`` is by
        default that of the method.

        Raises:
            UnsupportedTaskError: the model is no classifier.
            CarryallError: see ``TextClassifier.zero_shot`` and ``TextEncoder.zero_shot``.
        """
        sees = self.sees
        classifier: Any = self._encoder if sees else self._classifier()
        words = {} if hypothesis is None else {"hypothesis": hypothesis}

        def run(texts: list[Any]) -> tuple[Sequence[Any], Sequence[int]]:
            scores = classifier.zero_shot(texts, labels, independent=independent, truncate=truncate, **words)
            return list(scores), [0] * len(texts) if sees else classifier.token_counts(texts)

        key = ("zero_shot", tuple(labels), hypothesis, independent, truncate)
        scores, _ = await self._run(key, run, texts)
        return np.array(scores, np.float32)

    async def entities(
        self, texts: Sequence[str], *, aggregation: str = "simple", truncate: bool | None = None
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
        known = cast("Aggregation", aggregation)  # another name is refused there

        def run(texts: list[Any]) -> tuple[Sequence[Any], Sequence[int]]:
            entities = finder.entities(texts, aggregation=known, truncate=truncate)
            return entities, finder.token_counts(texts)

        entities, _ = await self._run(("entities", aggregation, truncate), run, texts)
        return list(entities)

    @property
    def max_tokens(self) -> int | None:
        """The tokens of the longest text, special tokens included; None for no limit."""
        return self._encoder.max_tokens

    @property
    def truncates(self) -> bool:
        """Whether longer texts are cut, unless a request says otherwise."""
        return self._encoder.truncates

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of vectors that the model makes, of dense, sparse and multi; of a classifier, none."""
        from ...api.text_encoder import TextEncoder

        return self._encoder.kinds if isinstance(self._encoder, TextEncoder) else frozenset()

    @property
    def sees(self) -> bool:
        """Whether the model embeds pictures too."""
        from ...api.text_encoder import TextEncoder

        return isinstance(self._encoder, TextEncoder) and self._encoder.sees

    @property
    def poolings(self) -> tuple[str, ...]:
        """The names of how states become a dense vector; empty where the graph does that itself."""
        from ...api.text_encoder import TextEncoder

        return self._encoder.poolings if isinstance(self._encoder, TextEncoder) else ()

    async def tokenize(
        self, texts: Sequence[str], *, add_special_tokens: bool = True, prompt: str | None = None
    ) -> list[Tokens]:
        """Return the tokens of texts of any length, behind a prompt of the model if one is named.

        Raises:
            RequestError: there is no such prompt.
        """
        words = self.prompt_text(prompt)
        run = self._encoder.tokenize
        return await asyncio.to_thread(
            run, [words + text for text in texts], add_special_tokens=add_special_tokens
        )

    def prompt_text(self, prompt: str | None) -> str:
        """Return the text of a prompt of the model; empty without a name.

        Raises:
            RequestError: there is no such prompt.
        """
        return self._vectors().prompt_text(prompt) if prompt else ""

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids.

        Raises:
            RequestError: a token id is out of range.
        """
        run = self._encoder.detokenize
        return await asyncio.to_thread(run, token_ids, skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """Return a token as the vocabulary writes it."""
        return self._encoder.token_text(token_id)

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

    @staticmethod
    def _embedding(
        encoder: TextEncoder, embed: Callable[..., Any], prompt: str | None, truncate: bool | None
    ) -> Task:
        """Return the task that tokenizes texts and computes vectors of one kind."""

        def task(texts: list[Any]) -> tuple[Sequence[Any], Sequence[int]]:
            tokens = encoder.encode(texts, prompt=prompt, truncate=truncate)
            return list(embed(tokens, prompt=prompt)), [len(text.ids) for text in tokens]

        return task

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
        if self.sees:
            texts = await self._fetcher.filled_inputs(texts)
        if self._refusal is not None:
            raise ServiceUnavailableError(self._refusal)
        if self.active >= MOST_WAITING:
            raise QueueFullError(f"{self.active} requests wait for the encoder '{self.name}'; retry later")
        waiting = _Waiting(key, task, list(texts), asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self.active += 1
        if self._running is None:
            self._running = asyncio.create_task(self._work())
        try:
            results, tokens = await waiting.result
        finally:
            self.active -= 1
        spend(tokens)
        return results, tokens

    async def _work(self) -> None:
        """Run the waiting requests together until none is left."""
        while batch := self._next():
            try:
                texts = [text for waiting in batch for text in waiting.texts]
                results = await asyncio.to_thread(batch[0].task, texts)
            except CarryallError as error:
                if len(batch) > 1:  # each alone, so that only the one at fault fails
                    await asyncio.gather(*[self._alone(waiting) for waiting in batch])
                else:
                    _fail(batch[0], error)
                continue
            except BaseException as error:  # noqa: BLE001 -- each request must end
                for waiting in batch:
                    _fail(waiting, error)
                continue
            _deliver(batch, *results)
        self._running = None

    def _next(self) -> list[_Waiting]:
        """Take the oldest request and those of its kind that fit one run, without those whose client left."""
        self._waiting = [waiting for waiting in self._waiting if not waiting.result.done()]
        batch: list[_Waiting] = []
        for waiting in self._waiting:
            size = sum(len(other.texts) for other in batch) + len(waiting.texts)
            if not batch or (waiting.key == batch[0].key and size <= _MOST_TEXTS):
                batch.append(waiting)
        self._waiting = [waiting for waiting in self._waiting if waiting not in batch]
        return batch

    async def _alone(self, waiting: _Waiting) -> None:
        try:
            _deliver([waiting], *await asyncio.to_thread(waiting.task, waiting.texts))
        except BaseException as error:  # noqa: BLE001 -- each request must end
            _fail(waiting, error)


def _deliver(batch: list[_Waiting], results: Sequence[Any], counts: Sequence[int]) -> None:
    start = 0
    for one in batch:
        end = start + len(one.texts)
        if not one.result.done():
            one.result.set_result((results[start:end], sum(counts[start:end])))
        start = end


def _fail(one: _Waiting, error: BaseException) -> None:
    if not one.result.done():
        one.result.set_exception(error)

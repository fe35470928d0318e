"""Answer lines with a text encoder: vectors, ranks and scores, a window of lines in one pass."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ....errors import CarryallError, RequestError, UnsupportedTaskError
from ...api.vectors import scaled
from ...service.core.messages import Embeddings
from ...service.http.openai import scoring
from ...service.http.openai.embeddings import KNOWN as EMBEDDINGS_FIELDS
from ...service.http.openai.embeddings import embeddings_response, read_embeddings
from ..inputs.lines import EMBEDDINGS, RERANK, SCORE, BatchLine
from ..jobs.journal import Answer
from .endpoints import known_fields_of
from .offline import completed, error_code, failed, windows

if TYPE_CHECKING:
    from ...api.text_classifier import TextClassifier
    from ...api.text_encoder import TextEncoder

Json = dict[str, Any]

_WINDOW_LINES = 512


class VectorWorker:
    """Answers lines with an encoder.

    Args:
        encoder: computes vectors, or scores of pairs.
        model: the model name in responses.
        worker: the worker name in the answers.
    """

    def __init__(self, encoder: TextEncoder | TextClassifier, model: str, worker: str) -> None:
        from ...api.text_classifier import TextClassifier  # imports onnxruntime

        self._encoder, self._model, self._worker = encoder, model, worker
        self._classifies = isinstance(encoder, TextClassifier)

    def facts(self) -> dict[str, Any]:
        """Return no facts."""
        return {}

    def close(self) -> None:
        """Do nothing: the session is freed with the worker."""

    def run(self, lines: Iterator[BatchLine | None], stop: threading.Event) -> Iterator[Answer]:
        """Yield one answer for each line; end early once ``stop`` is set."""
        for window in windows(lines, _WINDOW_LINES):
            if stop.is_set():
                return
            yield from self._answers(window)

    def _answers(self, lines: Sequence[BatchLine]) -> Iterator[Answer]:
        """Answer lines together; after an error each alone, so that only the one at fault fails."""
        groups: dict[Any, list[tuple[BatchLine, list[Any], Callable[..., Json]]]] = {}
        for line in lines:
            try:
                key, texts, write = self._asked(line)
            except CarryallError as error:
                yield failed(line, error_code(error), str(error), worker=self._worker)
            else:
                groups.setdefault(key, []).append((line, texts, write))
        for key, items in groups.items():
            try:
                yield from self._group(key, items)
            except CarryallError:
                for item in items:
                    try:
                        yield from self._group(key, [item])
                    except CarryallError as error:
                        yield failed(item[0], error_code(error), str(error), worker=self._worker)

    def _group(
        self, key: tuple[str, bool | None], items: Sequence[tuple[BatchLine, list[Any], Callable[..., Json]]]
    ) -> list[Answer]:
        prompt, truncate = key
        texts = [text for _, part, _ in items for text in part]
        encoder: Any = self._encoder
        if self._classifies:
            results = encoder.scores(texts, truncate=truncate)
        else:
            results = encoder.embed(texts, prompt=prompt, truncate=truncate)
        counts = self._encoder.token_counts(texts)
        answers, start = [], 0
        for line, part, write in items:
            end = start + len(part)
            tokens = sum(counts[start:end])
            body = write(results[start:end], tokens)
            answers.append(completed(line, body, "stop", (tokens, 0, 0), seconds=0.0, worker=self._worker))
            start = end
        return answers

    def _asked(self, line: BatchLine) -> tuple[Any, list[Any], Callable[..., Json]]:
        """Return what lines of one pass have in common, the texts, and what writes the body of the response.

        Raises:
            RequestError: the body is not valid.
            UnsupportedTaskError: the model does not do what the line asks for.
        """
        if line.url == EMBEDDINGS and not self._classifies:
            return self._embedding(line)
        if line.url == RERANK:
            ask = scoring.read_rerank(known_fields_of(line, scoring.RERANK))
            texts = self._pairs([(ask.query, text) for text in ask.documents])
            name = f"batch_req_{line.number}"
            return (
                (None, ask.truncate),
                texts,
                lambda found, tokens: scoring.rerank_response(ask, self._scores(found), self._model, name),
            )
        if line.url == SCORE:
            return self._score(line)
        what = "classifies texts" if self._classifies else "is an encoder"
        raise UnsupportedTaskError(f"the model '{self._model}' {what}; it cannot answer {line.url}")

    def _embedding(self, line: BatchLine) -> tuple[Any, list[Any], Callable[..., Json]]:
        ask = read_embeddings(known_fields_of(line, EMBEDDINGS_FIELDS))
        if ask.pooling is not None:
            raise RequestError(f"the encoder '{self._model}' has its own pooling; omit 'pooling'")

        def write(vectors: Any, tokens: int) -> Json:
            array = scaled(vectors) if ask.normalize else vectors
            return embeddings_response(ask, Embeddings(array, tokens), self._model)

        return (ask.prompt, ask.truncate), list(ask.inputs), write

    def _score(self, line: BatchLine) -> tuple[Any, list[Any], Callable[..., Json]]:
        ask = scoring.read_score(known_fields_of(line, scoring.SCORE))
        if isinstance(ask, scoring.ContinuationsAsk):
            raise UnsupportedTaskError(f"the model '{self._model}' generates no text; it scores pairs")
        texts: list[Any] = []
        for query, document in zip(ask.queries, ask.documents, strict=True):
            texts += self._pairs([(query, document)])
        count, name = len(ask.documents), f"batch_req_{line.number}"

        def write(found: Any, tokens: int) -> Json:
            step = len(found) // count
            scores = [self._scores(found[place * step : (place + 1) * step])[0] for place in range(count)]
            return scoring.pairs_response(scores, self._model, name)

        return (None, None), texts, write

    def _pairs(self, pairs: Sequence[tuple[str, str]]) -> list[Any]:
        """Return pairs for a classifier; for an encoder the query, then the documents."""
        if self._classifies:
            return list(pairs)
        return [pairs[0][0], *(document for _, document in pairs)]

    def _scores(self, found: Any) -> list[float]:
        """Return the probabilities of a classifier, or the cosine similarities to the first vector."""
        if self._classifies:
            if found.shape[1] != 1:
                raise RequestError(f"'{self._model}' has {found.shape[1]} labels; a model that ranks has one")
            probabilities: list[float] = found[:, 0].tolist()
            return probabilities
        vectors = scaled(found)
        similarities: list[float] = (vectors[1:] @ vectors[0]).tolist()
        return similarities

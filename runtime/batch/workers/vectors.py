"""Answer lines with a text encoder: vectors, ranks and scores, a window of lines in one pass."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ....errors import CarryallError, RequestError, UnsupportedTaskError
from ....records import dataclass
from ...api.vectors import scaled
from ...service.core.messages import Embeddings
from ...service.http.openai import scoring
from ...service.http.openai.embeddings import KNOWN as EMBEDDINGS_FIELDS
from ...service.http.openai.embeddings import embeddings_response, read_embeddings
from ..inputs.lines import EMBEDDINGS, RERANK, SCORE, BatchLine
from ..jobs.journal import LineResult
from .endpoints import known_fields_of
from .offline import completed, error_code, failed, windows

if TYPE_CHECKING:
    from ...api.text_classifier import TextClassifier
    from ...api.text_encoder import TextEncoder

Json = dict[str, Any]

# Texts of similar length run together, so that there is little padding: the larger the window that is sorted,
# the less. Answers come for a part of it at a time, so that an interrupted job repeats no more.
_FIRST_WINDOW, _WINDOW_LINES, _PART_LINES = 2048, 4096, 256


@dataclass(frozen=True, slots=True)
class _Key:
    """What lines of one pass have in common.

    They have pairs to score, one document in ``pieces`` each, or texts, and the same options of these.
    """

    pairs: bool = False
    pieces: bool = False
    prompt: str | None = None
    truncate: bool | None = None


@dataclass(frozen=True, slots=True)
class _Item:
    """A line, its texts or pairs, and what writes the body of its response from results and tokens."""

    line: BatchLine
    texts: list[Any]
    write: Callable[[Any, int], Json]

    @property
    def size(self) -> int:
        """The length of the longest text, in characters or tokens."""
        return max(
            (len(text) if isinstance(text, str) else sum(map(_size, text)) for text in self.texts), default=0
        )


def _size(part: Any) -> int:
    return len(part) if isinstance(part, str) else 1


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

    def run(self, lines: Iterator[BatchLine | None], stop: threading.Event) -> Iterator[LineResult]:
        """Yield one answer for each line; end early once ``stop`` is set."""
        for window in windows(lines, _WINDOW_LINES, _FIRST_WINDOW):
            if stop.is_set():
                return
            yield from self._answers(window, stop)

    def _answers(self, lines: Sequence[BatchLine], stop: threading.Event) -> Iterator[LineResult]:
        """Answer lines together; after an error each alone, so that only the one at fault fails."""
        groups: dict[_Key, list[_Item]] = {}
        for line in lines:
            try:
                key, texts, write = self._asked(line)
            except CarryallError as error:
                yield self._failed(line, error)
            else:
                groups.setdefault(key, []).append(_Item(line, texts, write))
        for key, waiting in groups.items():
            waiting.sort(key=lambda item: item.size)
            for start in range(0, len(waiting), _PART_LINES):
                if stop.is_set():
                    return
                yield from self._part(key, waiting[start : start + _PART_LINES])

    def _part(self, key: _Key, items: Sequence[_Item]) -> Iterator[LineResult]:
        """Answer lines of one pass; those at fault alone."""
        try:
            yield from self._group(key, items)
        except CarryallError:
            fit: list[_Item] = []
            for item in items:
                try:
                    self._check(key, item)
                except CarryallError as error:
                    yield self._failed(item.line, error)
                else:
                    fit.append(item)
            yield from self._group_or_each(key, fit)

    def _group_or_each(self, key: _Key, items: Sequence[_Item]) -> Iterator[LineResult]:
        """Answer lines whose texts are valid together; if the model fails on one, each alone."""
        try:
            yield from self._group(key, items)
        except CarryallError:
            for item in items:
                try:
                    yield from self._group(key, [item])
                except CarryallError as error:
                    yield self._failed(item.line, error)

    def _failed(self, line: BatchLine, error: CarryallError) -> LineResult:
        return failed(line, error_code(error), str(error), worker=self._worker)

    def _check(self, key: _Key, item: _Item) -> None:
        """Check the texts of a line, without running the model.

        Raises:
            CarryallError: one is not valid or too long.
        """
        if key.pairs:
            self._encoder.check_pairs(item.texts, truncate=key.truncate)
        elif not key.pieces:
            self._embedder().encode(item.texts, prompt=key.prompt, truncate=key.truncate)

    def _group(self, key: _Key, items: Sequence[_Item]) -> list[LineResult]:
        texts = [text for item in items for text in item.texts]
        results: Any
        if key.pairs:
            results, counts = self._encoder.relevance(texts, truncate=key.truncate)
        elif key.pieces:
            results, counts = self._embedder().embed_pieces(texts, prompt=key.prompt)
        else:
            encoder = self._embedder()
            tokens = encoder.encode(texts, prompt=key.prompt, truncate=key.truncate)
            results, counts = encoder.embed(tokens), [len(text.ids) for text in tokens]
        answers, start = [], 0
        for item in items:
            end = start + len(item.texts)
            total = sum(counts[start:end])
            body = item.write(results[start:end], total)
            answers.append(
                completed(item.line, body, "stop", (total, 0, 0), seconds=0.0, worker=self._worker)
            )
            start = end
        return answers

    def _embedder(self) -> TextEncoder:
        from ...api.text_encoder import TextEncoder

        if not isinstance(self._encoder, TextEncoder):
            raise UnsupportedTaskError(f"the model '{self._model}' classifies texts; it has no embeddings")
        return self._encoder

    def _asked(self, line: BatchLine) -> tuple[_Key, list[Any], Callable[[Any, int], Json]]:
        """Return what lines of one pass have in common, the texts, and what writes the body of the response.

        Raises:
            RequestError: the body is not valid.
            UnsupportedTaskError: the model does not do what the line asks for.
        """
        if line.url == EMBEDDINGS and not self._classifies:
            return self._embedding(line)
        name = f"batch_req_{line.number}"
        if line.url == RERANK:
            ask = scoring.read_rerank(known_fields_of(line, scoring.RERANK))
            pairs = [(ask.query, text) for text in ask.documents]
            key = _Key(pairs=True, truncate=ask.truncate)
            return key, pairs, lambda scores, _: scoring.rerank_response(ask, scores, self._model, name)
        if line.url == SCORE:
            asked = scoring.read_score(known_fields_of(line, scoring.SCORE))
            if isinstance(asked, scoring.ContinuationsAsk):
                raise UnsupportedTaskError(f"the model '{self._model}' generates no text; it scores pairs")
            pairs = list(zip(asked.queries, asked.documents, strict=True))
            return (
                _Key(pairs=True),
                pairs,
                lambda scores, _: scoring.pairs_response(scores, self._model, name),
            )
        what = "classifies texts" if self._classifies else "is an encoder"
        raise UnsupportedTaskError(f"the model '{self._model}' {what}; it cannot answer {line.url}")

    def _embedding(self, line: BatchLine) -> tuple[_Key, list[Any], Callable[[Any, int], Json]]:
        ask = read_embeddings(known_fields_of(line, EMBEDDINGS_FIELDS))
        if ask.pooling is not None:
            raise RequestError(f"the encoder '{self._model}' has its own pooling; omit 'pooling'")

        def write(vectors: Any, tokens: int) -> Json:
            array = vectors[0] if ask.late_chunking else vectors
            array = scaled(array) if ask.normalize else array
            return embeddings_response(ask, Embeddings(array, tokens), self._model)

        if ask.late_chunking:
            return _Key(pieces=True, prompt=ask.prompt), [ask.inputs], write
        return _Key(prompt=ask.prompt, truncate=ask.truncate), list(ask.inputs), write

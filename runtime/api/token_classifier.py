"""Classes of tokens by an encoder with such a head, such as the names in a text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from ...contract import LOGITS
from ...errors import ProviderRuntimeError, RequestError, UnsupportedModelError
from ...exporter.config import read_config
from ...exporter.encoders.export import label_names
from ...records import dataclass
from ..types.arguments import checked_arguments
from ..types.providers import Providers
from .encoder_model import EncoderModel
from .text_classifier import Scores
from .text_session import Floats, Tokens
from .token_batches import TokenBatch
from .vectors import probabilities

Aggregation = Literal["none", "simple", "first", "average", "max"]

_OUTSIDE = "O"


@dataclass(frozen=True, slots=True)
class Entity:
    """A part of a text, and its label.

    ``start`` and ``end`` are characters of the text, whose part ``text`` is; ``score`` is the label's
    probability.
    """

    label: str
    score: float
    start: int
    end: int
    text: str


class TokenClassifier(EncoderModel):
    """Finds names and other parts in texts. Thread-safe.

    Args:
        folder: a package of ``carryall export``; a checkpoint, which is prepared in the cache; or a folder
            with ``model.onnx``, ``config.json`` and ``tokenizer.json``.
            The model has the output ``logits`` [texts, tokens, labels].
        providers: as for ``InferenceSession``.
        max_tokens: tokens of the longest text, special tokens included; None reads it from the folder.
        truncate: cut longer texts, instead of refusing them, unless a call says otherwise.

    Attributes:
        labels: names of the labels, in the order of the scores.

    Raises:
        ModelNotFoundError: the folder has no model, configuration or tokenizer.
        UnsupportedModelError: the model has inputs that are not known, or no such output.
        CheckpointError: the configuration is damaged.
    """

    @checked_arguments
    def __init__(
        self,
        folder: str | Path,
        *,
        providers: Providers | None = ("cpu",),
        max_tokens: int | None = None,
        truncate: bool = False,
    ) -> None:
        super().__init__(folder, providers, max_tokens, truncate)
        ranks = self._batches.session.ranks
        if ranks.get(LOGITS) != 3:
            raise UnsupportedModelError(
                f"{self._batches.path}: a classifier of tokens has an output {LOGITS} [texts, tokens, "
                f"labels], "
                f"not {', '.join(ranks)}"
            )
        self.labels = label_names(read_config(self.folder))
        # As in transformers, only WordPiece ("##ing") tells the tokens inside words.
        self._marks_words = bool(getattr(self._batches.tokenizer.model, "continuing_subword_prefix", None))

    def scores(self, texts: Sequence[str], *, truncate: bool | None = None) -> list[Scores]:
        """Return the probability [tokens, labels] of each label, for each token of each text.

        Raises:
            RequestError: ``texts`` is one text.
            PromptTooLongError: a text is too long.
            ProviderRuntimeError: a score is NaN.
        """
        return [scores for _, scores in self._scored(texts, truncate)]

    def entities(
        self, texts: Sequence[str], *, aggregation: Aggregation = "simple", truncate: bool | None = None
    ) -> list[list[Entity]]:
        """Return the parts of each text that have another label than O, in their order.

        Args:
            texts: the texts.
            aggregation: ``none`` returns each token; ``simple`` joins tokens of the same label. ``first``,
                ``average`` and ``max`` label whole words first: by the first token, the mean of the scores,
                or the token with the highest score. B- and I- in front of a label begin and continue a part.
            truncate: cut texts that are too long; None does as the constructor says.

        Raises:
            RequestError: there is no such aggregation, or ``texts`` is one text.
            PromptTooLongError: a text is too long.
            ProviderRuntimeError: a score is NaN.
        """
        if aggregation not in get_args(Aggregation):
            raise RequestError(
                f"aggregation must be one of {', '.join(get_args(Aggregation))}, not {aggregation!r}"
            )
        scored = self._scored(texts, truncate)
        return [self._entities(text, *pair, aggregation) for text, pair in zip(texts, scored, strict=True)]

    def _scored(self, texts: Sequence[str], truncate: bool | None) -> list[tuple[Tokens, Scores]]:
        if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
            raise RequestError("texts is a list of texts")

        def reduce(found: list[Floats], batch: TokenBatch) -> list[tuple[Tokens, Scores]]:
            return [
                (text, probabilities(row[: len(text.ids)], independent=False))
                for text, row in zip(batch.texts, batch.rows(found[0]), strict=True)
            ]

        found = self._batches.run(self.encode(texts, truncate=truncate), [LOGITS], reduce)
        broken = [place for place, (_, scores) in enumerate(found) if np.isnan(scores).any()]
        if broken:
            raise ProviderRuntimeError(
                f"the model returned NaN for text {broken[0]}; its weights are damaged"
            )
        return found

    def _entities(self, text: str, tokens: Tokens, scores: Scores, aggregation: Aggregation) -> list[Entity]:
        parts = [
            (place, tokens.spans[place], scores[place])
            for place in range(len(tokens.ids))
            if not tokens.special[place]
        ]
        if aggregation == "none":
            entities = [self._entity(text, span, row) for _, span, row in parts]
            return [entity for entity in entities if entity.label != _OUTSIDE]
        pieces = [(span, row) for _, span, row in parts]
        if aggregation != "simple":
            words = tokens.words if self._marks_words else _by_spaces(text, tokens)
            pieces = _words(words, parts, aggregation)
        return self._joined(text, pieces)

    def _joined(self, text: str, pieces: Sequence[tuple[tuple[int, int], Floats]]) -> list[Entity]:
        """Join neighbours of one label; the score is the mean of theirs."""
        groups: list[list[Entity]] = []
        for span, row in pieces:
            piece = self._entity(text, span, row)
            begins, name = _tag(piece.label)
            if groups and not begins and _tag(groups[-1][-1].label)[1] == name:
                groups[-1].append(piece)
            else:
                groups.append([piece])
        entities = []
        for group in groups:
            name = _tag(group[0].label)[1]
            if name == _OUTSIDE:
                continue
            start, end = group[0].start, group[-1].end
            score = float(np.mean([piece.score for piece in group]))
            entities.append(Entity(name, score, start, end, text[start:end]))
        return entities

    def _entity(self, text: str, span: tuple[int, int], row: Floats) -> Entity:
        best = int(row.argmax())
        start, end = span
        return Entity(self.labels[best], float(row[best]), start, end, text[start:end])


def _tag(label: str) -> tuple[bool, str]:
    """Return whether a label begins a part, and its name without the prefix."""
    if label[:2] in ("B-", "I-"):
        return label[0] == "B", label[2:]
    return False, label


def _by_spaces(text: str, tokens: Tokens) -> list[int | None]:
    """Return the number of the word of each token, by spaces, where the tokenizer marks no words."""
    words: list[int | None] = []
    number = 0
    for start, _ in tokens.spans:
        number += start == 0 or " " in text[start - 1 : start + 1]
        words.append(number)
    return words


def _words(
    numbers: Sequence[int | None],
    parts: Sequence[tuple[int, tuple[int, int], Floats]],
    aggregation: Aggregation,
) -> list[tuple[tuple[int, int], Floats]]:
    """Return the span and the scores of each word."""
    words: list[list[tuple[tuple[int, int], Floats]]] = []
    last: int | None = None
    for place, span, row in parts:
        word = numbers[place]
        if words and word is not None and word == last:
            words[-1].append((span, row))
        else:
            words.append([(span, row)])
        last = word
    pieces = []
    for word_parts in words:
        rows = np.stack([row for _, row in word_parts])
        match aggregation:
            case "first":
                row = rows[0]
            case "max":
                row = rows[rows.max(1).argmax()]
            case _:
                row = rows.mean(0)
        pieces.append(((word_parts[0][0][0], word_parts[-1][0][1]), row))
    return pieces

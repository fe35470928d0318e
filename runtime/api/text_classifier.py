"""Classes of texts by an encoder with a classification head, and reranking by one with a single label."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ...contract import LOGITS
from ...errors import ProviderRuntimeError, RequestError, UnsupportedModelError
from ...exporter.config import read_config
from ...exporter.encoders.export import label_names
from ..types.arguments import checked_arguments
from ..types.providers import Providers
from .encoder_model import EncoderModel
from .text_session import Tokens
from .token_batches import Text
from .vectors import hypotheses, probabilities

Scores = npt.NDArray[np.float32]  # [texts, labels]


class TextClassifier(EncoderModel):
    """Classifies texts, or pairs of texts. Thread-safe.

    Args:
        folder: a package of ``carryall export``; a checkpoint, which is prepared in the cache; or a folder
            with ``model.onnx``, ``config.json`` and ``tokenizer.json``.
            The model has the output ``logits`` [texts, labels].
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
        if ranks.get(LOGITS) != 2:
            raise UnsupportedModelError(
                f"{self._batches.path}: a classifier has an output {LOGITS} [texts, labels], not "
                f"{', '.join(ranks)}"
            )
        config = read_config(self.folder)
        self.labels = label_names(config)
        several = config.get("problem_type") == "multi_label_classification"
        self._independent = several or len(self.labels) == 1

    def logits(self, texts: Sequence[Text], *, truncate: bool | None = None) -> Scores:
        """Return the logits [texts, labels].

        Args:
            texts: texts, pairs of texts, lists of token ids, or results of ``encode``.
            truncate: cut texts that are too long; None does as the constructor says.

        Raises:
            RequestError: ``texts`` is one text, or a text has no token.
            PromptTooLongError: a text is too long.
            ProviderRuntimeError: a logit is NaN.
        """
        encoded = self.encode(texts, truncate=truncate)
        rows = self._batches.run(encoded, [LOGITS], lambda found, batch: list(found[0]))
        logits = np.array(rows, np.float32).reshape(len(rows), len(self.labels))
        if len(broken := np.flatnonzero(np.isnan(logits).any(1))):
            raise ProviderRuntimeError(
                f"the model returned NaN for text {broken[0]}; its weights are damaged"
            )
        return logits

    def scores(self, texts: Sequence[Text], *, truncate: bool | None = None) -> Scores:
        """Return probabilities [texts, labels], which sum to 1 unless labels are independent of each other.

        Raises:
            CarryallError: see ``logits``.
        """
        return probabilities(self.logits(texts, truncate=truncate), independent=self._independent)

    def zero_shot(
        self,
        texts: Sequence[str],
        labels: Sequence[str],
        *,
        hypothesis: str = "This example is {}.",
        independent: bool = False,
        truncate: bool | None = None,
    ) -> Scores:
        """Return the probability [texts, labels] of labels that the model was not trained for.

        A model for natural language inference says whether a text entails the hypothesis of each label
        (https://arxiv.org/abs/1909.00161).

        Args:
            texts: the texts.
            labels: names of classes.
            hypothesis: a sentence with {} in place of the label.
            independent: compare the entailment of each label with its contradiction, instead of the labels
                with each other.
            truncate: see ``logits``.

        Raises:
            RequestError: there are no labels, the hypothesis has no {}, or the model has no label
                "entailment".
            CarryallError: see ``logits``.
        """
        sentences = hypotheses(hypothesis, labels)
        entails, contradicts = self._entailment()
        pairs = [(text, sentence) for text in texts for sentence in sentences]
        logits = self.logits(pairs, truncate=truncate).reshape(len(texts), len(labels), len(self.labels))
        if independent or len(labels) == 1:
            both = np.stack([logits[:, :, contradicts], logits[:, :, entails]], axis=-1)
            return probabilities(both, independent=False)[:, :, 1]
        return probabilities(logits[:, :, entails], independent=False)

    def _entailment(self) -> tuple[int, int]:
        """Return the places of the labels of entailment and of its opposite."""
        names = [label.lower() for label in self.labels]
        entails = next((place for place, name in enumerate(names) if name.startswith("entail")), None)
        if entails is None or len(names) < 2:
            raise RequestError(
                "zero-shot classification needs a model with a label 'entailment'; this one has "
                + ", ".join(self.labels[:5])
            )
        opposite = [place for place, name in enumerate(names) if name.startswith("contra")]
        return entails, opposite[0] if opposite else 0 if entails else len(names) - 1

    def rerank(self, query: str, documents: Sequence[str], *, truncate: bool | None = None) -> list[float]:
        """Return the probability that each document answers the query, by a model with one label.

        Raises:
            RequestError: the model has several labels.
            CarryallError: see ``logits``.
        """
        return self.relevance([(query, document) for document in documents], truncate=truncate)[0]

    def relevance(
        self, pairs: Sequence[tuple[str, str]], *, truncate: bool | None = None, raw: bool = False
    ) -> tuple[list[float], list[int]]:
        """Return the probability that the document of each pair answers its query, and the tokens of each.

        Args:
            pairs: queries and documents.
            truncate: see ``logits``.
            raw: return logits instead.

        Raises:
            RequestError: the model has several labels.
            CarryallError: see ``logits``.
        """
        tokens = self._encoded_pairs(pairs, truncate)
        scores: list[float] = (self.logits(tokens) if raw else self.scores(tokens))[:, 0].tolist()
        return scores, [len(text.ids) for text in tokens]

    def check_pairs(self, pairs: Sequence[tuple[str, str]], *, truncate: bool | None = None) -> None:
        """Check what ``relevance`` is given, without running the model.

        Raises:
            CarryallError: see ``relevance``.
        """
        self._encoded_pairs(pairs, truncate)

    def _encoded_pairs(self, pairs: Sequence[tuple[str, str]], truncate: bool | None) -> list[Tokens]:
        if len(self.labels) != 1:
            raise RequestError(
                f"a model that reranks has one label; this one has {len(self.labels)}: "
                + ", ".join(self.labels[:5])
            )
        return self.encode(pairs, truncate=truncate, name=lambda place: f"document {place} with its query")

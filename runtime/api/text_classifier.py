"""Classes of texts by an encoder with a classification head, and reranking by one with a single label."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ...contract import LOGITS
from ...errors import RequestError, UnsupportedModelError
from ...exporter.config import read_config
from ...exporter.encoders.export import label_names
from ..types.arguments import checked_arguments
from .session import Providers
from .token_batches import Text, TokenBatches

Scores = npt.NDArray[np.float32]  # [texts, labels]


class TextClassifier:
    """Classifies texts, or pairs of texts. Thread-safe.

    Args:
        folder: a package of ``carryall export``, or a folder with ``model.onnx``, ``config.json`` and
            ``tokenizer.json``. The model has the output ``logits`` [texts, labels].
        providers: as for ``InferenceSession``.
        max_tokens: tokens after which a text is cut, special tokens included; None reads it from the folder.

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
    ) -> None:
        folder = Path(folder)
        self._batches = TokenBatches(folder, providers, max_tokens)
        ranks = {value.name: len(value.shape or ()) for value in self._batches.session.get_outputs()}
        if ranks.get(LOGITS) != 2:
            raise UnsupportedModelError(
                f"{self._batches.path}: a classifier has an output {LOGITS} [texts, labels], not "
                f"{', '.join(ranks)}"
            )
        config = read_config(folder)
        self.labels = label_names(config)
        several = config.get("problem_type") == "multi_label_classification"
        self._independent = several or len(self.labels) == 1

    def logits(self, texts: Sequence[Text]) -> Scores:
        """Return the logits [texts, labels].

        Raises:
            RequestError: ``texts`` is one text, or a text has no token.
        """
        rows = self._batches.run(texts, LOGITS, lambda logits, mask: logits)
        return np.array(rows, np.float32).reshape(len(rows), len(self.labels))

    def scores(self, texts: Sequence[Text]) -> Scores:
        """Return probabilities [texts, labels], which sum to 1 unless labels are independent of each other.

        Raises:
            RequestError: see ``logits``.
        """
        logits = self.logits(texts).astype(np.float64)
        if self._independent:
            return np.asarray(0.5 + 0.5 * np.tanh(logits / 2), np.float32)
        powers = np.exp(logits - logits.max(-1, keepdims=True, initial=-np.inf))
        return np.asarray(powers / powers.sum(-1, keepdims=True), np.float32)

    def rerank(self, query: str, documents: Sequence[str]) -> list[float]:
        """Return the probability that each document answers the query, by a model with one label.

        Raises:
            RequestError: the model has several labels, or a text has no token.
        """
        if len(self.labels) != 1:
            raise RequestError(
                f"a model that reranks has one label; this one has {', '.join(self.labels[:5])}"
            )
        found: list[float] = self.scores([(query, document) for document in documents])[:, 0].tolist()
        return found

    def token_counts(self, texts: Sequence[Text]) -> list[int]:
        """Return the number of tokens of each text, special tokens included, after the cut."""
        return self._batches.token_counts(texts)

"""An ONNX model over batches of tokens, with its tokenizer: what text encoders and classifiers share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ...contract import ATTENTION_MASK, CONTEXT_LENGTH, INPUT_IDS, TOKEN_TYPE_IDS
from ...errors import ModelNotFoundError, RequestError, UnsupportedModelError
from ...exporter.encoders.modules import LENGTH_FILE
from ...storage.paths import check_name
from ..text.tokenizer import TOKENIZER_FILE, read_optional_json
from .session import InferenceSession, Providers

Text = str | tuple[str, str]  # a text, or a pair of texts
Mask = npt.NDArray[np.int64]  # [texts, tokens]
Reduce = Callable[[npt.NDArray[np.float32], Mask], npt.NDArray[np.float32]]

_MODEL_FILES = ("model.onnx", "onnx/model.onnx")
_INPUTS = (INPUT_IDS, ATTENTION_MASK, TOKEN_TYPE_IDS)
_BATCH = 32


class TokenBatches:
    """Runs a model on texts in batches of similar length. Thread-safe.

    Args:
        folder: with ``model.onnx`` or ``onnx/model.onnx``, and ``tokenizer.json``.
        providers: as for ``InferenceSession``.
        max_tokens: tokens after which a text is cut; None reads it from the folder, or from the graph.

    Raises:
        ModelNotFoundError: the folder has no model or no tokenizer.
        UnsupportedModelError: the model has inputs that are not known.
    """

    def __init__(self, folder: Path, providers: Providers | None, max_tokens: int | None) -> None:
        from tokenizers import Tokenizer

        check_name(folder)
        found = [folder / name for name in _MODEL_FILES if (folder / name).is_file()]
        if not found or not (folder / TOKENIZER_FILE).is_file():
            raise ModelNotFoundError(f"{folder} needs {' or '.join(_MODEL_FILES)}, and {TOKENIZER_FILE}")
        self.path = found[0]
        self.session = InferenceSession(self.path, providers=providers)
        self._inputs = self._read_inputs()
        self._tokenizer = Tokenizer.from_file(str(folder / TOKENIZER_FILE))
        self._tokenizer.no_padding()
        stated = self.session.get_modelmeta().custom_metadata_map.get(CONTEXT_LENGTH)
        most = max_tokens or read_optional_json(folder / LENGTH_FILE).get("max_seq_length") or stated
        if most is not None:
            self._tokenizer.enable_truncation(int(most))

    def run(self, texts: Sequence[Text], output: str, reduce: Reduce) -> list[npt.NDArray[np.float32]]:
        """Return a row per text.

        Args:
            texts: texts, or pairs of texts.
            output: the output to read, float [texts, ...].
            reduce: computes rows [texts, size] from the output of a batch and its mask.

        Raises:
            RequestError: ``texts`` is one text, or a text has no token.
        """
        if isinstance(texts, str):
            raise RequestError("texts is a list of texts, not a text")
        encoded = self._tokenizer.encode_batch(list(texts))
        if not all(each.ids for each in encoded):
            raise RequestError("a text to embed is empty; give it at least one token")
        rows: list[Any] = [None] * len(encoded)
        order = sorted(range(len(encoded)), key=lambda place: len(encoded[place].ids))  # little padding
        for start in range(0, len(order), _BATCH):
            places = order[start : start + _BATCH]
            values = _padded([encoded[place] for place in places])
            feed = {name: values[name].astype(kind) for name, kind in self._inputs.items()}
            (found,) = self.session.run([output], feed)
            batch = reduce(found.astype(np.float32, copy=False), values[ATTENTION_MASK])
            for place, row in zip(places, batch, strict=True):
                rows[place] = row
        return rows

    def token_counts(self, texts: Sequence[Text]) -> list[int]:
        """Return the number of tokens of each text, special tokens included, after the cut."""
        return [len(encoding.ids) for encoding in self._tokenizer.encode_batch(list(texts))]

    def _read_inputs(self) -> dict[str, str]:
        """Return the NumPy types of the inputs, by name."""
        names = {value.name: value.type for value in self.session.get_inputs()}
        if not names.keys() <= set(_INPUTS) or INPUT_IDS not in names:
            raise UnsupportedModelError(
                f"{self.path}: an encoder has some of the inputs {_INPUTS}, not {tuple(names)}"
            )
        return {name: "int32" if kind == "tensor(int32)" else "int64" for name, kind in names.items()}


def _padded(encoded: Sequence[Any]) -> dict[str, npt.NDArray[np.int64]]:
    """Return the inputs of a batch, padded on the right."""
    shape = len(encoded), max(len(each.ids) for each in encoded)
    ids, mask, types = (np.zeros(shape, np.int64) for _ in range(3))
    for row, text in enumerate(encoded):
        length = len(text.ids)
        ids[row, :length], mask[row, :length], types[row, :length] = text.ids, 1, text.type_ids
    return {INPUT_IDS: ids, ATTENTION_MASK: mask, TOKEN_TYPE_IDS: types}

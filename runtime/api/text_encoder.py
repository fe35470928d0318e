"""Embeddings by an encoder: an ONNX model with a tokenizer, in the folder layout of sentence-transformers.

`modules.json` and the folders of modules: https://www.sbert.net ("Creating Custom Models").
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import ModelNotFoundError, PackageError, RequestError, UnsupportedModelError, UsageError
from ...storage.paths import check_name
from ..text.tokenizer import TOKENIZER_FILE, read_optional_json
from ..types.arguments import checked_arguments
from .embedding import Vectors, stacked
from .session import InferenceSession, Providers

States = npt.NDArray[np.float32]  # [texts, tokens, hidden_size]
Mask = npt.NDArray[np.int64]  # [texts, tokens]

_MODEL_FILES = ("model.onnx", "onnx/model.onnx")
_INPUTS = ("input_ids", "attention_mask", "token_type_ids")
_SENTENCE = "sentence_embedding"
_BATCH = 32


def _mean(states: States, mask: Mask) -> npt.NDArray[np.float32]:
    weights = mask[:, :, None].astype(np.float32)
    total: npt.NDArray[np.float32] = (states * weights).sum(1) / np.maximum(weights.sum(1), 1e-9)
    return total


def _max(states: States, mask: Mask) -> npt.NDArray[np.float32]:
    highest: npt.NDArray[np.float32] = np.where(mask[:, :, None] > 0, states, -np.inf).max(1)
    return highest


def _last(states: States, mask: Mask) -> npt.NDArray[np.float32]:
    last: npt.NDArray[np.float32] = states[np.arange(len(states)), mask.sum(1) - 1]
    return last


POOLINGS: dict[str, Callable[[States, Mask], npt.NDArray[np.float32]]] = {
    "cls": lambda states, mask: states[:, 0],
    "mean": _mean,
    "max": _max,
    "last": _last,
}
# As the configuration of a Pooling module names them.
_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "last",
}


class TextEncoder:
    """Embeds texts. Thread-safe.

    Args:
        folder: with ``model.onnx`` or ``onnx/model.onnx``, and ``tokenizer.json``; sentence-transformers'
            ``modules.json`` and ``sentence_bert_config.json`` say what is not given here.
        providers: as for ``InferenceSession``.
        pooling: cls, mean, max or last; None reads it from the folder. A model with an output
            ``sentence_embedding`` pools itself.
        normalize: scale vectors to length 1; None reads it from the folder.
        max_tokens: tokens after which a text is cut, special tokens included; None reads it from the folder.

    Raises:
        ModelNotFoundError: the folder has no model or no tokenizer.
        UnsupportedModelError: the model has inputs or modules that are not known, or no output to pool.
        PackageError: a file of the folder is damaged.
        UsageError: the pooling is neither given nor in the folder, or there is none of that name.
    """

    @checked_arguments
    def __init__(
        self,
        folder: str | Path,
        *,
        providers: Providers | None = ("cpu",),
        pooling: str | None = None,
        normalize: bool | None = None,
        max_tokens: int | None = None,
    ) -> None:
        from tokenizers import Tokenizer

        folder = Path(folder)
        check_name(folder)
        found = [folder / name for name in _MODEL_FILES if (folder / name).is_file()]
        if not found or not (folder / TOKENIZER_FILE).is_file():
            raise ModelNotFoundError(f"{folder} needs {' or '.join(_MODEL_FILES)}, and {TOKENIZER_FILE}")
        modules = _modules(folder)
        self._session = InferenceSession(found[0], providers=providers)
        self._inputs = _inputs(self._session, found[0])
        self._output, rank = _output(self._session, found[0])
        self._pool = None if rank == 2 else POOLINGS[_pooling(folder, modules, pooling)]
        self._normalize = "Normalize" in modules if normalize is None else normalize
        self._tokenizer = Tokenizer.from_file(str(folder / TOKENIZER_FILE))
        self._tokenizer.no_padding()
        most = max_tokens or read_optional_json(folder / "sentence_bert_config.json").get("max_seq_length")
        if most is not None:
            self._tokenizer.enable_truncation(int(most))

    def embed(self, texts: Sequence[str]) -> Vectors:
        """Vectors of texts, float32 [texts, hidden_size].

        Raises:
            RequestError: ``texts`` is one text, or a text has no token.
        """
        if isinstance(texts, str):
            raise RequestError("texts is a list of texts, not a text")
        tokens = [encoding.ids for encoding in self._tokenizer.encode_batch(list(texts))]
        if not all(tokens):
            raise RequestError("a text to embed is empty; give it at least one token")
        vectors: list[Any] = [None] * len(tokens)
        order = sorted(range(len(tokens)), key=lambda place: len(tokens[place]))  # little padding
        for start in range(0, len(order), _BATCH):
            places = order[start : start + _BATCH]
            for place, vector in zip(places, self._run([tokens[place] for place in places]), strict=True):
                vectors[place] = vector
        return stacked(vectors, len(vectors[0]) if vectors else 0, normalize=self._normalize)

    def token_counts(self, texts: Sequence[str]) -> list[int]:
        """Number of tokens of each text, special tokens included, after the cut at ``max_tokens``."""
        return [len(encoding.ids) for encoding in self._tokenizer.encode_batch(list(texts))]

    def _run(self, tokens: Sequence[Sequence[int]]) -> npt.NDArray[np.float32]:
        """Pooled vectors of one batch."""
        ids = np.zeros((len(tokens), max(map(len, tokens))), np.int64)
        mask = np.zeros_like(ids)
        for row, text in enumerate(tokens):
            ids[row, : len(text)], mask[row, : len(text)] = text, 1
        values = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
        (states,) = self._session.run(
            [self._output], {name: values[name].astype(kind) for name, kind in self._inputs.items()}
        )
        states = states.astype(np.float32, copy=False)
        return states if self._pool is None else self._pool(states, mask)


def _modules(folder: Path) -> dict[str, str]:
    """Folders of modules by their kind; empty without `modules.json`."""
    path = folder / "modules.json"
    try:
        listed = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
        found = {str(one["type"]).rpartition(".")[2]: str(one.get("path", "")) for one in listed}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise PackageError(f"{path} is no list of modules, each with a type: {error!r}") from error
    unknown = found.keys() - {"Transformer", "Pooling", "Normalize"}
    if unknown:
        raise UnsupportedModelError(f"{folder}: modules {', '.join(sorted(unknown))} are not supported")
    return found


def _pooling(folder: Path, modules: dict[str, str], given: str | None) -> str:
    if given is None and "Pooling" in modules:
        config = read_optional_json(folder / modules["Pooling"] / "config.json")
        modes = [name for name, value in config.items() if name.startswith("pooling_mode") and value]
        if len(modes) != 1 or modes[0] not in _MODES:
            raise UnsupportedModelError(
                f"{folder}: pooling by {', '.join(modes) or 'nothing'} is not supported"
            )
        given = _MODES[modes[0]]
    if given not in POOLINGS:
        raise UsageError(
            f"{folder} does not say how to pool; give pooling as {', '.join(POOLINGS)}, not {given!r}"
        )
    return given


def _inputs(session: Any, path: Path) -> dict[str, str]:
    """NumPy types of the inputs, by name."""
    names = {value.name: value.type for value in session.get_inputs()}
    if not names.keys() <= set(_INPUTS) or "input_ids" not in names:
        raise UnsupportedModelError(
            f"{path}: an encoder has some of the inputs {_INPUTS}, not {tuple(names)}"
        )
    return {name: "int32" if kind == "tensor(int32)" else "int64" for name, kind in names.items()}


def _output(session: Any, path: Path) -> tuple[str, int]:
    """The output to read, and its rank: vectors of texts, else hidden states of tokens."""
    ranks = {value.name: len(value.shape or ()) for value in session.get_outputs()}
    if ranks.get(_SENTENCE) == 2:
        return _SENTENCE, 2
    states = [name for name, rank in ranks.items() if rank == 3]
    if len(states) != 1:
        raise UnsupportedModelError(
            f"{path}: needs an output {_SENTENCE} [texts, size] or one output [texts, tokens, size], "
            f"not {', '.join(ranks)}"
        )
    return states[0], 3

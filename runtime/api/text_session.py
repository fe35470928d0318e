"""Sessions of a text encoder: over texts one behind the other, or padded to the longest of a batch."""

from __future__ import annotations

import abc
import itertools
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ...contract import ATTENTION_MASK, INPUT_IDS, POSITION_IDS, TEXT_REDUCTIONS, TOKEN_TYPE_IDS
from ...graph_opt.lower.paged_kv import BEGINS, KEYS, TABLE, VALUES, text_rows
from ...providers import get_provider, has_argument
from ...providers.base import Provider, RunnerConfig
from ...records import dataclass
from ..models.text_graph import text_graph
from ..types.providers import Providers

if TYPE_CHECKING:
    from ..images.encoding import Picture

_log = logging.getLogger(__name__)

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

_MOST_TEXTS = 64  # of a padded run
MOST_TOKENS = 4096  # of a padded run, padding included
# Tokens of a run for each thread, so that states and products stay near: onnxruntime took 1.3 times as long
# for a token with 4,000 in a run as with 300.
_TOKENS_OF_THREAD = 256
# Threads that spin between short texts took half of all processor time.
QUIET = RunnerConfig(options={"spinning": False})


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of a text: their ids, their types, and whether each is special.

    ``spans`` are the characters [start, end) of each token in its text; empty for token ids that were given.
    ``unpooled`` tokens in front, those of a prompt, take no part in the vector of the text. ``pieces`` are
    the tokens [start, end) of each piece of a document; empty for a text that is one. A ``picture`` has no
    tokens.
    """

    ids: list[int]
    types: list[int]
    special: list[int]
    spans: list[tuple[int, int]]
    words: list[int | None]
    unpooled: int = 0
    pieces: tuple[tuple[int, int], ...] = ()
    picture: Picture | None = None


class TextSession(abc.ABC):
    """Computes the outputs of an encoder for batches of texts.

    Attributes:
        ranks: the rank of each output, by name; those of 3 and more are of tokens, the others of texts.
        inputs: the NumPy type of each input of the portable graph, by name.
        metadata: of the graph.
        padded: why texts are padded; None if they are not.
    """

    def __init__(self, session: Any, inputs: Mapping[str, str], padded: str | None) -> None:
        self._session = session
        self.ranks = {value.name: len(value.shape or ()) for value in session.get_outputs()}
        self.inputs, self.padded = inputs, padded
        self.metadata: Mapping[str, str] = session.get_modelmeta().custom_metadata_map

    @abc.abstractmethod
    def batches(self, lengths: Sequence[int]) -> list[list[int]]:
        """Return the places of texts of each run."""

    @abc.abstractmethod
    def run(self, outputs: Sequence[str], texts: Sequence[Tokens]) -> list[Floats]:
        """Return outputs of one run: [tokens, ...], the texts one behind the other, or [texts, ...]."""


def open_texts(model: Path, providers: Providers | None, context_length: int | None) -> TextSession:
    """Open the ONNX file of an encoder, without padding if the provider and its kernels can do so.

    Args:
        model: the file.
        providers: as for ``InferenceSession``; options of a provider are onnxruntime's, so they need padding.
        context_length: tokens of the longest text; None if only the graph says so.

    Raises:
        CarryallError: see ``InferenceSession``.
    """
    provider = own_provider(providers)
    if provider is None:
        return _padded(model, "the providers are given as for onnxruntime", providers)
    graph = text_graph(model, provider, context_length)
    if isinstance(graph, Path):
        return JoinedTexts(provider.session(graph, QUIET))
    # onnxruntime runs the graphs of others as fast as it does without carryall.
    return _padded(model, graph.reason, providers, provider.session(model, QUIET) if graph.foreign else None)


def _padded(model: Path, reason: str, providers: Providers | None, session: Any = None) -> PaddedTexts:
    _log.info("%s runs on padded texts: %s", model, reason)
    return PaddedTexts(model, providers, reason, session)


def own_provider(providers: Providers | None) -> Provider | None:
    """Return carryall's provider that is named; None if providers are given as for onnxruntime."""
    names = [each for each in providers or () if isinstance(each, str)]
    alone = len(names) == 1 and len(providers or ()) == 1
    if not alone or has_argument(names[0]) or "ExecutionProvider" in names[0]:
        return None
    return get_provider(names[0])


class JoinedTexts(TextSession):
    """A graph of ``TextRowsPass``, which reads texts one behind the other."""

    def __init__(self, session: Any) -> None:
        shapes = {value.name: value.shape for value in session.get_inputs()}
        names = [INPUT_IDS, ATTENTION_MASK, *([TOKEN_TYPE_IDS] if TOKEN_TYPE_IDS in shapes else [])]
        super().__init__(session, dict.fromkeys(names, "int64"), None)
        self._tokens = _TOKENS_OF_THREAD * max(1, session.get_session_options().intra_op_num_threads)
        self._caches = {name: shape[1:] for name, shape in shapes.items() if name.startswith((KEYS, VALUES))}
        self._block = next(iter(self._caches.values()))[1]
        self._names = frozenset(shapes)
        stated = json.loads(self.metadata.get(TEXT_REDUCTIONS, "{}"))
        self._reduced = {name: np.maximum if kind == "max" else np.add for name, kind in stated.items()}
        self.ranks |= dict.fromkeys(self._reduced, 2)

    def batches(self, lengths: Sequence[int]) -> list[list[int]]:
        """Return the places of texts of each run, in order, as many as there is room for."""
        batches: list[list[int]] = []
        left = 0
        for place, length in enumerate(lengths):
            if length > left:
                batches.append([])
                left = max(self._tokens, length)
            batches[-1].append(place)
            left -= length
        return batches

    def run(self, outputs: Sequence[str], texts: Sequence[Tokens]) -> list[Floats]:
        """Run texts one behind the other; each has blocks of its own in the caches of keys and values."""
        lengths = [len(text.ids) for text in texts]
        total, rows = sum(lengths), text_rows(lengths, self._block)
        begins = rows[BEGINS]
        feed: dict[str, npt.NDArray[Any]] = {
            INPUT_IDS: _row([text.ids for text in texts], total),
            POSITION_IDS: (np.arange(total) - np.repeat(begins[:-1], lengths))[None],
            **rows,
        }
        if TOKEN_TYPE_IDS in self._names:
            feed[TOKEN_TYPE_IDS] = _row([text.types for text in texts], total)
        count = int(rows[TABLE].max()) + 1
        feed |= {name: np.empty((count, *shape), np.uint8) for name, shape in self._caches.items()}
        feed = {name: array for name, array in feed.items() if name in self._names}
        arrays = self._session.run(list(outputs), feed)
        results = []
        for name, array in zip(outputs, arrays, strict=True):
            if name in self._reduced:
                results.append(self._reduced[name].reduceat(array[0], begins[:-1], axis=0))
            else:
                results.append(array[0] if self.ranks[name] > 2 else array)
        return results


def _row(numbers: Sequence[Sequence[int]], total: int) -> Ids:
    """Return the numbers of texts one behind the other, [1, total]."""
    return np.fromiter(itertools.chain.from_iterable(numbers), np.int64, total)[None]


class PaddedTexts(TextSession):
    """A graph over [texts, tokens], padded on the right."""

    def __init__(self, model: Path, providers: Providers | None, reason: str, session: Any = None) -> None:
        super().__init__(*self._opened(model, providers, session), reason)

    @staticmethod
    def _opened(model: Path, providers: Providers | None, session: Any) -> tuple[Any, Mapping[str, str]]:
        """Return the session, by default an optimized one, and the type of each input."""
        if session is None:
            import onnxruntime

            from .session import InferenceSession  # imports the library of graphs

            options = onnxruntime.SessionOptions()
            options.add_session_config_entry("session.intra_op.allow_spinning", "0")
            session = InferenceSession(model, sess_options=options, providers=providers)
        inputs = {
            value.name: "int32" if value.type == "tensor(int32)" else "int64"
            for value in session.get_inputs()
        }
        return session, inputs

    def batches(self, lengths: Sequence[int]) -> list[list[int]]:
        """Return the places of texts in runs of similar length, so that there is little padding."""
        batches: list[list[int]] = []
        for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
            last = batches[-1] if batches else []
            fits = len(last) < _MOST_TEXTS and last and (len(last) + 1) * lengths[last[0]] <= MOST_TOKENS
            if fits:
                last.append(place)
            else:
                batches.append([place])
        return batches

    def run(self, outputs: Sequence[str], texts: Sequence[Tokens]) -> list[Floats]:
        """Run texts padded to the longest, and leave the padding out of what is returned."""
        shape = len(texts), max(len(text.ids) for text in texts)
        ids, mask, types = (np.zeros(shape, np.int64) for _ in range(3))
        for row, text in enumerate(texts):
            length = len(text.ids)
            ids[row, :length], mask[row, :length], types[row, :length] = text.ids, 1, text.types
        values = {INPUT_IDS: ids, ATTENTION_MASK: mask, TOKEN_TYPE_IDS: types}
        feed = {name: values[name].astype(kind) for name, kind in self.inputs.items()}
        arrays = [array.astype(np.float32, copy=False) for array in self._session.run(list(outputs), feed)]
        real = mask.astype(bool)
        return [
            array[real] if self.ranks[name] > 2 else array
            for name, array in zip(outputs, arrays, strict=True)
        ]

"""An ONNX model over batches of tokens, with its tokenizer: what text encoders and classifiers share."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ...contract import ATTENTION_MASK, CONTEXT_LENGTH, INPUT_IDS, PAST, TOKEN_TYPE_IDS
from ...errors import (
    ModelNotFoundError,
    PackageError,
    PromptTooLongError,
    ProviderRuntimeError,
    RequestError,
    UnsupportedModelError,
)
from ...exporter.encoders.modules import LENGTH_FILE
from ...exporter.encoders.text_form import TextForm, read_text_form
from ...options import shown
from ...providers.ort.ort import one_line, runtime_errors
from ...records import dataclass
from ..text.tokenizer import TOKENIZER_FILE, read_optional_json
from ..types.providers import Providers
from .load_encoder import MODEL_FILES
from .text_session import Floats, Tokens, open_texts

_INPUTS = (INPUT_IDS, ATTENTION_MASK, TOKEN_TYPE_IDS)
_OF_DECODERS = (
    "the vectors of decoders are those of carryall.LLM.embed and of /v1/embeddings of carryall serve"
)
_MOST_POSITIONS = 2**20

T = TypeVar("T")


# A text, a pair of texts, token ids, their tokens, or an object with a text or a picture.
Text = str | tuple[str, str] | list[int] | Tokens | Mapping[str, Any]


def _piece(place: int) -> str:
    return f"piece {place}"


def numbered(place: int) -> str:
    """Return what errors call the text at a place."""
    return f"text {place}"


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """The texts of one run, in their order.

    ``begins`` int64 [texts + 1] says where the tokens of each lie in outputs of tokens, and where the last
    ends.
    """

    texts: Sequence[Tokens]
    begins: npt.NDArray[np.int64]

    def rows(self, array: Floats) -> list[Floats]:
        """Return the part of each text of an output [tokens, ...]."""
        return [array[begin:end] for begin, end in itertools.pairwise(self.begins.tolist())]


class TokenBatches:
    """Runs a model on texts in batches of similar length. Thread-safe.

    Args:
        folder: with ``tokenizer.json``.
        file: the ONNX file; None if the folder has none.
        providers: as for ``InferenceSession``.
        max_tokens: the longest text, special tokens included; None reads it from the folder, or from the
            graph.

    Attributes:
        max_tokens: the longest text; None for no limit.
        form: how an encoder of texts and pictures reads texts; None for others.

    Raises:
        ModelNotFoundError: the folder has no model or no tokenizer.
        UnsupportedModelError: the model has inputs that are not known.
        PackageError: the folder states a length that is no positive integer.
    """

    def __init__(
        self, folder: Path, file: Path | None, providers: Providers | None, max_tokens: int | None
    ) -> None:
        from tokenizers import Tokenizer

        if file is None or not (folder / TOKENIZER_FILE).is_file():
            raise ModelNotFoundError(
                f"{folder if file is None else file} is not a package, a checkpoint or a folder of an "
                f"encoder, which needs {' or '.join(MODEL_FILES)}, and {TOKENIZER_FILE}; {_OF_DECODERS}"
            )
        self.path = file
        stated = max_tokens or stated_length(folder)
        self.session = open_texts(self.path, providers, stated)
        self._check_inputs()
        self.form = read_text_form(self.session.metadata)
        lower = read_optional_json(folder / LENGTH_FILE).get("do_lower_case", False)
        self._lower = bool(lower) or (self.form is not None and self.form.lower)
        self.tokenizer = Tokenizer.from_file(str(folder / TOKENIZER_FILE))
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        self._cutter: Any = None  # cuts texts; made when a text is cut
        most = stated or self.session.metadata.get(CONTEXT_LENGTH)
        self.max_tokens = _length_of_tokenizer(folder) if most is None else int(most)
        rows = read_optional_json(folder / "config.json").get("vocab_size")
        highest = max(self.tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
        # Of a model with fewer embeddings than its tokenizer has tokens, as it may be that of another model.
        self._embeddings = rows if type(rows) is int and highest >= rows else None

    def encode(
        self, texts: Sequence[Text], *, truncate: bool, name: Callable[[int], str] = numbered
    ) -> list[Tokens]:
        """Return the tokens of texts, of pairs of texts, or of token ids, which are taken as they are.

        Args:
            texts: the texts.
            truncate: cut texts that are longer than ``max_tokens``, instead of refusing them.
            name: what errors call the text at a place.

        Raises:
            RequestError: ``texts`` is one text, a text has no token or is not valid Unicode, or a token id is
                out of range.
            PromptTooLongError: a text is too long, and ``truncate`` is False.
        """
        _check_texts(texts, name)
        if self._lower:
            texts = [_lower(text) for text in texts]
        written = [text for text in texts if isinstance(text, str | tuple)]
        encodings = iter(self.tokenizer.encode_batch(written) if written else ())
        encoded = [
            self._given(text) if isinstance(text, list | Tokens) else _tokens(next(encodings))
            for text in texts
        ]
        if self._embeddings is not None:
            _check_embeddings(encoded, self._embeddings, name)
        most = self.max_tokens
        for place, (text, tokens) in enumerate(zip(texts, encoded, strict=True)):
            if not tokens.ids:
                raise RequestError(f"{name(place)} to embed is empty; give it at least one token")
            if most is not None and len(tokens.ids) > most:
                if not truncate:
                    raise PromptTooLongError(
                        f"{name(place)} has {len(tokens.ids)} tokens; the model takes {most}; shorten it, "
                        "or cut it with truncate",
                        len(tokens.ids),
                        most,
                    )
                encoded[place] = self._cut(text, most)
        if self.form is not None:
            encoded = [_formed(tokens, self.form, name(place)) for place, tokens in enumerate(encoded)]
        return encoded

    def join(self, pieces: Sequence[Text], prompt: str, *, pooled: bool) -> Tokens:
        """Return the tokens of a document, whose pieces are tokenized apart.

        Args:
            pieces: the pieces, which make the document in their order.
            prompt: a text in front of it.
            pooled: whether the tokens of the prompt belong to the first piece.

        Raises:
            RequestError: there is no piece, or one has no token or is not valid Unicode.
            PromptTooLongError: the document is too long.
        """
        from tokenizers import Encoding

        _check_texts(pieces, _piece)
        if not pieces or not all(isinstance(piece, str) for piece in pieces):
            raise RequestError("a document is a list of at least one piece, each a text")
        parts = [*([prompt] if prompt else []), *map(str, pieces)]
        texts = [part.lower() for part in parts] if self._lower else parts
        encodings = self.tokenizer.encode_batch(texts, add_special_tokens=False)
        lengths = [len(encoding.ids) for encoding in encodings]
        for place, length in enumerate(lengths[len(parts) - len(pieces) :]):
            if not length:
                raise RequestError(f"{_piece(place)} has no token; leave it out")
        tokens = _tokens(self.tokenizer.post_process(Encoding.merge(encodings)))
        if self.max_tokens is not None and len(tokens.ids) > self.max_tokens:
            raise PromptTooLongError(
                f"the document has {len(tokens.ids)} tokens; the model takes {self.max_tokens}; late "
                "chunking reads it whole, so embed it in sections of several pieces",
                len(tokens.ids),
                self.max_tokens,
            )
        front = next(place for place, special in enumerate(tokens.special) if not special)
        ends = [front + end for end in itertools.accumulate(lengths)]
        starts = [front, *ends[:-1]]
        ends[-1] = len(tokens.ids)
        if prompt:
            first, starts, ends = ends[0], starts[1:], ends[1:]
        starts[0] = first if prompt and not pooled else 0
        return replace(tokens, pieces=tuple(zip(starts, ends, strict=True)))

    def tokenize(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[Tokens]:
        """Return the tokens of texts of any length.

        Raises:
            RequestError: ``texts`` is one text, or a text is not valid Unicode.
        """
        _check_texts(texts, numbered)
        lower = [text.lower() for text in texts] if self._lower else list(texts)
        encodings = self.tokenizer.encode_batch(lower, add_special_tokens=add_special_tokens)
        return [_tokens(encoding) for encoding in encodings]

    def run(
        self,
        encoded: Sequence[Tokens],
        outputs: Sequence[str],
        reduce: Callable[[list[Floats], TokenBatch], Sequence[T]],
    ) -> list[T]:
        """Return a result per text.

        Args:
            encoded: the texts.
            outputs: the outputs to read.
            reduce: computes a result for each text of a batch from the outputs: [tokens, ...], the texts one
                behind the other, or [texts, ...].

        Raises:
            ProviderRuntimeError: the model fails, such as on texts beyond its table of positions.
        """
        lengths = [len(tokens.ids) for tokens in encoded]
        results: list[Any] = [None] * len(encoded)
        for places in self.session.batches(lengths):
            texts = [encoded[place] for place in places]
            begins = np.concatenate([[0], np.cumsum([lengths[place] for place in places])])
            reduced = reduce(self._computed(outputs, texts), TokenBatch(texts, begins))
            for place, result in zip(places, reduced, strict=True):
                results[place] = result
        return results

    def check_ids(self, ids: Sequence[int]) -> None:
        """Check that token ids are in the vocabulary.

        Raises:
            RequestError: one is not.
        """
        size = self.tokenizer.get_vocab_size()
        wrong = [each for each in ids if type(each) is not int or not 0 <= each < size]
        if wrong:
            raise RequestError(f"token id {wrong[0]!r} is out of range; the vocabulary has {size} tokens")

    def _computed(self, outputs: Sequence[str], texts: Sequence[Tokens]) -> list[Floats]:
        try:
            return self.session.run(outputs, texts)
        except runtime_errors() as error:
            longest = max(len(text.ids) for text in texts)
            raise ProviderRuntimeError(
                f"{self.path} fails on texts of up to {longest} tokens; if its table of positions is "
                f"shorter than the {self.max_tokens} tokens that are stated ({LENGTH_FILE} or max_tokens), "
                f"state fewer: {one_line(error)}"
            ) from error

    def _given(self, ids: list[int] | Tokens) -> Tokens:
        if isinstance(ids, Tokens):
            return ids
        self.check_ids(ids)
        return Tokens(ids, [0] * len(ids), [0] * len(ids), [], [])

    def _cut(self, text: Text, most: int) -> Tokens:
        if isinstance(text, Tokens):
            return self._given(text.ids[:most])
        if isinstance(text, list):
            return self._given(text[:most])
        if self._cutter is None:
            cutter = type(self.tokenizer).from_str(self.tokenizer.to_str())
            cutter.enable_truncation(most)
            self._cutter = cutter
        return _tokens(self._cutter.encode(*text) if isinstance(text, tuple) else self._cutter.encode(text))

    def _check_inputs(self) -> None:
        names = self.session.inputs
        if any(name.startswith(PAST) for name in names):
            raise UnsupportedModelError(f"{self.path} is a decoder; {_OF_DECODERS}")
        if not names.keys() <= set(_INPUTS) or INPUT_IDS not in names:
            raise UnsupportedModelError(
                f"{self.path}: an encoder has some of the inputs {_INPUTS}, not {tuple(names)}"
            )


def stated_length(folder: Path) -> int | None:
    """Return the tokens of the longest text that the files of sentence-transformers state.

    Raises:
        PackageError: they state no such number.
    """
    stated = read_optional_json(folder / LENGTH_FILE).get("max_seq_length")
    if stated is not None and (type(stated) is not int or stated < 1):
        raise PackageError(
            f"{folder / LENGTH_FILE}: max_seq_length must be an integer of at least 1, not {shown(stated)}; "
            "remove it, or write the tokens of the longest text"
        )
    return stated


def _length_of_tokenizer(folder: Path) -> int | None:
    """Return the longest text by the files of an export that has no other word on it; None for no limit.

    A tokenizer without a limit states a huge number. Of positions that are counted from the padding, the
    model has some more than tokens; such tokenizers state theirs.
    """
    stated = [
        read_optional_json(folder / name).get(key)
        for name, key in (
            ("tokenizer_config.json", "model_max_length"),
            ("config.json", "max_position_embeddings"),
        )
    ]
    return next((value for value in stated if type(value) is int and 0 < value <= _MOST_POSITIONS), None)


def _formed(tokens: Tokens, form: TextForm, name: str) -> Tokens:
    """Return the tokens of a text up to its end token, or padded to the length of all texts.

    Raises:
        RequestError: token ids that were given have no end token.
    """
    if form.end_id is not None:
        if form.end_id not in tokens.ids:
            raise RequestError(f"{name} has no token {form.end_id}, which ends texts of this model; add it")
        end = tokens.ids.index(form.end_id) + 1
        return _joined(Tokens([], [], [], [], []), tokens, end)
    missing = 0 if form.length is None else form.length - len(tokens.ids)
    if missing <= 0:
        return tokens
    padding = Tokens(
        [form.padding_id] * missing, [0] * missing, [1] * missing, [(0, 0)] * missing, [None] * missing
    )
    return _joined(padding, tokens) if form.pads_left else _joined(tokens, padding)


def _joined(first: Tokens, second: Tokens, end: int | None = None) -> Tokens:
    """Return the tokens of a text, then those of another one in front of ``end``."""
    return Tokens(
        first.ids + second.ids[:end],
        first.types + second.types[:end],
        first.special + second.special[:end],
        first.spans + second.spans[:end],
        first.words + second.words[:end],
    )


def _check_embeddings(encoded: Sequence[Tokens], rows: int, name: Callable[[int], str]) -> None:
    """Check that a model has an embedding of each token.

    Raises:
        PackageError: it has none of a token.
    """
    for place, tokens in enumerate(encoded):
        if tokens.ids and max(tokens.ids) >= rows:
            raise PackageError(
                f"{name(place)} has the token {max(tokens.ids)}, but the model has embeddings of {rows} "
                "tokens: tokenizer.json is that of another model"
            )


def _check_texts(texts: Sequence[Any], name: Callable[[int], str]) -> None:
    """Check that texts are those that a tokenizer takes.

    Raises:
        RequestError: one is not.
    """
    if isinstance(texts, str):
        raise RequestError("texts is a list of texts, not a text")
    for place, text in enumerate(texts):
        parts = text if isinstance(text, tuple) else (text,) if isinstance(text, str) else ()
        valid = isinstance(text, str | list | Tokens) or (isinstance(text, tuple) and len(text) == 2)
        if not valid or not all(isinstance(part, str) for part in parts):
            raise RequestError(
                f"{name(place)} must be a text, a pair of texts or a list of token ids, not {shown(text)}"
            )
        for part in parts:
            try:
                part.encode()
            except UnicodeEncodeError as error:
                raise RequestError(
                    f"{name(place)} is not valid Unicode, it has a lone surrogate: {error.reason}"
                ) from error


def _lower(text: Text) -> Text:
    if isinstance(text, tuple):
        return text[0].lower(), text[1].lower()
    return text.lower() if isinstance(text, str) else text


def _tokens(encoding: Any) -> Tokens:
    return Tokens(
        encoding.ids, encoding.type_ids, encoding.special_tokens_mask, encoding.offsets, encoding.word_ids
    )

"""Vectors of texts by an encoder: an ONNX model with a tokenizer, in the folders of sentence-transformers.

`modules.json` and the folders of modules: https://www.sbert.net ("Creating Custom Models").
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ...contract import TERM_WEIGHTS, TOKEN_VECTORS, TOKEN_WEIGHTS
from ...errors import (
    ProviderRuntimeError,
    RequestError,
    UnsupportedModelError,
    UnsupportedTaskError,
    UsageError,
)
from ...exporter.encoders.modules import (
    Dense,
    Pooling,
    read_dense,
    read_modules,
    read_pooling,
    read_prompts,
    read_skipped,
)
from ...exporter.package import VISION_FILE
from ...options import shown
from ...records import dataclass
from ..types.arguments import checked_arguments
from ..types.providers import Providers
from .encoder_model import EncoderModel
from .text_session import QUIET, Floats, Tokens, own_provider
from .token_batches import Text, TokenBatch, TokenBatches, numbered
from .vectors import Vectors, cut_vectors, hypotheses, probabilities, scaled, similarities, stacked

if TYPE_CHECKING:
    from ..images.encoding import ImageEncoder, Picture

_SENTENCE = "sentence_embedding"
_HEADS = {TERM_WEIGHTS, TOKEN_WEIGHTS, TOKEN_VECTORS}

Ids = npt.NDArray[np.int64]
# Of states [tokens, size], where each text begins in them and the last ends [texts + 1], and the number of
# each token in its text, from 1 on.
Pool = Callable[[Floats, Ids, Ids], Floats]


def _by_text(reduce: np.ufunc, states: Floats, begins: Ids, empty: float = 0.0) -> Floats:
    """Reduce the states of each text; a text without tokens gets ``empty``."""
    filled = np.diff(begins) > 0
    if filled.all():
        return np.asarray(reduce.reduceat(states, begins[:-1], axis=0), np.float32)
    result = np.full((len(filled), *states.shape[1:]), empty, np.float32)
    if filled.any():
        result[filled] = reduce.reduceat(states, begins[:-1][filled], axis=0)
    return result


def _counts(begins: Ids) -> Floats:
    return np.maximum(np.diff(begins), 1)[:, None].astype(np.float32)


def _mean(states: Floats, begins: Ids, _: Ids) -> Floats:
    return np.asarray(_by_text(np.add, states, begins) / _counts(begins), np.float32)


def _mean_sqrt_len(states: Floats, begins: Ids, _: Ids) -> Floats:
    return np.asarray(_by_text(np.add, states, begins) / np.sqrt(_counts(begins)), np.float32)


def _weighted_mean(states: Floats, begins: Ids, numbers: Ids) -> Floats:
    weights = numbers[:, None].astype(np.float32)
    totals = np.maximum(_by_text(np.add, weights, begins), 1e-9)
    return np.asarray(_by_text(np.add, states * weights, begins) / totals, np.float32)


def _max(states: Floats, begins: Ids, _: Ids) -> Floats:
    return _by_text(np.maximum, states, begins, -np.inf)


def _first(states: Floats, begins: Ids, _: Ids) -> Floats:
    return _at(states, begins, begins[:-1])


def _last(states: Floats, begins: Ids, _: Ids) -> Floats:
    return _at(states, begins, begins[1:] - 1)


def _at(states: Floats, begins: Ids, places: Ids) -> Floats:
    """Return a state of each text, zeros of a text without tokens."""
    result = np.zeros((len(places), states.shape[1]), np.float32)
    kept = np.diff(begins) > 0
    result[kept] = states[places[kept]]
    return result


POOLINGS: dict[str, Pool] = {
    "cls": _first,
    "mean": _mean,
    "max": _max,
    "last": _last,
    "mean_sqrt_len": _mean_sqrt_len,
    "weightedmean": _weighted_mean,
}


@dataclass(frozen=True, slots=True)
class SparseVector:
    """A vector of the size of the vocabulary: its positive elements, by ascending token id.

    ``indices`` is int64 [n], ``values`` float32 [n].
    """

    indices: npt.NDArray[np.int64]
    values: Floats


class TextEncoder(EncoderModel):
    """Embeds texts. Thread-safe.

    Args:
        folder: a package of ``carryall export``; a checkpoint, which is prepared in the cache; or a folder
            with an ONNX file, or such a file, and ``tokenizer.json``; see ``model_file``. ``modules.json``
            and the other files of sentence-transformers say what is not given here.
        providers: as for ``InferenceSession``.
        pooling: a name of ``POOLINGS``; None reads it from the folder. A model with an output
            ``sentence_embedding`` pools itself.
        normalize: scale vectors to length 1; None reads it from the folder.
        max_tokens: tokens of the longest text, special tokens included; None reads it from the folder.
        truncate: cut longer texts, instead of refusing them, unless a call says otherwise.

    Attributes:
        prompts: texts that ``embed`` puts before a text, by name.
        sees: whether it embeds pictures too.
        kinds: the kinds of vectors that it computes, of dense, sparse and multi.

    Raises:
        ModelNotFoundError: the folder has no model or no tokenizer.
        UnsupportedModelError: the model has inputs or modules that are not known, or no output to pool.
        PackageError: a file of the folder is damaged.
        CheckpointError: a module of the folder is damaged.
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
        truncate: bool = False,
    ) -> None:
        source = Path(folder)
        super().__init__(source, providers, max_tokens, truncate)
        folder = self.folder
        modules = {module.kind for module in read_modules(folder)}
        self._dense, self._prompts = read_dense(folder), read_prompts(folder)
        self._normalize = "Normalize" in modules if normalize is None else normalize
        ranks = self._batches.session.ranks
        self.prompts: Mapping[str, str] = self._prompts.texts
        form = self._batches.form
        stated = read_pooling(folder) if pooling is None else Pooling((pooling,))
        if stated is None and form is not None:
            stated = Pooling(("last",))
        self.sees = form is not None and (folder / VISION_FILE).is_file()
        self._providers, self._lock = providers, threading.Lock()
        self._opened: ImageEncoder | None = None
        self._heads = _HEADS & ranks.keys()
        self._per_token = "MultiVectorMask" in modules
        self._skipped = {
            task: {self._batches.tokenizer.token_to_id(word) for word in words} - {None}
            for task, words in read_skipped(folder).items()
        }
        pools_itself = ranks.get(_SENTENCE) == 2
        kinds = {"sparse"} if self._heads & {TERM_WEIGHTS, TOKEN_WEIGHTS} else set()
        kinds |= {"multi"} if TOKEN_VECTORS in self._heads or self._per_token else set()
        if pools_itself or stated is not None or not kinds:
            _check_pooling(source, stated, pooling, pools_itself=pools_itself)
            kinds.add("dense")
        self.kinds: frozenset[str] = frozenset(kinds)
        self._pooling = None if pools_itself else stated
        self._output = _SENTENCE if pools_itself else _states(self._batches, ranks)

    def embed(
        self,
        texts: Sequence[Text],
        *,
        prompt: str | None = None,
        dimensions: int | None = None,
        truncate: bool | None = None,
        late_chunking: bool = False,
    ) -> Vectors:
        """Return a vector of each text or picture, float32 [texts, size].

        Args:
            texts: texts, lists of token ids, and for a model that sees pictures, ``{"image": ...}`` with a
                path, bytes, ``data:...``, a Pillow image or an array uint8 [height, width, 3]; with a page
                of a PDF file and ``"page": 3`` too.
            prompt: the name of one of ``prompts``; None takes the folder's default, "" none.
            dimensions: how many of the first elements to keep (https://arxiv.org/abs/2205.13147); None keeps
                all.
            truncate: cut texts that are too long; None does as the constructor says.
            late_chunking: read the texts as pieces of one document; see ``embed_pieces``. Such a document is
                never cut.

        Raises:
            RequestError: ``texts`` is one text, a text has no token, there is no such prompt, the vectors
                have fewer dimensions, or a picture cannot be opened or is given to a model that reads text
                only.
            PromptTooLongError: a text is too long.
            UnsupportedTaskError: the model has no dense vectors.
            ProviderRuntimeError: a vector is not finite.
        """
        if late_chunking:
            ((vectors,), _) = self.embed_pieces([texts], prompt=prompt)
        else:
            vectors = self._vectors(self.encode(texts, prompt=prompt, truncate=truncate))
        if dimensions is None or not len(vectors):
            return vectors
        return cut_vectors(vectors, dimensions, self._normalize)

    def encode(
        self,
        texts: Sequence[Text],
        *,
        prompt: str | None = None,
        truncate: bool | None = None,
        name: Callable[[int], str] = numbered,
    ) -> list[Tokens]:
        """Return the tokens of texts behind their prompt; see ``EncoderModel.encode`` and ``embed``."""
        words = self.prompt_text(prompt)
        if isinstance(texts, str):
            raise RequestError("texts is a list of texts, not a text")
        if any(isinstance(text, Mapping) or _picture(text) is not None for text in texts):
            return self._encode_mixed(texts, prompt, truncate, name)
        if not words or not texts or all(isinstance(text, Tokens) for text in texts):
            return super().encode(texts, truncate=truncate, name=name)
        if not all(isinstance(text, str) for text in texts):
            raise RequestError("a prompt is put before texts, not before token ids")
        encoded = super().encode([words + str(text) for text in texts], truncate=truncate, name=name)
        if self._pooling is None or self._pooling.prompt:
            return encoded
        (alone,) = super().encode([words], truncate=True)
        behind = next((n for n, special in enumerate(reversed(alone.special)) if not special), 0)
        return [replace(text, unpooled=len(alone.ids) - behind) for text in encoded]

    def _encode_mixed(
        self, texts: Sequence[Text], prompt: str | None, truncate: bool | None, name: Callable[[int], str]
    ) -> list[Tokens]:
        """Return the tokens of texts, and pictures without tokens."""
        from .sight import is_picture  # the libraries of chats, which texts alone do not need

        encoded: dict[int, Tokens] = {}
        plain: dict[int, Text] = {}
        for place, text in enumerate(texts):
            if isinstance(text, Tokens) and text.picture is not None:
                encoded[place] = text
            elif not isinstance(text, Mapping):
                plain[place] = text
            elif "image" in text or is_picture(text):
                encoded[place] = self._seen({"type": "image", **text}, name(place))
            elif isinstance(text.get("text"), str):
                plain[place] = text["text"]
            else:
                raise RequestError(f"{name(place)} must have a 'text' or an 'image', not {shown(text)}")
        places = list(plain)
        if plain:
            found = self.encode(
                list(plain.values()),
                prompt=prompt,
                truncate=truncate,
                name=lambda number: name(places[number]),
            )
            encoded |= zip(places, found, strict=True)
        return [encoded[place] for place in range(len(texts))]

    def _seen(self, part: Mapping[str, Any], name: str) -> Tokens:
        """Return a picture, opened and resized."""
        from .sight import picture_sources

        if not self.sees:
            raise RequestError(f"{name} is a picture; this model reads text only, not images")
        try:
            sources = picture_sources(part)
            if len(sources) != 1:
                raise RequestError(f"a PDF file of {len(sources)} pages; name one of them with 'page'")
            picture = self._tower.prepare(sources[0])
        except RequestError as error:
            raise RequestError(f"{name}: {error}") from error
        return Tokens([], [], [], [], [], picture=picture)

    @property
    def _tower(self) -> ImageEncoder:
        """What turns pictures into vectors; opened when the first one comes."""
        from ..models.sight import open_tower
        from .session import InferenceSession  # imports the library of graphs

        with self._lock:
            if self._opened is None:
                file, provider = self.folder / VISION_FILE, own_provider(self._providers)
                if provider is None:
                    session: Any = InferenceSession(file, providers=self._providers)
                else:
                    session = provider.session(file, QUIET)
                self._opened = open_tower(self.folder, session)
            return self._opened

    def embed_sparse(
        self, texts: Sequence[Text], *, prompt: str | None = None, truncate: bool | None = None
    ) -> list[SparseVector]:
        """Return a weight of each token of the vocabulary that is not 0, for each text; see ``embed``."""
        vectors: list[SparseVector] = self.embed_kinds(texts, ["sparse"], prompt=prompt, truncate=truncate)[
            "sparse"
        ]
        return vectors

    def embed_tokens(
        self, texts: Sequence[Text], *, prompt: str | None = None, truncate: bool | None = None
    ) -> list[Floats]:
        """Return a vector of each token of each text, float32 [tokens, size]; see ``embed``.

        Of a model for late interaction (ColBERT, https://arxiv.org/abs/2004.12832) the vectors have length
        1, and the special token in front is left out where BGE-M3 leaves it out. Of another model they are
        its states. Tokens that a MultiVectorMask skips have none; with the prompt "query", those that it
        skips in queries.

        Raises:
            RequestError: the graph pools its states itself.
            CarryallError: see ``embed``.
        """
        encoded = self.encode(texts, prompt=prompt, truncate=truncate)
        task = "query" if prompt == "query" else "document"
        if "multi" in self.kinds:
            vectors: list[Floats] = self._kinds_of(encoded, ["multi"], task)["multi"]
            return vectors
        if self._output == _SENTENCE:
            raise RequestError("this model pools itself; it has no vectors of tokens")
        _refuse_pictures(encoded)
        rows = self._batches.run(encoded, [self._output], lambda found, batch: batch.rows(found[0]))
        _check_finite(rows)
        return rows

    def embed_kinds(
        self,
        texts: Sequence[Text],
        kinds: Sequence[str] | None = None,
        *,
        prompt: str | None = None,
        truncate: bool | None = None,
    ) -> dict[str, Any]:
        """Return vectors of several kinds by kind, from one pass over the texts.

        Args:
            texts: as for ``embed``.
            kinds: some of ``kinds`` of the encoder; None takes all.
            prompt: as for ``embed``.
            truncate: as for ``embed``.

        Returns:
            Of "dense" what ``embed`` returns, of "sparse" what ``embed_sparse``, of "multi" what
            ``embed_tokens`` does.

        Raises:
            UnsupportedTaskError: the model has no such vectors.
            CarryallError: see ``embed``.
        """
        encoded = self.encode(texts, prompt=prompt, truncate=truncate)
        task = "query" if prompt == "query" else "document"
        return self._kinds_of(encoded, sorted(self.kinds) if kinds is None else kinds, task)

    def embed_pieces(
        self, documents: Sequence[Sequence[Text]], *, prompt: str | None = None
    ) -> tuple[list[Vectors], list[int]]:
        """Return a vector [pieces, size] of each piece of documents, and the tokens of each document.

        The model reads a whole document, and the vector of a piece is the mean of the states of its tokens
        (late chunking, https://arxiv.org/abs/2409.04701). Pieces are tokenized apart, so that their words do
        not merge. Tokens in front, those of a prompt and special ones, belong to the first piece, special
        ones behind to the last: a document of one piece has the vector that ``embed`` computes.

        Raises:
            RequestError: the model does not pool by the mean, or a piece has no token.
            PromptTooLongError: a document is too long.
            CarryallError: see ``embed``.
        """
        if self._pooling is None or self._pooling.modes != ("mean",):
            how = "in its graph" if self._pooling is None else f"by {', '.join(self._pooling.modes)}"
            raise RequestError(f"late chunking needs a model that pools by the mean; this one pools {how}")
        words = self.prompt_text(prompt)
        encoded = [self._batches.join(pieces, words, pooled=self._pooling.prompt) for pieces in documents]

        def reduce(found: list[Floats], batch: TokenBatch) -> list[Floats]:
            vectors = []
            for states, text in zip(batch.rows(found[0]), batch.texts, strict=True):
                rows = np.stack([states[start:end].mean(0) for start, end in text.pieces])
                vectors.append(_through([] if self._per_token else self._dense, rows))
            return vectors

        self._require("dense")
        rows = self._batches.run(encoded, [self._output], reduce)
        _check_finite(rows)
        vectors = [stacked(list(row), row.shape[1], normalize=self._normalize) for row in rows]
        return vectors, [len(text.ids) for text in encoded]

    def zero_shot(
        self,
        pictures: Sequence[Text],
        labels: Sequence[str],
        *,
        hypothesis: str = "This is a photo of {}.",
        independent: bool = False,
        truncate: bool | None = None,
    ) -> Floats:
        """Return the probability [pictures, labels] of labels that the model was not trained for.

        Args:
            pictures: ``{"image": ...}`` each; see ``embed``.
            labels: names of classes.
            hypothesis: a sentence with {} in place of the label.
            independent: whether each label has a probability of its own. SigLIP's always do; CLIP's never.
            truncate: see ``embed``.

        Raises:
            RequestError: an input is no picture, there are no labels, the hypothesis has no {}, or the model
                has no independent probabilities.
            UnsupportedTaskError: the model embeds texts only.
            CarryallError: see ``embed``.
        """
        form = self._batches.form
        if not self.sees or form is None:
            raise UnsupportedTaskError("this model embeds texts only; it does not classify pictures")
        if independent and form.bias is None:
            raise RequestError("this model compares labels with each other; it has no 'independent' scores")
        shown = self.encode(pictures)
        if any(each.picture is None for each in shown):
            raise RequestError("zero-shot classification by this model is of pictures: {'image': ...}")
        texts = self.encode(hypotheses(hypothesis, labels), truncate=truncate)
        if not shown:
            return np.zeros((0, len(labels)), np.float32)
        logits = similarities(self._vectors(shown), self._vectors(texts), "cosine") * form.scale
        logits = logits if form.bias is None else logits + form.bias
        return probabilities(np.asarray(logits, np.float32), independent=form.bias is not None)

    def rerank(self, query: str, documents: Sequence[str], *, truncate: bool | None = None) -> list[float]:
        """Return the similarity of each document to the query; see ``relevance``."""
        return self.relevance([(query, document) for document in documents], truncate=truncate)[0]

    def relevance(
        self, pairs: Sequence[tuple[str, str]], *, truncate: bool | None = None, raw: bool = False
    ) -> tuple[list[float], list[int]]:
        """Return the similarity of the document of each pair to its query, and the tokens of each pair.

        A query counts, and is computed, once. Dense vectors are compared by the measure of the folder. An
        encoder without them compares vectors of tokens, behind its prompts "query" and "document", by the
        sum over the query's tokens of the highest product with one of the document's tokens (ColBERT's
        MaxSim); else sparse vectors, by their product.

        Args:
            pairs: queries and documents.
            truncate: see ``embed``.
            raw: has no effect; similarities are no probabilities.

        Raises:
            CarryallError: see ``embed``; errors name the query, or the number of the document.
        """
        queries, documents = self._encoded_pairs(pairs, truncate)
        places = {query: place for place, query in enumerate(dict.fromkeys(query for query, _ in pairs))}
        of_query = np.array([places[query] for query, _ in pairs], np.int64)
        compare = {"dense": self._by_vectors, "multi": self._by_tokens, "sparse": self._by_terms}
        scores = np.zeros(len(pairs), np.float32)
        counts = [len(tokens.ids) for tokens in documents]
        for place, found in enumerate(compare[self._ranks_by](queries, documents, of_query)):
            scores[of_query == place] = found
            counts[int(np.argmax(of_query == place))] += len(queries[place].ids)
        return scores.tolist(), counts

    def check_pairs(self, pairs: Sequence[tuple[str, str]], *, truncate: bool | None = None) -> None:
        """Check what ``relevance`` is given, without running the model.

        Raises:
            CarryallError: see ``relevance``.
        """
        self._encoded_pairs(pairs, truncate)

    def _encoded_pairs(
        self, pairs: Sequence[tuple[str, str]], truncate: bool | None
    ) -> tuple[list[Tokens], list[Tokens]]:
        """Return the tokens of the different queries, and those of the document of each pair."""
        sides = {"query": list(dict.fromkeys(query for query, _ in pairs)), "document": [d for _, d in pairs]}
        prompts = () if self._ranks_by == "dense" else self.prompts
        queries, documents = (
            self.encode(
                texts,
                prompt=task if task in prompts else None,
                truncate=truncate,
                name=_namer(task, len(texts)),
            )
            for task, texts in sides.items()
        )
        return queries, documents

    @property
    def _ranks_by(self) -> str:
        """The kind of vectors that ``relevance`` compares."""
        return next(kind for kind in ("dense", "multi", "sparse") if kind in self.kinds)

    def _by_vectors(
        self, queries: list[Tokens], documents: list[Tokens], of_query: npt.NDArray[np.int64]
    ) -> list[Floats]:
        """Return the similarities of each query to its documents, from one pass over all texts."""
        vectors = self._vectors([*queries, *documents])
        first, second = vectors[: len(queries)], vectors[len(queries) :]
        return [
            self.similarity(first[place : place + 1], second[of_query == place])[0]
            for place in range(len(queries))
        ]

    def _by_tokens(
        self, queries: list[Tokens], documents: list[Tokens], of_query: npt.NDArray[np.int64]
    ) -> list[Floats]:
        first = self._kinds_of(queries, ["multi"], "query")["multi"]
        second = self._kinds_of(documents, ["multi"], "document")["multi"]
        scores = []
        for place, query in enumerate(first):
            size = len(query) if self._prompts.mean_of_tokens else 1
            rows = [second[number] for number in np.flatnonzero(of_query == place)]
            scores.append(np.array([_maxsim(query, row) / size for row in rows], np.float32))
        return scores

    def _by_terms(
        self, queries: list[Tokens], documents: list[Tokens], of_query: npt.NDArray[np.int64]
    ) -> list[Floats]:
        first, second = (
            self._kinds_of(texts, ["sparse"], "document")["sparse"] for texts in (queries, documents)
        )
        scores = []
        for place, query in enumerate(first):
            weights = dict(zip(query.indices.tolist(), query.values.tolist(), strict=True))
            rows = [second[number] for number in np.flatnonzero(of_query == place)]
            products = [
                sum(
                    weights.get(index, 0.0) * value
                    for index, value in zip(row.indices.tolist(), row.values.tolist(), strict=True)
                )
                for row in rows
            ]
            scores.append(np.array(products, np.float32))
        return scores

    def _vectors(self, encoded: Sequence[Tokens]) -> Vectors:
        dense: Vectors = self._kinds_of(encoded, ["dense"], "document")["dense"]
        return dense

    def _kinds_of(self, encoded: Sequence[Tokens], kinds: Sequence[str], task: str) -> dict[str, Any]:
        """Return vectors of several kinds from one pass over texts; see ``embed_kinds``.

        ``task`` is query or document: a MultiVectorMask skips other tokens of each.
        """
        for kind in kinds:
            self._require(kind)
        if any(text.picture is not None for text in encoded):
            if list(kinds) != ["dense"]:
                _refuse_pictures(encoded)
            return {"dense": self._mixed_vectors(encoded)}
        heads = [self._head(kind, task) for kind in kinds]
        outputs = list(dict.fromkeys(output for output, _ in heads))

        def reduce(found: list[Floats], batch: TokenBatch) -> list[tuple[Any, ...]]:
            rows = [part(found[outputs.index(output)], batch) for output, part in heads]
            return list(zip(*rows, strict=True))

        results = self._batches.run(encoded, outputs, reduce)
        columns = [list(column) for column in zip(*results, strict=True)] or [[] for _ in kinds]
        vectors: dict[str, Any] = dict(zip(kinds, columns, strict=True))
        for kind, rows in vectors.items():
            _check_finite([row.values if kind == "sparse" else row for row in rows])
        if "dense" in vectors:
            rows = vectors["dense"]
            vectors["dense"] = stacked(rows, len(rows[0]) if rows else 0, normalize=self._normalize)
        return vectors

    def _mixed_vectors(self, encoded: Sequence[Tokens]) -> Vectors:
        """Return the vectors of texts and pictures, in their order."""
        rows: dict[int, Floats] = {}
        for place, text in enumerate(encoded):
            if text.picture is not None:
                rows[place] = self._tower.states(text.picture)[0]
        _check_finite(list(rows.values()))
        size = len(next(iter(rows.values())))
        vectors = dict(zip(rows, stacked(list(rows.values()), size, normalize=self._normalize), strict=True))
        texts = [place for place in range(len(encoded)) if place not in rows]
        if texts:
            vectors |= zip(texts, self._vectors([encoded[place] for place in texts]), strict=True)
        return np.stack([vectors[place] for place in range(len(encoded))])

    def _head(self, kind: str, task: str) -> tuple[str, Callable[[Floats, TokenBatch], Sequence[Any]]]:
        """Return the output that has a kind of vectors, and what makes those of each text of it."""
        if kind == "dense":
            return self._output, self._pooled
        if kind == "sparse" and TERM_WEIGHTS in self._heads:
            return TERM_WEIGHTS, lambda weights, _: [_sparse(row) for row in weights]
        if kind == "sparse":
            special = self._special()
            return TOKEN_WEIGHTS, lambda weights, batch: [
                _highest(text, row[:, 0], special)
                for text, row in zip(batch.texts, batch.rows(weights), strict=True)
            ]
        if TOKEN_VECTORS in self._heads:
            first = int(self._pooling is not None)  # BGE-M3, which pools the first token besides
            return TOKEN_VECTORS, lambda vectors, batch: [scaled(row[first:]) for row in batch.rows(vectors)]
        return self._output, lambda states, batch: self._rows_of_tokens(states, batch, task)

    def _rows_of_tokens(self, states: Floats, batch: TokenBatch, task: str) -> list[Floats]:
        rows = batch.rows(states)
        if self._per_token:
            rows = [_through(self._dense, row) for row in rows]
            rows = [scaled(row) for row in rows] if self._normalize else rows
        skipped = self._skipped.get(task)
        if not skipped:
            return rows
        kept = [[number not in skipped for number in text.ids] for text in batch.texts]
        return [row[places] for row, places in zip(rows, kept, strict=True)]

    def similarity(self, first: Vectors, second: Vectors) -> Vectors:
        """Return the similarity [n, m] of vectors [n, size] and [m, size], by the measure of the folder.

        It is cosine unless ``config_sentence_transformers.json`` names dot, euclidean or manhattan, whose
        distances are negated.
        """
        return similarities(first, second, self._prompts.similarity)

    def _require(self, kind: str) -> None:
        if kind not in self.kinds:
            raise UnsupportedTaskError(
                f"this model has no {kind} vectors; it has {', '.join(sorted(self.kinds))}"
            )

    @property
    def poolings(self) -> tuple[str, ...]:
        """Names of how states become a dense vector, in order; empty where the graph does that itself."""
        return () if self._pooling is None else self._pooling.modes

    def prompt_text(self, name: str | None) -> str:
        """Return the text of a prompt; None takes the folder's default, "" none.

        Raises:
            RequestError: there is no such prompt.
        """
        name = self._prompts.default if name is None else name
        if not name:
            return ""
        if name not in self.prompts:
            known = ", ".join(self.prompts) or "none"
            raise RequestError(f"the encoder has no prompt {name!r}; it has {known}")
        return self.prompts[name]

    def _pooled(self, states: Floats, batch: TokenBatch) -> Sequence[Floats]:
        if self._pooling is not None:
            begins, lengths, modes = batch.begins, np.diff(batch.begins), self._pooling.modes
            numbers = np.arange(1, begins[-1] + 1) - np.repeat(begins[:-1], lengths)
            if any(text.unpooled for text in batch.texts):
                kept = numbers > np.repeat([text.unpooled for text in batch.texts], lengths)
                states, begins = states[kept], np.concatenate([[0], np.cumsum(kept)])[begins]
                numbers = numbers[kept]
            pooled = [POOLINGS[mode](states, begins, numbers) for mode in modes]
            states = pooled[0] if len(pooled) == 1 else np.concatenate(pooled, axis=-1)
        return list(_through([] if self._per_token else self._dense, states))

    def _special(self) -> set[int]:
        added = self._batches.tokenizer.get_added_tokens_decoder()
        return {number for number, token in added.items() if token.special}


def _picture(text: Text) -> Picture | None:
    return text.picture if isinstance(text, Tokens) else None


def _refuse_pictures(encoded: Sequence[Tokens]) -> None:
    """Raise RequestError if there is a picture, which has a dense vector only."""
    if any(text.picture is not None for text in encoded):
        raise RequestError("a picture has a dense vector, no vectors of tokens or weights of terms")


def _check_pooling(folder: Path, stated: Pooling | None, pooling: str | None, *, pools_itself: bool) -> None:
    modes = stated.modes if stated else ()
    if (pools_itself and pooling is None) or (modes and set(modes) <= POOLINGS.keys()):
        return
    raise UsageError(
        f"{folder} does not say how to pool; give pooling as {', '.join(POOLINGS)}, not {pooling!r} "
        "(--pooling of carryall embed, [encoder] in a config.toml of the folder for carryall serve)"
    )


def _states(batches: TokenBatches, ranks: Mapping[str, int]) -> str:
    """Return the output with the states of tokens."""
    states = [name for name, rank in ranks.items() if rank == 3 and name not in _HEADS]
    if len(states) != 1:
        raise UnsupportedModelError(
            f"{batches.path}: needs an output {_SENTENCE} [texts, size] or one output [texts, tokens, size], "
            f"not {', '.join(ranks)}"
        )
    return states[0]


def _through(layers: Sequence[Dense], x: Floats) -> Floats:
    """Apply Dense modules to the last axis."""
    for layer in layers:
        y = x @ layer.weight.T
        y = y if layer.bias is None else y + layer.bias
        y = _ACTIVATIONS[layer.activation](y)
        if layer.residual is not None:
            y = y + (x @ layer.residual.T if isinstance(layer.residual, np.ndarray) else x)
        x = np.asarray(y, np.float32)
    return x


def _gelu(x: Floats) -> Any:
    from math import erf

    return 0.5 * x * (1 + np.vectorize(erf, otypes=[np.float32])(x / np.sqrt(2)))


def _sigmoid(x: Floats) -> Any:
    return 0.5 + 0.5 * np.tanh(x / 2)


_ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "Identity": lambda x: x,
    "Tanh": np.tanh,
    "ReLU": lambda x: np.maximum(x, 0),
    "GELU": _gelu,
    "Sigmoid": _sigmoid,
    "SiLU": lambda x: x * _sigmoid(x),
}


def _sparse(row: Floats) -> SparseVector:
    indices = np.flatnonzero(~(row <= 0))  # NaN too, which is refused later
    return SparseVector(indices.astype(np.int64), row[indices])


def _highest(text: Tokens, weights: Floats, special: set[int]) -> SparseVector:
    """Return the highest weight of each token of a text that is not special."""
    best: dict[int, float] = {}
    for token, weight in zip(text.ids, weights.tolist(), strict=False):
        if token not in special and not weight <= best.get(token, 0.0):  # NaN too, which is refused later
            best[token] = weight
    indices = sorted(best)
    return SparseVector(np.array(indices, np.int64), np.array([best[each] for each in indices], np.float32))


def _namer(task: str, count: int) -> Callable[[int], str]:
    """Return what errors call the queries or the documents of ``relevance``."""
    return lambda place: f"the {task}" if task == "query" and count == 1 else f"{task} {place}"


def _maxsim(query: Floats, document: Floats) -> float:
    """Return the sum over tokens of the query [n, size] of the highest product with one of the document."""
    return float((query @ document.T).max(1).sum()) if len(document) else 0.0


def _check_finite(rows: Sequence[Floats]) -> None:
    """Check the vectors of texts.

    Raises:
        ProviderRuntimeError: one is not finite.
    """
    broken = [place for place, row in enumerate(rows) if not np.isfinite(row).all()]
    if broken:
        raise ProviderRuntimeError(
            f"the model returned NaN or infinity for text {broken[0]}; its weights are damaged, or too large "
            "for their type"
        )

"""The tokens and merges of a tokenizer in arrays, beside its tokenizer.json, for models that run in place.

The tokenizers library makes an object of each of 262,144 tokens and 520,000 merges, for 0.9 s of each start.
A text needs only tokens that occur in it, so the tokens lie in ``vocabulary.safetensors``, which is mapped,
``tokenizer.json`` has the rest, and the library gets the tokens of the texts to tokenize.
"""

from __future__ import annotations

import json
import operator
import re
import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load_file
from tokenizers import AddedToken, Encoding, Tokenizer, models, pre_tokenizers

from ...errors import CheckpointError
from ...records import dataclass
from ...storage.writing import save_tensors
from .text_table import Numbers, TextTable

VOCABULARY_FILE = "vocabulary.safetensors"
_OPTIONS = ("unk_token", "fuse_unk", "byte_fallback", "ignore_merges")
# Characters of texts after which the library gets all tokens: tokens of parts take as long for as many.
_PATIENCE = 1 << 16
_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
Scores = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Merges:
    """The merges that the file lists, the best first.

    Args:
        pairs: numbers of the left and the right token, int32 [merges, 2].
        wholes: numbers of the merged tokens, int32 [merges].
    """

    pairs: npt.NDArray[np.int32]
    wholes: npt.NDArray[np.int32]


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a BPE tokenizer by id, with their merges or their scores.

    Args:
        tokens: by id.
        merges: those of the file; None where scores tell them.
        scores: of the tokens, float32 [tokens]: each pair of tokens that makes a token is a merge, the best
            score of what it makes first, equal scores by id; None where the file lists merges.
    """

    tokens: TextTable
    merges: Merges | None
    scores: Scores | None

    def write(self, folder: Path) -> None:
        """Write ``vocabulary.safetensors``."""
        table = self.tokens
        arrays: dict[str, Any] = {
            "bytes": table.data,
            "ends": table.ends,
            "order": table.order,
            "hashes": table.hashes,
        }
        if self.merges is not None:
            arrays |= {"pairs": self.merges.pairs, "wholes": self.merges.wholes}
        if self.scores is not None:
            arrays["scores"] = self.scores
        save_tensors(arrays, folder / VOCABULARY_FILE)

    @staticmethod
    def read(folder: Path) -> Vocabulary:
        """Read ``vocabulary.safetensors``.

        Raises:
            CheckpointError: the file is damaged.
        """
        path = folder / VOCABULARY_FILE
        try:
            arrays = load_file(path)
            table = TextTable(arrays["bytes"], arrays["ends"], arrays["order"], arrays["hashes"])
            merges = Merges(arrays["pairs"], arrays["wholes"]) if "pairs" in arrays else None
            return Vocabulary(table, merges, arrays.get("scores"))
        except (SafetensorError, OSError, KeyError) as error:
            raise CheckpointError(f"{path} is damaged: {error}") from error

    def model(self, numbers: Numbers | None = None) -> tuple[dict[str, int], list[tuple[str, str]]]:
        """Return the ids by token and the merges, the best first, of all tokens or of some.

        Args:
            numbers: ids of the tokens, rising, int64 [any]; with the parts of their merges.
        """
        texts = list(self.tokens) if numbers is None else list(self.tokens.texts(numbers))
        ids = range(len(self.tokens)) if numbers is None else numbers.tolist()
        return dict(zip(texts, ids, strict=True)), self._merges(texts, numbers)

    def _merges(self, texts: Sequence[str], numbers: Numbers | None) -> list[tuple[str, str]]:
        if self.scores is not None:
            table = self.tokens if numbers is None else TextTable.of(texts)
            scores = self.scores if numbers is None else self.scores[numbers]
            wholes, lefts, rights = table.cuts()
            order = np.lexsort((lefts, wholes, -scores[wholes].astype(np.float64)))
            pairs = np.stack([lefts, rights], axis=1)[order].astype(np.int32)
        elif self.merges is not None:
            pairs = self.merges.pairs
            if numbers is not None:
                places = np.full(len(self.tokens), -1, np.int32)
                places[numbers] = np.arange(len(numbers))
                pairs = places[pairs[places[self.merges.wholes] >= 0]]
        else:
            pairs = np.zeros((0, 2), np.int32)
        left, right = (map(texts.__getitem__, column.tolist()) for column in pairs.T)
        return list(zip(left, right, strict=True))


class StoredTokenizer:
    """A tokenizer of the library whose tokens lie in a file. Thread-safe.

    It has those methods of ``tokenizers.Tokenizer`` that carryall uses, with equal results: merges make only
    texts that occur in the text, so that others change nothing.

    Args:
        content: of its tokenizer.json, without tokens and merges.
        vocabulary: these.
    """

    def __init__(self, content: Mapping[str, Any], vocabulary: Vocabulary) -> None:
        self._content, self._vocabulary = content, vocabulary
        self._rest = json.dumps({**content, "added_tokens": []})
        shell = Tokenizer.from_str(self._rest)
        self.normalizer, self.pre_tokenizer, self._decoder = (
            shell.normalizer,
            shell.pre_tokenizer,
            shell.decoder,
        )
        self._added = {
            each["id"]: AddedToken(**{k: v for k, v in each.items() if k != "id"})
            for each in content["added_tokens"]
        }
        self._by_bytes = content["decoder"]["type"] == "ByteLevel"
        self._texts: dict[int, str | None] = {}
        self._lock = threading.Lock()
        self._patience = _PATIENCE
        always = [content["model"]["unk_token"], *(f"<0x{byte:02X}>" for byte in range(256))]
        found = self._vocabulary.tokens.numbers_of([text for text in always if text])
        self._present = np.zeros(len(self._vocabulary.tokens), bool)
        self._present[found[found >= 0]] = True
        self._library = self._made(np.flatnonzero(self._present))

    @property
    def model(self) -> models.BPE:
        """The library's model, with the tokens of the texts so far."""
        model: models.BPE = self._library.model
        return model

    def no_truncation(self) -> None:
        """Do nothing: texts are never truncated."""

    def no_padding(self) -> None:
        """Do nothing: texts are never padded."""

    def get_vocab_size(self) -> int:
        """Return the number of tokens."""
        return len(self._vocabulary.tokens)

    def get_vocab(self, **_: bool) -> dict[str, int]:
        """Return the ids by token; those of the model are all, so ``with_added_tokens`` changes nothing."""
        return {token: number for number, token in enumerate(self._vocabulary.tokens)}

    def get_added_tokens_decoder(self) -> dict[int, AddedToken]:
        """Return the added tokens by id."""
        return self._added

    def to_str(self) -> str:
        """Return the content of the whole tokenizer.json."""
        return str(self.whole.to_str())

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a token; None if it is unknown."""
        return self._vocabulary.tokens.number_of(token)

    def id_to_token(self, token_id: int) -> str | None:
        """Return the token of an id; None if there is none."""
        if token_id not in self._texts:
            known = 0 <= token_id < len(self._vocabulary.tokens)
            self._texts[token_id] = self._vocabulary.tokens[token_id] if known else None
        return self._texts[token_id]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> Encoding:
        """Tokenize a text."""
        return self._for(text).encode(text, add_special_tokens=add_special_tokens)

    def encode_batch_fast(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[Encoding]:
        """Tokenize texts without the GIL; their encodings have no offsets."""
        library = self._for("\n".join(texts))
        encodings: list[Encoding] = library.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        return encodings

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids; those without a token are left out.

        Raises:
            TypeError: they are no integers.
            OverflowError: one is negative.
        """
        tokens = []
        for token_id in map(operator.index, token_ids):
            if token_id < 0:
                raise OverflowError(f"can't convert negative int {token_id} to unsigned")
            if skip_special_tokens and token_id in self._added and self._added[token_id].special:
                continue
            token = self.id_to_token(token_id)
            if token is not None:
                tokens.append(token)
        return str(self._decoder.decode(tokens))

    def decode_batch(self, batch: Sequence[Sequence[int]], skip_special_tokens: bool = True) -> list[str]:
        """Return the text of each list of token ids."""
        return [self.decode(token_ids, skip_special_tokens) for token_ids in batch]

    @cached_property
    def whole(self) -> Tokenizer:
        """The library's tokenizer with all tokens, which is used from now on."""
        self._library = self._made(None)
        self._patience = 0
        return self._library

    def _for(self, text: str) -> Tokenizer:
        """Return a tokenizer of the library with the tokens that a text needs."""
        with self._lock:
            if not self._patience:
                return self._library
            self._patience = max(0, self._patience - len(text))
            if not self._patience:
                return self.whole
            needed = self._needed(text)
            if not self._present[needed].all():
                self._present[needed] = True
                self._library = self._made(np.flatnonzero(self._present))
            return self._library

    def _needed(self, text: str) -> Numbers:
        """Return the ids of tokens that occur in a text as the model reads it, and of its added tokens."""
        tokens = self._vocabulary.tokens
        added = [number for number in tokens.parts_of(text).tolist() if number in self._added]
        if added:
            longest_first = sorted((self._added[number].content for number in added), key=len, reverse=True)
            parts = re.split("|".join(map(re.escape, longest_first)), text)
        else:
            parts = [text]
        if self.normalizer is not None:
            parts = [self.normalizer.normalize_str(part) for part in parts]
        read = "\n".join(parts)
        if self._by_bytes:
            read = "".join(piece for piece, _ in _BYTES.pre_tokenize_str(read))
        return np.concatenate([np.array(added, np.int64), tokens.parts_of(read)])

    def _made(self, numbers: Numbers | None) -> Tokenizer:
        tokenizer = Tokenizer.from_str(self._rest)
        options = {name: self._content["model"][name] for name in _OPTIONS}
        tokenizer.model = models.BPE(*self._vocabulary.model(numbers), **options)
        present = self._added.keys() if numbers is None else self._added.keys() & set(numbers.tolist())
        tokenizer.add_tokens([self._added[number] for number in sorted(present)])
        return tokenizer

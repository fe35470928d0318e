"""Tokenize and detokenize text with the tokenizer files of a checkpoint or package."""

from __future__ import annotations

import functools
import json
import re
import threading
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as _Tokenizer

from ...errors import PackageError, RequestError
from ...exporter.gguf.vocabulary import VOCABULARY_FILE, StoredTokenizer, Vocabulary
from ...options import shown
from ...storage.texts import read_text
from ..process.at_exit import NATIVE
from .known_texts import KnownTexts
from .special_texts import SpecialTexts
from .token_coverage import Coverage, coverage

# In tokenizers with byte fallback (SentencePiece), such as <0xE2>.
_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")
# GPT-2's tokenizer writes each of these bytes as the character with its number.
_PRINTED = (*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1))


def bytes_of_piece(piece: str) -> bytes | None:
    """Return the bytes of a vocabulary entry of a byte-level tokenizer or byte fallback; None of others."""
    if fallback := _FALLBACK.fullmatch(piece):
        return bytes([int(fallback[1], 16)])
    table = _byte_level()
    return bytes(table[symbol] for symbol in piece) if table.keys() >= set(piece) else None


@functools.cache
def _byte_level() -> dict[str, int]:
    """Return the bytes by the characters that GPT-2's tokenizer writes for them."""
    others = [byte for byte in range(256) if byte not in _PRINTED]
    return {chr(byte): byte for byte in _PRINTED} | {chr(256 + n): byte for n, byte in enumerate(others)}


TOKENIZER_FILE = "tokenizer.json"
_TAG = re.compile(r"[<\[]\S+[>\]]")

# Characters or tokens. Shorter inputs take the library at most about 2 ms, during which it holds the GIL.
_LONG_TEXT = 4096
_LONG = threading.Lock()
_REPLACED = "\ufffd"


def _opened(path: Path) -> _Tokenizer | StoredTokenizer:
    if (path.parent / VOCABULARY_FILE).is_file():
        content = json.loads(path.read_text(encoding="utf-8"))
        return StoredTokenizer(content, Vocabulary.read(path.parent))
    return _Tokenizer.from_file(str(path))


class Tokenizer:
    """The tokenizer of ``tokenizer.json``, with the special tokens of its configuration files. Thread-safe.

    The post-processor of the file decides whether a beginning-of-sequence token is added.

    Args:
        folder: a package or a Hugging Face folder.

    Raises:
        PackageError: there is no ``tokenizer.json``, or it cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / TOKENIZER_FILE
        if not path.is_file():
            raise PackageError(
                f"{folder} has no {TOKENIZER_FILE}. To convert another tokenizer format, run with "
                "transformers: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
            )
        try:
            self._tokenizer = _opened(path)
        except Exception as error:  # the library raises bare Exception
            raise PackageError(f"{path} cannot be read: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.config = read_optional_json(folder / "tokenizer_config.json")
        self._special_map = read_optional_json(folder / "special_tokens_map.json")

    @property
    def vocab_size(self) -> int:
        """The number of tokens, including added ones."""
        return int(self._tokenizer.get_vocab_size())

    @property
    def vocabulary(self) -> dict[str, int]:
        """The ids of all tokens, including added ones."""
        return dict(self._tokenizer.get_vocab(with_added_tokens=True))

    def read_all(self) -> None:
        """Read all tokens now: a service would otherwise stop for up to 0.9 s between two steps later."""
        if isinstance(self._tokenizer, StoredTokenizer):
            _ = self._tokenizer.whole

    def to_json(self) -> str:
        """Return the content of ``tokenizer.json``, without truncation and padding."""
        return str(self._tokenizer.to_str())

    @cached_property
    def special_token_ids(self) -> frozenset[int]:
        """The ids of special tokens."""
        added = self._tokenizer.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    @cached_property
    def added_texts(self) -> frozenset[str]:
        """The texts of added tokens, special or not."""
        return frozenset(token.content for token in self._tokenizer.get_added_tokens_decoder().values())

    @cached_property
    def special_texts(self) -> SpecialTexts:
        """Keeps the texts of special tokens apart from the tokens."""
        added = self._tokenizer.get_added_tokens_decoder()
        return SpecialTexts([token.content for token in added.values() if token.special])

    def texts_apart(self, template: str) -> SpecialTexts:
        """Keep the texts of special tokens, and of other tokens that are tags of a chat template, apart.

        Args:
            template: the source. Qwen's ``<tool_call>`` is such a tag; Gemma's ``<table>`` is none.
        """
        added = list(self._tokenizer.get_added_tokens_decoder().values())
        tags = [token.content for token in added if not token.special and _TAG.fullmatch(token.content)]
        used = [tag for tag in tags if tag in template]
        if not used:
            return self.special_texts
        return SpecialTexts([*used, *(token.content for token in added if token.special)])

    @cached_property
    def special_tokens(self) -> dict[str, str]:
        """The texts of special tokens by role, such as ``bos_token``, for chat templates."""
        tokens = {**self._special_map, **self.config}
        return {
            role: _text(tokens[role]) for role in sorted(tokens) if role.endswith("_token") and tokens[role]
        }

    def encode(self, text: str, *, add_special_tokens: bool = True, salt: str = "") -> list[int]:
        """Return the token ids of a text.

        Args:
            text: any text.
            add_special_tokens: with what the model expects around a text.
            salt: see ``KnownTexts.encode``.

        Raises:
            RequestError: it is no text, or has a lone surrogate.
        """
        if not isinstance(text, str):
            raise RequestError(f"a text to tokenize must be a str, not {shown(text)}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"the text is not valid Unicode, it has a lone surrogate: {error}") from error
        if add_special_tokens or len(text) <= _LONG_TEXT:
            return self._encoded(text, add_special_tokens)
        return self._known.encode(text, lambda part: self._encoded(part, add_special_tokens=False), salt)

    @cached_property
    def beginning(self) -> list[int]:
        """The token ids that the model expects before a text, such as the one that begins a sequence."""
        plain, whole = self.encode("a", add_special_tokens=False), self.encode("a")
        starts = range(len(whole) - len(plain) + 1)
        return whole[: next((i for i in starts if whole[i : i + len(plain)] == plain), 0)]

    @cached_property
    def _known(self) -> KnownTexts:
        return KnownTexts(self._tokenizer.get_added_tokens_decoder())

    def _encoded(self, text: str, add_special_tokens: bool) -> list[int]:
        with NATIVE:
            if len(text) <= _LONG_TEXT:
                encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
            else:  # only batch calls release the GIL; one text at a time bounds the memory
                with _LONG:
                    batch = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
                encoding = batch[0]
            token_ids: list[int] = encoding.ids
        return token_ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids; bytes that form no character become U+FFFD.

        Raises:
            RequestError: they are not integers of at least 0.
        """
        try:
            with NATIVE:
                if len(token_ids) <= _LONG_TEXT:
                    return str(self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))
                with _LONG:
                    return str(self._tokenizer.decode_batch([token_ids], skip_special_tokens)[0])
        except (TypeError, OverflowError) as error:
            raise RequestError(f"token ids must be a list of integers of at least 0: {error}") from error

    def partial_bytes(self, token_id: int, text: str) -> tuple[int, ...] | None:
        """Return the bytes of a token that holds a part of a character; None if its ``text`` says them."""
        if _REPLACED not in text:
            return None
        found = bytes_of_piece(self._tokenizer.id_to_token(token_id) or "")
        return None if found is None else tuple(found)

    @cached_property
    def coverage(self) -> Coverage | None:
        """The bound of the text that one token covers; None if there is none."""
        return coverage(self._tokenizer)

    def token_id(self, token: str) -> int | None:
        """Return the id of a token, given as written in the vocabulary; None if it is unknown."""
        token_id: int | None = self._tokenizer.token_to_id(token)
        return token_id


def read_optional_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, empty if there is no such file.

    Raises:
        PackageError: the file does not hold a JSON object.
    """
    if not path.is_file():
        return {}
    try:
        content = json.loads(read_text(path, PackageError))
    except (ValueError, RecursionError) as error:
        raise PackageError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise PackageError(f"{path} holds a {type(content).__name__}, not a JSON object")
    return content


def _text(token: Any) -> str:
    """Return the text of a special token, which is written as text or as an object with ``content``."""
    if isinstance(token, dict) and "content" not in token:
        raise PackageError(f"a special token has no content: {shown(token)}")
    return str(token["content"] if isinstance(token, dict) else token)

"""Bounds of the text that one token covers, to refuse too long texts before they are tokenized."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tokenizers import Tokenizer

from ...exporter.gguf.vocabulary import StoredTokenizer
from ...records import dataclass

# NFC and NFD map at most 3 bytes to 1, for instance KELVIN SIGN to K; a test checks all of Unicode.
_SHRINKS = {"NFC": 3, "NFD": 3}
# Normalizers, besides ``Replace``, that never remove bytes; and pre-tokenizers that split and remove nothing.
_KEEP = {"Prepend", "ByteLevel"}
_CUT = {"ByteLevel", "Metaspace", "Digits", "Punctuation", "Split", "UnicodeScripts"}


@dataclass(frozen=True, slots=True)
class Coverage:
    """An upper bound of the text that one token covers.

    Args:
        bytes_per_token: in UTF-8 bytes.
        strips: whether added tokens also remove any amount of whitespace around them.
    """

    bytes_per_token: int
    strips: bool

    def bytes_of(self, text: str) -> int:
        """Return the number of UTF-8 bytes of a text that tokens must cover."""
        return sum(len(word.encode()) for word in text.split()) if self.strips else len(text.encode())


def coverage(tokenizer: Tokenizer | StoredTokenizer) -> Coverage | None:
    """Return the bound of a tokenizer; None if a token may cover any amount of text."""
    normalizers, cutters = list(_parts(tokenizer.normalizer)), list(_parts(tokenizer.pre_tokenizer))
    vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=False)
    by_bytes = any(part["type"] == "ByteLevel" for part in (*normalizers, *cutters))
    if not all(map(_keeps, normalizers)) or not all(map(_cuts, cutters)):
        return None
    if not (_knows_bytes(vocabulary, by_bytes) and (by_bytes or tokenizer.model.byte_fallback)):
        return None  # unknown characters may be removed, or any number of them may become one token
    added = list(tokenizer.get_added_tokens_decoder().values())
    shrinks = 1
    for part in normalizers:
        shrinks *= _SHRINKS.get(part["type"], 1)
    longest = max((len(token) if by_bytes else len(token.encode()) for token in vocabulary), default=1)
    longest_added = max((len(token.content.encode()) for token in added), default=1)
    return Coverage(shrinks * max(longest, longest_added), any(one.lstrip or one.rstrip for one in added))


def _parts(component: Any) -> Iterator[dict[str, Any]]:
    """Yield the settings of a normalizer or pre-tokenizer; a sequence yields those of its parts."""
    if component is not None:
        yield from _flat(json.loads(component.__getstate__()))


def _flat(settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if settings["type"] == "Sequence":
        for part in settings.get("normalizers") or settings.get("pretokenizers") or ():
            yield from _flat(part)
    else:
        yield settings


def _keeps(part: dict[str, Any]) -> bool:
    if part["type"] == "Replace":
        old = part["pattern"].get("String")
        return bool(old) and len(part["content"].encode()) >= len(old.encode())
    return part["type"] in _KEEP or part["type"] in _SHRINKS


def _cuts(part: dict[str, Any]) -> bool:
    return part["type"] in _CUT and part.get("behavior") != "Removed"


def _knows_bytes(vocabulary: dict[str, int], by_bytes: bool) -> bool:
    if by_bytes:
        from tokenizers.pre_tokenizers import ByteLevel

        return all(symbol in vocabulary for symbol in ByteLevel.alphabet())
    return all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))

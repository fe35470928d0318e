"""How much text a token can cover: proves that a text has too many tokens before it is tokenized."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

# Normalization forms C and D make at most 3 bytes 1, as of KELVIN SIGN; a test checks all of Unicode.
_SHRINKS = {"NFC": 3, "NFD": 3}
# Normalizers that only add bytes, apart from ``Replace``; and pre-tokenizers that cut, but leave nothing out.
_KEEP = {"Prepend", "ByteLevel"}
_CUT = {"ByteLevel", "Metaspace", "Digits", "Punctuation", "Split", "UnicodeScripts"}


@dataclass(frozen=True, slots=True)
class Coverage:
    """What one token covers of a text, at most.

    Args:
        bytes_per_token: UTF-8 bytes.
        strips: tokens may also swallow any amount of whitespace around them.
    """

    bytes_per_token: int
    strips: bool

    def bytes_of(self, text: str) -> int:
        """UTF-8 bytes of a text that tokens must cover."""
        return sum(len(word.encode()) for word in text.split()) if self.strips else len(text.encode())


def coverage(tokenizer: Tokenizer) -> Coverage | None:
    """What a token of this tokenizer covers at most; None where a token may cover any amount of text."""
    normalizers, cutters = list(_parts(tokenizer.normalizer)), list(_parts(tokenizer.pre_tokenizer))
    vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=False)
    by_bytes = any(part["type"] == "ByteLevel" for part in (*normalizers, *cutters))
    if not all(map(_keeps, normalizers)) or not all(map(_cuts, cutters)):
        return None
    if not (_knows_bytes(vocabulary, by_bytes) and (by_bytes or tokenizer.model.byte_fallback)):
        return None  # unknown characters may vanish, or be one token however many
    added = list(tokenizer.get_added_tokens_decoder().values())
    shrinks = 1
    for part in normalizers:
        shrinks *= _SHRINKS.get(part["type"], 1)
    longest = max((len(token) if by_bytes else len(token.encode()) for token in vocabulary), default=1)
    longest_added = max((len(token.content.encode()) for token in added), default=1)
    return Coverage(shrinks * max(longest, longest_added), any(one.lstrip or one.rstrip for one in added))


def _parts(component: Any) -> Iterator[dict[str, Any]]:
    """The settings of a normalizer or pre-tokenizer, those of a sequence one by one."""
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

"""The bytes of single tokens: a token may hold a part of a character, which is no text of its own."""

from __future__ import annotations

import functools
import re

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

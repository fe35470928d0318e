"""Bytes of single tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from text_kit import byte_level, word_level
from tokenizers import decoders

from carryall.runtime.text.tokenizer import Tokenizer, bytes_of_piece
from carryall.runtime.types.outputs import Logprob


@pytest.mark.parametrize("make", [byte_level, word_level])
def test_the_bytes_of_tokens_form_the_text(make: Callable[[Path], Tokenizer], tmp_path: Path) -> None:
    tokenizer, text = make(tmp_path), "\N{PILE OF POO}x"
    tokens = tokenizer.encode(text, add_special_tokens=False)
    alone = [tokenizer.decode([token], skip_special_tokens=False) for token in tokens]
    assert "\ufffd" in "".join(alone)
    entries = [
        Logprob(token, -1.0, 1, one, tokenizer.partial_bytes(token, one))
        for token, one in zip(tokens, alone, strict=True)
    ]
    assert b"".join(entry.token_bytes for entry in entries).decode().strip() == text


def test_pieces_of_byte_level_tokenizers() -> None:
    for byte in range(0x80):
        (symbol,) = [one for one in map(chr, range(400)) if bytes_of_piece(one) == bytes([byte])]
        assert decoders.ByteLevel().decode([symbol]) == chr(byte)
    assert bytes_of_piece("<0xE2>") == b"\xe2"
    assert bytes_of_piece("\ufffd") is None

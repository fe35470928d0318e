"""Small tokenizers of two kinds: byte-level, and SentencePiece words with byte fallback."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as RawTokenizer

from carryall.runtime.text.tokenizer import Tokenizer

WORDS = ["▁", "▁the", "▁cat", "s", "▁sat", "!", "▁été", "中", "\n", "▁of", "e"]


def write_byte_level(folder: Path) -> Path:
    """Tokens 0..255 are bytes, then `<s>` 256 and `</s>` 257; adds `<s>` in front, as Llama 3 does."""
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = RawTokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    raw.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 256)])
    return _save(raw, folder)


def write_word_level(folder: Path) -> Path:
    """SentencePiece style as in Llama 2: words begin with `▁`, unknown characters become byte tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    vocab = {token: i for i, token in enumerate(tokens)}
    unknown = tokens[0]
    raw = RawTokenizer(models.BPE(vocab=vocab, merges=[], unk_token=unknown, byte_fallback=True))
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    raw.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return _save(raw, folder)


def byte_level(folder: Path) -> Tokenizer:
    """The tokenizer of ``write_byte_level``."""
    return Tokenizer(write_byte_level(folder))


def word_level(folder: Path) -> Tokenizer:
    """The tokenizer of ``write_word_level``."""
    return Tokenizer(write_word_level(folder))


def _save(raw: RawTokenizer, folder: Path) -> Path:
    raw.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}, "pad_token": None}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def byte_level_with(folder: Path, added: list[AddedToken]) -> Tokenizer:
    """Return a tokenizer of bytes with further tokens."""
    write_byte_level(folder)
    raw = RawTokenizer.from_file(str(folder / "tokenizer.json"))
    raw.add_tokens(added)
    raw.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)

"""Build Hugging Face's tokenizer files from the metadata of a GGUF file.

Two kinds are read: byte-level BPE (``gpt2``) and SentencePiece's BPE with byte fallback (``llama``). Names of
pre-tokenizers and their patterns: src/llama-vocab.cpp of https://github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from ...errors import CarryallWarning, CheckpointError, UnsupportedModelError
from .vocabulary import Merges, with_vocabulary, write_vocabulary

Numbers = npt.NDArray[np.int64]
TOKENIZER_FILE = "tokenizer.json"
_SPACE = "\u2581"  # SentencePiece's mark of a space
_UNKNOWN, _CONTROL, _USER = 2, 3, 4  # token types; 1 is normal, 6 a byte
_HASH_BASE = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2**64
_HASH_BITS = 24

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
# Marks belong to words, so that a letter and its accent stay together.
_QWEN35 = _QWEN2.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
_O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_DEFAULT = "default"  # of files without a name
_PATTERNS: dict[str, str] = {
    **dict.fromkeys(("gpt-2", "gpt2", "phi-2", "jina-en", "olmo", "mpt"), _GPT2),
    **dict.fromkeys(("llama3", "llama-bpe", "llama-v3", "falcon3", "smaug-bpe", "dbrx", "pixtral"), _LLAMA3),
    **dict.fromkeys(("falcon-h1", "lfm2"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez"), _QWEN2),
    **dict.fromkeys(("gpt-4o", "llama4", "o200k"), _O200K),
    "qwen35": _QWEN35,
    "tekken": _TEKKEN,
}
# Each digit is a separate piece; then GPT-2's pattern.
_SINGLE_DIGITS = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"})
# A word that is a token stays whole, and a text begins with BOS unless the file denies it.
_WHOLE_WORDS = frozenset(
    {"llama3", "llama-bpe", "llama-v3", "falcon3", "falcon-h1", "lfm2", "pixtral", "tekken"}
)
# Texts of tokens that end a turn, for files without the number of theirs.
_TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<|end|>")


@dataclass(frozen=True)
class GgufTokenizer:
    """The tokenizer of a GGUF file.

    Args:
        content: of tokenizer.json, without the tokens and merges of its model.
        tokens: by id.
        merges: see ``with_vocabulary``.
        settings: content of the other files by name.
    """

    content: dict[str, Any]
    tokens: Sequence[str]
    merges: Merges
    settings: dict[str, str]

    def files(self) -> dict[str, str]:
        """Return the content of tokenizer.json, tokenizer_config.json and generation_config.json by name."""
        whole = with_vocabulary(self.content, self.tokens, self.merges)
        return {TOKENIZER_FILE: json.dumps(whole, ensure_ascii=False), **self.settings}

    def write_to_open(self, folder: Path) -> dict[str, str]:
        """Write the tokens as ``vocabulary.safetensors``; return the content of the other files by name."""
        write_vocabulary(folder, self.tokens, self.merges)
        return {TOKENIZER_FILE: json.dumps(self.content, ensure_ascii=False), **self.settings}


def gguf_tokenizer(metadata: Mapping[str, Any], vocab_size: int) -> GgufTokenizer:
    """Return the tokenizer that the metadata of a GGUF file describes.

    Args:
        metadata: metadata of the GGUF file.
        vocab_size: number of rows of the embedding; more tokens are an error.

    Raises:
        CheckpointError: the vocabulary is missing or damaged.
        UnsupportedModelError: the kind of tokenizer is not supported.
    """
    tokens, types = _vocabulary(metadata, vocab_size)
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer, merges = _byte_level(metadata, tokens)
    elif kind == "llama":
        tokenizer, merges = _sentencepiece(metadata, tokens)
    else:
        raise UnsupportedModelError(
            f"the GGUF file has a tokenizer of the kind '{kind}'; gpt2 (byte-level BPE) and llama "
            "(SentencePiece's BPE) are supported"
        )
    bos = _token(metadata, tokens, "bos")
    begins = kind == "llama" or _pre_name(metadata) in _WHOLE_WORDS
    eos = _token(metadata, tokens, "eos")
    first = bos if metadata.get("tokenizer.ggml.add_bos_token", begins) else None
    last = eos if metadata.get("tokenizer.ggml.add_eos_token", False) else None
    if first is not None or last is not None:
        texts = [[*filter(None, (first, text, last))] for text in ("$A", "$B")]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=texts[0],
            pair=[*texts[0], *texts[1]],
            special_tokens=[(token, tokens.index(token)) for token in {first, last} - {None} if token],
        )
    content = json.loads(tokenizer.to_str())
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    content["added_tokens"] = [
        {"id": number, "content": token, **plain, "special": kind == _CONTROL}
        for number, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (_CONTROL, _USER)
    ]
    settings = {
        "tokenizer_config.json": json.dumps(_settings(metadata, tokens), ensure_ascii=False),
        "generation_config.json": json.dumps(_ends(metadata, tokens)),
    }
    return GgufTokenizer(content, tokens, merges, settings)


def _vocabulary(metadata: Mapping[str, Any], vocab_size: int) -> tuple[list[str], list[int]]:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise CheckpointError("the GGUF file has no 'tokenizer.ggml.tokens'")
    types = metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))
    if not isinstance(types, list) or len(types) != len(tokens) or len(tokens) > vocab_size:
        raise CheckpointError(
            f"the GGUF file has {len(tokens)} tokens, which need as many token types and no more than the "
            f"{vocab_size} rows of the embedding"
        )
    if len(set(tokens)) != len(tokens):
        raise CheckpointError("the GGUF file's vocabulary holds a token twice")
    return tokens, types


def _byte_level(metadata: Mapping[str, Any], tokens: Sequence[str]) -> tuple[Tokenizer, Merges]:
    """Return a byte-level BPE tokenizer without tokens, and the file's merges."""
    merges = metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list) or not all(isinstance(merge, str) and " " in merge for merge in merges):
        raise CheckpointError("the GGUF file has no 'tokenizer.ggml.merges' of two parts each")
    ids = {token: number for number, token in enumerate(tokens)}
    pairs = np.empty((len(merges), 2), np.int32)
    for number, merge in enumerate(merges):
        left, _, right = merge.partition(" ")
        if left not in ids or right not in ids or left + right not in ids:
            raise CheckpointError(
                f"the GGUF file's tokenizer is damaged: it merges {left!r} and {right!r}, but these or their "
                "sum are no tokens"
            )
        pairs[number] = ids[left], ids[right]
    tokenizer = Tokenizer(models.BPE(ignore_merges=_pre_name(metadata) in _WHOLE_WORDS))
    if "tokenizer.ggml.pre" not in metadata:
        text = (
            "the GGUF file does not name its pre-tokenizer, so texts may be split into other tokens than in "
            "training; convert the model again"
        )
        warnings.warn(text, CarryallWarning, stacklevel=2)
    tokenizer.pre_tokenizer = _pre_tokenizer(_pre_name(metadata))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, pairs


def _pre_name(metadata: Mapping[str, Any]) -> str:
    name = metadata.get("tokenizer.ggml.pre", _DEFAULT)
    if not isinstance(name, str):
        raise CheckpointError(f"the GGUF file's 'tokenizer.ggml.pre' is {name!r}, no name")
    return name


def _pre_tokenizer(name: str) -> pre_tokenizers.PreTokenizer:
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if name in _SINGLE_DIGITS:
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    if name == _DEFAULT:
        parts = [r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"]
        return pre_tokenizers.Sequence(
            [*(pre_tokenizers.Split(Regex(part), "isolated") for part in parts), bytes_only]
        )
    if name not in _PATTERNS:
        known = ", ".join(sorted({*_PATTERNS, *_SINGLE_DIGITS, _DEFAULT}))
        raise UnsupportedModelError(
            f"the GGUF file has the pre-tokenizer '{name}', which is not known; these are: {known}"
        )
    split = pre_tokenizers.Split(Regex(_PATTERNS[name]), behavior="isolated")
    return pre_tokenizers.Sequence([split, bytes_only])


def _sentencepiece(metadata: Mapping[str, Any], tokens: Sequence[str]) -> tuple[Tokenizer, Merges]:
    """Return a SentencePiece BPE tokenizer without tokens, and merges by the score of the merged token."""
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise CheckpointError("the GGUF file has no 'tokenizer.ggml.scores' for its tokens")
    unknown = _token(metadata, tokens, "unknown")
    tokenizer = Tokenizer(models.BPE(unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    spaces = [normalizers.Replace(" ", _SPACE)]
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), *spaces] if prefix else spaces)
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer, _merges(tokens, scores)


def _merges(tokens: Sequence[str], scores: Sequence[float]) -> Merges:
    """Return all pairs of tokens whose concatenation is a token, best score first, equal scores by number."""
    ids = {token: number for number, token in enumerate(tokens)}
    found = [
        (number, left, right)
        for number, cut in _likely_cuts(tokens)
        if (left := ids.get(tokens[number][:cut])) is not None
        and (right := ids.get(tokens[number][cut:])) is not None
    ]
    numbers, lefts, rights = np.array(found, np.int32).reshape(-1, 3).T
    order = np.lexsort((lefts, numbers, -np.asarray(scores, np.float64)[numbers]))
    return np.stack([lefts, rights], axis=1)[order]


def _likely_cuts(tokens: Sequence[str]) -> Iterable[tuple[int, int]]:
    """Yield (token number, length of the left part) of all cuts into two tokens, and of a few others.

    A vocabulary of 262,144 tokens has 2 million cuts, too many to look up one by one. Here the polynomial
    hash modulo 2**64 of each part, a difference of two prefix sums, is looked up in a table of the hashes of
    all tokens by their upper bits. Equal texts have equal hashes, so no cut is missed; unequal texts may.
    """
    lengths = np.fromiter(map(len, tokens), np.int64, len(tokens))
    points = np.frombuffer("".join(tokens).encode("utf-32-le", "surrogatepass"), np.uint32)
    ends = np.cumsum(lengths)
    starts = ends - lengths
    sums = np.zeros(len(points) + 1, np.uint64)
    np.cumsum((points + np.uint64(1)) * _powers(_HASH_BASE, len(points)), out=sums[1:])
    inverses = _powers(pow(_HASH_BASE, -1, 2**64), len(points) + 1)

    def slots(begin: Numbers, end: Numbers) -> Numbers:
        """Return the slots of the texts between positions of the joined tokens."""
        hashes = (sums[end] - sums[begin]) * inverses[begin]
        return (hashes >> np.uint64(64 - _HASH_BITS)).astype(np.int64)

    table = np.zeros(2**_HASH_BITS, bool)
    table[slots(starts, ends)] = True
    cuts = np.maximum(lengths - 1, 0)
    owners = np.repeat(np.arange(len(tokens)), cuts)
    middles = np.arange(len(owners)) - np.repeat(np.cumsum(cuts) - cuts, cuts) + 1 + starts[owners]
    likely = table[slots(starts[owners], middles)]
    owners, middles = owners[likely], middles[likely]
    likely = table[slots(middles, ends[owners])]
    owners, middles = owners[likely], middles[likely]
    return zip(owners.tolist(), (middles - starts[owners]).tolist(), strict=True)


def _powers(base: int, count: int) -> npt.NDArray[np.uint64]:
    """Return base**0 to base**(count - 1) modulo 2**64."""
    powers = np.full(count, base, np.uint64)
    powers[:1] = 1
    return powers.cumprod(dtype=np.uint64)


def _token(metadata: Mapping[str, Any], tokens: Sequence[str], which: str) -> str | None:
    number = metadata.get(f"tokenizer.ggml.{which}_token_id")
    if number is None:
        return None
    if not isinstance(number, int) or not 0 <= number < len(tokens):
        raise CheckpointError(
            f"the GGUF file's {which} token is {number!r}, outside of its {len(tokens)} tokens"
        )
    return tokens[number]


def _settings(metadata: Mapping[str, Any], tokens: Sequence[str]) -> dict[str, Any]:
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": _token(metadata, tokens, "bos"),
        "eos_token": _token(metadata, tokens, "eos"),
        "unk_token": _token(metadata, tokens, "unknown"),
        "pad_token": _token(metadata, tokens, "padding"),
        "chat_template": metadata.get("tokenizer.chat_template"),
    }
    return {key: value for key, value in settings.items() if value is not None}


def _ends(metadata: Mapping[str, Any], tokens: Sequence[str]) -> dict[str, Any]:
    """Return the begin token, and the end tokens of texts and turns."""
    ends = [_token(metadata, tokens, "eos"), _turn_end(metadata, tokens), _token(metadata, tokens, "eom")]
    numbers = list(dict.fromkeys(tokens.index(token) for token in ends if token is not None))
    bos = _token(metadata, tokens, "bos")
    found = {"bos_token_id": None if bos is None else tokens.index(bos), "eos_token_id": numbers or None}
    return {key: value for key, value in found.items() if value is not None}


def _turn_end(metadata: Mapping[str, Any], tokens: Sequence[str]) -> str | None:
    """Return the token that ends a turn: by its number in the metadata, else by its text."""
    given = _token(metadata, tokens, "eot")
    if given is not None:
        return given
    known = set(tokens)
    found = [token for token in _TURN_ENDS if token in known]
    if "<|return|>" in known and "<|end|>" in found:  # gpt-oss, where <|end|> ends a message within a turn
        found.remove("<|end|>")
    return found[0] if found else None

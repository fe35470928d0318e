"""Build Hugging Face's tokenizer files from the metadata of a GGUF file.

Three kinds are read: byte-level BPE (``gpt2``), SentencePiece's BPE with byte fallback (``llama``), and the
same with listed merges (``gemma4``). Names of pre-tokenizers and their patterns: src/llama-vocab.cpp of https://github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from ...errors import CarryallWarning, CheckpointError, UnsupportedModelError
from ...records import dataclass
from .text_table import Numbers, PackedTexts, PartHashes, TextTable, begins_of
from .vocabulary import Merges, Scores, Vocabulary

TOKENIZER_FILE = "tokenizer.json"
_SPACE = "\u2581"  # SentencePiece's mark of a space
_UNKNOWN, _CONTROL, _USER = 2, 3, 4  # token types; 1 is normal, 6 a byte

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
_SEED = _QWEN2.replace(r"[^\s\p{L}\p{N}]+[\r\n]*", r"[^\s\p{L}\p{N}\r\n]+")
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]"
    r"|\s+(?!\S)|\s+"
)
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_DEFAULT = "default"  # of files without a name
_PATTERNS: dict[str, str] = {
    **dict.fromkeys(("gpt-2", "gpt2", "phi-2", "jina-en", "olmo", "mpt", "jais", "exaone4", "mellum"), _GPT2),
    **dict.fromkeys(("gigachat", "a.x-4.0", "modern-bert", "trillion", "granite-docling"), _GPT2),
    **dict.fromkeys(("llama3", "llama-bpe", "llama-v3", "falcon3", "smaug-bpe", "dbrx", "pixtral"), _LLAMA3),
    **dict.fromkeys(("falcon-h1", "lfm2", "midm-2.0", "glm4", "glm5", "chatglm-bpe"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez", "kormo"), _QWEN2),
    **dict.fromkeys(("solar-open", "grok-2"), _QWEN2),
    **dict.fromkeys(("gpt-4o", "llama4", "o200k", "kanana2", "talkie", "minimax-m2"), _O200K),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), _BAILING),
    "qwen35": _QWEN35,
    "seed-coder": _SEED,
    "tekken": _TEKKEN,
}
_HAN = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Patterns one after the other: what one has split off, the next ones split no further together with others.
_STEPS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), (r"\p{N}{1,3}", _HAN, _DEEPSEEK3)),
    "minicpm5": (r"\p{N}{1,3}", _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}+")),
    _DEFAULT: (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
}
# Each digit is a separate piece; then GPT-2's pattern.
_SINGLE_DIGITS = frozenset(
    {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"}
)
# A text begins with BOS unless the file denies it.
_BEGIN = frozenset(
    {"llama3", "llama-bpe", "llama-v3", "falcon3", "falcon-h1", "lfm2", "midm-2.0", "pixtral", "tekken"}
)
_WHOLE_WORDS = _BEGIN | {"glm4", "glm5", "minicpm5"}  # a word that is a token stays whole
# Texts of tokens that end a turn, for files without the number of theirs.
_TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<turn|>", "<end_of_utterance>", "<|end|>")


@dataclass(frozen=True)
class GgufTokenizer:
    """The tokenizer of a GGUF file.

    Args:
        content: of tokenizer.json, without the tokens and merges of its model.
        vocabulary: these.
        settings: content of the other files by name.
    """

    content: dict[str, Any]
    vocabulary: Vocabulary
    settings: dict[str, str]

    def files(self) -> dict[str, str]:
        """Return the content of tokenizer.json, tokenizer_config.json and generation_config.json by name."""
        vocab, merges = self.vocabulary.model()
        whole = {**self.content, "model": {**self.content["model"], "vocab": vocab, "merges": merges}}
        return {TOKENIZER_FILE: json.dumps(whole, ensure_ascii=False), **self.settings}

    def write_to_open(self, folder: Path) -> dict[str, str]:
        """Write ``vocabulary.safetensors``; return the content of the other files by name."""
        self.vocabulary.write(folder)
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
        tokenizer, vocabulary = _byte_level(metadata), Vocabulary(tokens, _merges(metadata, tokens), None)
    elif kind == "llama":
        tokenizer = _sentencepiece(
            metadata, tokens, prefix=metadata.get("tokenizer.ggml.add_space_prefix", True)
        )
        vocabulary = Vocabulary(tokens, None, _scores(metadata, len(tokens)))
    elif kind == "gemma4":
        tokenizer = _sentencepiece(metadata, tokens, prefix=False)
        vocabulary = Vocabulary(tokens, _merges(metadata, tokens), None)
    else:
        raise UnsupportedModelError(
            f"the GGUF file has a tokenizer of the kind '{kind}'; gpt2 (byte-level BPE), llama "
            "(SentencePiece's BPE) and gemma4 are supported"
        )
    bos = _token(metadata, tokens, "bos")
    begins = kind == "llama" or _pre_name(metadata) in _BEGIN
    eos = _token(metadata, tokens, "eos")
    # Files of Gemma 4 deny it, and llama.cpp begins with it.
    first = bos if kind == "gemma4" or metadata.get("tokenizer.ggml.add_bos_token", begins) else None
    last = eos if metadata.get("tokenizer.ggml.add_eos_token", False) else None
    if first is not None or last is not None:
        texts = [[*filter(None, (first, text, last))] for text in ("$A", "$B")]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=texts[0],
            pair=[*texts[0], *texts[1]],
            special_tokens=[(token, tokens.number_of(token)) for token in {first, last} - {None} if token],
        )
    content = json.loads(tokenizer.to_str())
    added = np.flatnonzero((types == _CONTROL) | (types == _USER))
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    content["added_tokens"] = [
        {"id": number, "content": token, **plain, "special": bool(kind == _CONTROL)}
        for number, token, kind in zip(added.tolist(), tokens.texts(added), types[added], strict=True)
    ]
    settings = {
        "tokenizer_config.json": json.dumps(_settings(metadata, tokens), ensure_ascii=False),
        "generation_config.json": json.dumps(_ends(metadata, tokens)),
    }
    return GgufTokenizer(content, vocabulary, settings)


def _vocabulary(metadata: Mapping[str, Any], vocab_size: int) -> tuple[TextTable, Numbers]:
    """Return the tokens and their types, int64 [tokens]."""
    stated = _texts(metadata, "tokens")
    types = metadata.get("tokenizer.ggml.token_type", [1] * len(stated))
    if not isinstance(types, list) or len(types) != len(stated) or len(stated) > vocab_size:
        raise CheckpointError(
            f"the GGUF file has {len(stated)} tokens, which need as many token types and no more than the "
            f"{vocab_size} rows of the embedding"
        )
    tokens = TextTable.of(stated)
    if tokens.twice is not None:
        raise CheckpointError(f"the GGUF file's vocabulary holds the token {tokens.twice!r} twice")
    return tokens, np.array(types, np.int64)


def _texts(metadata: Mapping[str, Any], which: str) -> PackedTexts:
    stated = metadata.get(f"tokenizer.ggml.{which}")
    if isinstance(stated, list) and all(isinstance(text, str) for text in stated):
        return PackedTexts.of(stated)
    if not isinstance(stated, PackedTexts):
        raise CheckpointError(f"the GGUF file has no 'tokenizer.ggml.{which}', a list of texts")
    return stated


def _merges(metadata: Mapping[str, Any], tokens: TextTable) -> Merges:
    """Return the merges that the file lists, which are texts such as ``a bc``."""
    merges = _texts(metadata, "merges")
    data, ends = merges.data, merges.ends
    spaces = np.append(np.flatnonzero(data == ord(" ")), len(data))
    middles = spaces[np.searchsorted(spaces, begins_of(ends))]
    if (middles >= ends).any():
        raise CheckpointError("the GGUF file has no 'tokenizer.ggml.merges' of two parts each")
    before = np.arange(len(merges))  # each text has lost its space, and those before it
    begins, middles, ends = begins_of(ends) - before, middles - before, ends - before - 1
    parts = PartHashes(np.delete(data, middles + before))
    lefts, rights, wholes = (
        tokens.find(parts.of(first, last))
        for first, last in ((begins, middles), (middles, ends), (begins, ends))
    )
    for number in np.flatnonzero((lefts < 0) | (rights < 0) | (wholes < 0))[:1].tolist():
        left, _, right = merges[number].partition(" ")
        raise CheckpointError(
            f"the GGUF file's tokenizer is damaged: it merges {left!r} and {right!r}, but these or their "
            "sum are no tokens"
        )
    return Merges(np.stack([lefts, rights], axis=1), wholes)


def _byte_level(metadata: Mapping[str, Any]) -> Tokenizer:
    """Return a byte-level BPE tokenizer without tokens."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=_pre_name(metadata) in _WHOLE_WORDS))
    if "tokenizer.ggml.pre" not in metadata:
        text = (
            "the GGUF file does not name its pre-tokenizer, so texts may be split into other tokens than in "
            "training; convert the model again"
        )
        warnings.warn(text, CarryallWarning, stacklevel=2)
    tokenizer.pre_tokenizer = _pre_tokenizer(_pre_name(metadata))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


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
    if name in _STEPS:
        steps = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _STEPS[name]]
        return pre_tokenizers.Sequence([*steps, bytes_only])
    if name not in _PATTERNS:
        known = ", ".join(sorted({*_PATTERNS, *_SINGLE_DIGITS, *_STEPS}))
        raise UnsupportedModelError(
            f"the GGUF file has the pre-tokenizer '{name}', which is not known; these are: {known}"
        )
    split = pre_tokenizers.Split(Regex(_PATTERNS[name]), behavior="isolated")
    return pre_tokenizers.Sequence([split, bytes_only])


def _scores(metadata: Mapping[str, Any], count: int) -> Scores:
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != count:
        raise CheckpointError("the GGUF file has no 'tokenizer.ggml.scores' for its tokens")
    return np.asarray(scores, np.float32)


def _sentencepiece(metadata: Mapping[str, Any], tokens: TextTable, *, prefix: bool) -> Tokenizer:
    """Return a SentencePiece BPE tokenizer without tokens; ``prefix`` puts a space in front of a text."""
    unknown = _token(metadata, tokens, "unknown")
    tokenizer = Tokenizer(models.BPE(unk_token=unknown, fuse_unk=True, byte_fallback=True))
    spaces = [normalizers.Replace(" ", _SPACE)]
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), *spaces] if prefix else spaces)
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _token(metadata: Mapping[str, Any], tokens: TextTable, which: str) -> str | None:
    number = metadata.get(f"tokenizer.ggml.{which}_token_id")
    if number is None:
        return None
    if not isinstance(number, int) or not 0 <= number < len(tokens):
        raise CheckpointError(
            f"the GGUF file's {which} token is {number!r}, outside of its {len(tokens)} tokens"
        )
    return tokens[number]


def _settings(metadata: Mapping[str, Any], tokens: TextTable) -> dict[str, Any]:
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": _token(metadata, tokens, "bos"),
        "eos_token": _token(metadata, tokens, "eos"),
        "unk_token": _token(metadata, tokens, "unknown"),
        "pad_token": _token(metadata, tokens, "padding"),
        "chat_template": metadata.get("tokenizer.chat_template"),
    }
    return {key: value for key, value in settings.items() if value is not None}


def _ends(metadata: Mapping[str, Any], tokens: TextTable) -> dict[str, Any]:
    """Return the begin token, and the end tokens of texts and turns."""
    ends = [_token(metadata, tokens, "eos"), _turn_end(metadata, tokens), _token(metadata, tokens, "eom")]
    numbers = list(dict.fromkeys(tokens.number_of(token) for token in ends if token is not None))
    bos = _token(metadata, tokens, "bos")
    found = {"bos_token_id": None if bos is None else tokens.number_of(bos), "eos_token_id": numbers or None}
    return {key: value for key, value in found.items() if value is not None}


def _turn_end(metadata: Mapping[str, Any], tokens: TextTable) -> str | None:
    """Return the token that ends a turn: by its number in the metadata, else by its text."""
    given = _token(metadata, tokens, "eot")
    if given is not None:
        return given
    found = [token for token in _TURN_ENDS if tokens.number_of(token) is not None]
    if (
        tokens.number_of("<|return|>") is not None and "<|end|>" in found
    ):  # gpt-oss, where <|end|> ends a message within a turn
        found.remove("<|end|>")
    return found[0] if found else None

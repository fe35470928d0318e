"""The tokens and merges of a BPE tokenizer as arrays beside ``tokenizer.json``.

The tokenizers library reads 262,144 tokens and their merges from JSON in 1.3 s, and holds Python's lock
meanwhile; it takes them from Python in 0.6 s. So GGUF files that run in place have them in
``vocabulary.safetensors``, and ``tokenizer.json`` has the rest.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from tokenizers import AddedToken, Tokenizer, models

from ...errors import CheckpointError

VOCABULARY_FILE = "vocabulary.safetensors"
Merges = npt.NDArray[np.int32]
_OPTIONS = ("unk_token", "fuse_unk", "byte_fallback", "ignore_merges")


def with_vocabulary(content: Mapping[str, Any], tokens: Sequence[str], merges: Merges) -> dict[str, Any]:
    """Return the content of a whole tokenizer.json.

    Args:
        content: that of a tokenizer without tokens.
        tokens: by id.
        merges: ids of the left and the right token of each merge, [merges, 2], the best first.
    """
    vocabulary = {token: number for number, token in enumerate(tokens)}
    return {**content, "model": {**content["model"], "vocab": vocabulary, "merges": _pairs(tokens, merges)}}


def write_vocabulary(folder: Path, tokens: Sequence[str], merges: Merges) -> None:
    """Write ``vocabulary.safetensors``; the arguments are those of ``with_vocabulary``."""
    texts = [token.encode("utf-8") for token in tokens]
    arrays = {
        "bytes": np.frombuffer(b"".join(texts), np.uint8),
        "lengths": np.fromiter(map(len, texts), np.int32, len(texts)),
        "merges": np.ascontiguousarray(merges, np.int32),
    }
    save_file(arrays, folder / VOCABULARY_FILE)


def open_with_vocabulary(folder: Path, content: Mapping[str, Any]) -> Tokenizer:
    """Return the tokenizer of a folder with ``vocabulary.safetensors``.

    Args:
        folder: has the file.
        content: of its tokenizer.json, which has no tokens.

    Raises:
        CheckpointError: the file is damaged.
    """
    try:
        arrays = load_file(folder / VOCABULARY_FILE)
        data, lengths, merges = arrays["bytes"].tobytes(), arrays["lengths"], arrays["merges"]
        ends = np.cumsum(lengths, dtype=np.int64).tolist()
        tokens = [data[begin:end].decode() for begin, end in itertools.pairwise([0, *ends])]
        pairs = _pairs(tokens, merges)
    except (SafetensorError, OSError, KeyError, IndexError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{folder / VOCABULARY_FILE} is damaged: {error}") from error
    tokenizer = Tokenizer.from_str(json.dumps({**content, "added_tokens": []}))
    vocabulary = {token: number for number, token in enumerate(tokens)}
    options = {name: content["model"][name] for name in _OPTIONS}
    tokenizer.model = models.BPE(vocabulary, pairs, **options)
    tokenizer.add_tokens(
        [AddedToken(**{k: v for k, v in each.items() if k != "id"}) for each in content["added_tokens"]]
    )
    return tokenizer


def _pairs(tokens: Sequence[str], merges: Merges) -> list[tuple[str, str]]:
    left, right = (map(tokens.__getitem__, ids.tolist()) for ids in merges.T)
    return list(zip(left, right, strict=True))

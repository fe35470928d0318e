"""How an encoder of texts and pictures reads texts, as metadata of its graph.

Encoders of texts alone say the same in the files of sentence-transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...contract import TEXT_FORM
from ...errors import CheckpointError, PackageError
from ...records import dataclass
from ..config import read_json

_TOKENIZER_FILE, _TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class TextForm:
    """The tokens that an encoder takes, and what similarities of its vectors mean.

    The vector of a text is the state of its last token.

    Args:
        end_id: the token that ends a text: tokens behind the first one are not read.
        length: tokens of every text: shorter ones are padded, and the padding takes part; None for any.
        padding_id: the token of this padding.
        pads_left: whether it is in front of the text.
        lower: whether texts are in lower case.
        scale: what the cosine of a picture and a text is multiplied by, before probabilities are taken.
        bias: what is added then, for a probability of each pair alone; None for a softmax over texts.
    """

    end_id: int | None = None
    length: int | None = None
    padding_id: int = 0
    pads_left: bool = False
    lower: bool = False
    scale: float = 1.0
    bias: float | None = None

    def metadata(self) -> dict[str, str]:
        """Return the metadata of the graph."""
        return {TEXT_FORM: json.dumps(asdict(self))}


def read_text_form(metadata: Mapping[str, str]) -> TextForm | None:
    """Return what the metadata of a graph say; None if they say nothing.

    Raises:
        PackageError: they are damaged.
    """
    stored = metadata.get(TEXT_FORM)
    if stored is None:
        return None
    try:
        return TextForm(**json.loads(stored))
    except (TypeError, ValueError) as error:
        raise PackageError(f"the graph's metadata '{TEXT_FORM}' are damaged: {error}") from error


def tokenizer_settings(folder: Path) -> Mapping[str, Any]:
    """Return the content of tokenizer_config.json; empty without the file.

    Raises:
        CheckpointError: the file is damaged.
    """
    path = folder / _TOKENIZER_CONFIG
    return read_json(path) if path.is_file() else {}


def padding_token(folder: Path, default: int) -> int:
    """Return the id of the padding token that tokenizer_config.json names.

    Args:
        folder: the checkpoint.
        default: the id if the file names none.

    Raises:
        CheckpointError: a file is damaged, or the tokenizer has no such token.
    """
    stated = tokenizer_settings(folder).get("pad_token")
    text = stated.get("content") if isinstance(stated, dict) else stated
    if text is None or not (folder / _TOKENIZER_FILE).is_file():
        return default
    content = read_json(folder / _TOKENIZER_FILE)
    for token in content.get("added_tokens") or []:
        if isinstance(token, dict) and token.get("content") == text and type(token.get("id")) is int:
            return int(token["id"])
    vocabulary = (content.get("model") or {}).get("vocab")
    if isinstance(vocabulary, dict) and type(vocabulary.get(text)) is int:
        return int(vocabulary[text])
    for place, entry in enumerate(vocabulary if isinstance(vocabulary, list) else []):
        if isinstance(entry, list) and entry and entry[0] == text:
            return place
    raise CheckpointError(f"{folder / _TOKENIZER_FILE} has no token {text!r}, the padding of its texts")

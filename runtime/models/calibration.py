"""Read the calibration text, given by the user or built in, as windows of tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ...errors import UsageError
from ...exporter.demo import CALIBRATION_TEXT
from ...graph_opt.quantize.calibration.activations import MIN_TOKENS
from ...storage.texts import read_text
from ..text.tokenizer import Tokenizer

MOST_TEXT = 256 << 20  # bytes of a text to calibrate on or to predict

Tokens = npt.NDArray[np.int64]
WINDOW, MAX_TOKENS = 512, 8192
_TEXT_KEYS = ("text", "prompt")


def calibration_windows(
    tokenizer: Tokenizer,
    path: Path | None,
    *,
    context_length: int,
    max_tokens: int = MAX_TOKENS,
) -> list[Tokens]:
    """Return the tokens of a calibration text in windows [n], at most 512 tokens each.

    Each window begins as a text does, for example with the token that begins a sequence: models that were
    trained with it, such as Gemma 3, have other activations and predictions without.

    Args:
        tokenizer: the tokenizer of the model.
        path: plain text; or, if it ends in .jsonl, one sample per line: a string, or an object with ``text``
            or ``prompt``. None takes a built-in text of Python and English.
        context_length: maximum length of a window.
        max_tokens: maximum number of tokens read.

    Raises:
        UsageError: the file is empty or not text, or a line has another format.
    """
    source = path or CALIBRATION_TEXT
    beginning = tokenizer.beginning
    window = max(1, min(WINDOW, context_length) - len(beginning))
    windows: list[Tokens] = []
    count = 0
    for sample in _samples(source):
        tokens = tokenizer.encode(sample, add_special_tokens=False)[: max_tokens - count]
        parts = [beginning + tokens[start : start + window] for start in range(0, len(tokens), window)]
        windows += [np.array(part, np.int64) for part in parts]
        count += len(tokens)
        if count >= max_tokens:
            break
    if not count:
        raise UsageError(f"calibration text {source} is empty; at least {MIN_TOKENS} tokens are needed")
    return windows


def _samples(path: Path) -> Iterator[str]:
    text = read_text(path, most=MOST_TEXT)
    if path.suffix != ".jsonl":
        yield text
        return
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            yield _sample(line, f"{path} line {number}")


def _sample(line: str, place: str) -> str:
    try:
        content = json.loads(line)
    except ValueError as error:
        raise UsageError(f"{place} is not valid JSON: {error}") from error
    if isinstance(content, dict):
        content = next((content[key] for key in _TEXT_KEYS if key in content), None)
    if not isinstance(content, str):
        raise UsageError(f"{place} is neither a string nor an object with 'text' or 'prompt'")
    return content

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
WINDOW, SHORT_WINDOW = 512, 128  # the short ones where fewer tokens are wanted than the text is read for
READ_TOKENS, ROUNDING_TOKENS = 8192, 4096  # by default; rounding takes long
_TEXT_KEYS = ("text", "prompt")


def calibration_windows(
    tokenizer: Tokenizer,
    path: Path | None,
    *,
    context_length: int,
    max_tokens: int = READ_TOKENS,
) -> list[Tokens]:
    """Return the tokens of a calibration text in windows [n], at most 512 tokens each.

    They are the first 8,192 or more. Fewer are short windows spread over these, so that they have a part of
    everything in a mixed text.

    Each window begins as a text does, for example with the token that begins a sequence: models that were
    trained with it, such as Gemma 3, have other activations and predictions without.

    Args:
        tokenizer: the tokenizer of the model.
        path: plain text; or, if it ends in .jsonl, one sample per line: a string, or an object with ``text``
            or ``prompt``. None takes a built-in text of Python and English.
        context_length: maximum length of a window.
        max_tokens: maximum number of tokens.

    Raises:
        UsageError: the file is empty or not text, or a line has another format.
    """
    source = path or CALIBRATION_TEXT
    beginning, most = tokenizer.beginning, max(max_tokens, READ_TOKENS)
    length = WINDOW if max_tokens == most else SHORT_WINDOW
    window = max(1, min(length, context_length, max_tokens) - len(beginning))
    windows: list[Tokens] = []
    count = 0
    for sample in _samples(source):
        tokens = tokenizer.encode(sample, add_special_tokens=False)[: most - count]
        parts = [beginning + tokens[start : start + window] for start in range(0, len(tokens), window)]
        windows += [np.array(part, np.int64) for part in parts]
        count += len(tokens)
        if count >= most:
            break
    if not count:
        raise UsageError(f"calibration text {source} is empty; at least {MIN_TOKENS} tokens are needed")
    return windows if count <= max_tokens else _spread(windows, max_tokens)


def _spread(windows: list[Tokens], max_tokens: int) -> list[Tokens]:
    """Return evenly spaced windows of at most so many tokens together, and of the first one at least."""
    sizes = sum(map(len, windows))
    number = max(1, len(windows) * max_tokens // sizes)
    chosen = [windows[index * len(windows) // number] for index in range(number)]
    while len(chosen) > 1 and sum(map(len, chosen)) > max_tokens:
        chosen.pop()
    return chosen


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

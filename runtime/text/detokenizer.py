"""Tokens to text, one token at a time."""

from __future__ import annotations

from collections.abc import Sequence

from .tokenizer import Tokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

# A run of tokens that never forms whole characters is given out as it stands after this many.
_MOST_PENDING = 48


class Detokenizer:
    """Incremental decoding that equals decoding everything at once.

    Prefix offsets, as in Hugging Face TGI: a window of tokens since the last but one character border is
    decoded with and without the newest; the difference is the new text. Text that ends inside a character is
    held back until the rest of its bytes arrives.

    Args:
        tokenizer: decodes.
        context: the last tokens before the first one pushed, so that its leading space is not lost.
        skip_special_tokens: leave special tokens out.
    """

    def __init__(
        self, tokenizer: Tokenizer, context: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._window = [token for token in context if token not in self._skip]
        self._given = self._decode(self._window)  # the window's text that is out already
        self._read = len(self._window)  # tokens of the window that made it

    def push(self, token_id: int) -> str:
        """Add a token; return the text that is now certain."""
        if token_id in self._skip:
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        pending = len(self._window) - self._read
        if text.endswith(_REPLACEMENT) and pending < _MOST_PENDING:
            return ""
        new = text[len(self._given) :]
        if new:  # a token without text of its own, such as a lone word border, must stay with the next one
            self._window = self._window[self._read :]
            self._given = self._decode(self._window)
            self._read = len(self._window)
        elif pending >= _MOST_PENDING:  # tokens without text must not make the window, and each step, longer
            del self._window[self._read :]
        return new

    def end(self) -> str:
        """Return what is still held back."""
        text = self._decode(self._window)
        new = text[len(self._given) :]
        self._given = text
        return new

    def _decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=False)

"""Incremental detokenization: from tokens to text, one token at a time."""

from __future__ import annotations

from collections.abc import Sequence

from .tokenizer import Tokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

# After this many tokens without a complete character, the text is returned with replacement characters.
_MAX_PENDING = 48


class Detokenizer:
    """Incremental detokenizer, equal to decoding all tokens at once.

    It uses prefix offsets, as Hugging Face TGI does: a window of recent tokens is decoded with and without
    the newest token, and the difference is the new text. Text that ends inside a character is held back until
    the remaining bytes arrive.

    Args:
        tokenizer: decodes tokens.
        context: the last tokens before the first pushed one, so that its leading space is kept.
        skip_special_tokens: leave special tokens out of the text.
    """

    def __init__(
        self, tokenizer: Tokenizer, context: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._window = [token for token in context if token not in self._skip]
        self._given = self._decode(self._window)  # the returned text of the window
        self._read = len(self._window)  # number of tokens of that text

    def push(self, token_id: int) -> str:
        """Add a token; return the new text that later tokens cannot change."""
        if token_id in self._skip:
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        pending = len(self._window) - self._read
        if text.endswith(_REPLACEMENT) and pending < _MAX_PENDING:
            return ""
        new = text[len(self._given) :]
        if new:  # a token without text, such as a word boundary, must be decoded with the next one
            self._window = self._window[self._read :]
            self._given = self._decode(self._window)
            self._read = len(self._window)
        elif pending >= _MAX_PENDING:  # otherwise tokens without text would grow the window without bound
            del self._window[self._read :]
        return new

    def text_of(self, tokens: Sequence[int]) -> str | None:
        """Return the text of all tokens of an output, decoded in one call, before the first ``push``.

        It equals the text of ``push`` for each token and ``end``. None if some bytes form no character:
        their number of replacement characters depends on the calls.
        """
        text = self._decode([*self._window, *(token for token in tokens if token not in self._skip)])
        return None if _REPLACEMENT in text else text[len(self._given) :]

    def end(self) -> str:
        """Return the text that was held back."""
        text = self._decode(self._window)
        new = text[len(self._given) :]
        self._given = text
        return new

    def _decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=False)

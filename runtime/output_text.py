"""The text of one request as its tokens arrive."""

from __future__ import annotations

from collections.abc import Sequence

from .detokenizer import Detokenizer
from .sampling_params import SamplingParams
from .stop_strings import StopStrings
from .tokenizer import Tokenizer

# Enough for a tokenizer that joins words, and for a character of several tokens.
_CONTEXT = 6


class OutputText:
    """Detokenizer and stop strings in a row; ``text`` never holds a beginning of a stop string.

    Args:
        tokenizer: decodes.
        prompt_token_ids: the text continues these.
        params: stop strings and what to leave out.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        self.text = ""
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(
            tokenizer, prompt_token_ids[-_CONTEXT:], skip_special_tokens=params.skip_special_tokens
        )
        self._stops = StopStrings(params.stop, include=params.include_stop_str_in_output)
        self._ended = False

    def push(self, token_id: int, *, check_stop: bool) -> str | None:
        """Add a token; return the stop string that it completed."""
        new, stop = self._stops.push(self._detokenizer.push(token_id), check=check_stop)
        self.text += new
        self._ended = stop is not None
        return stop

    def end(self) -> None:
        """Give out what was held back, unless a stop string ended the text."""
        if not self._ended:
            self._ended = True
            new, stop = self._stops.push(self._detokenizer.end())
            self.text += new if stop else new + self._stops.end()

    def token_text(self, token_id: int) -> str:
        """The text of one token on its own."""
        return self._tokenizer.decode([token_id], skip_special_tokens=False)

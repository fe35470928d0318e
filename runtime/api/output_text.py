"""The text of one request as its tokens arrive."""

from __future__ import annotations

from collections.abc import Sequence

from ..text.detokenizer import Detokenizer
from ..text.parsers.base import MessageParser
from ..text.stop_strings import StopStrings
from ..text.tokenizer import Tokenizer
from ..types.outputs import ToolCall
from ..types.sampling_params import SamplingParams

# Enough for a tokenizer that joins words, and for a character of several tokens.
_CONTEXT = 6


class OutputText:
    """Detokenizer and stop strings in a row; ``text`` never holds a beginning of a stop string.

    Args:
        tokenizer: decodes.
        prompt_token_ids: the text continues these.
        params: stop strings and what to leave out.
        parser: takes an answer apart; None leaves it whole.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        parser: MessageParser | None = None,
    ) -> None:
        self._text = ""
        self._parser = parser
        self._tokenizer = tokenizer
        skip = params.skip_special_tokens and not (parser is not None and parser.needs_special_tokens)
        self._detokenizer = Detokenizer(tokenizer, prompt_token_ids[-_CONTEXT:], skip_special_tokens=skip)
        self._stops = StopStrings(params.stop, include=params.include_stop_str_in_output)
        self._ended = False

    @property
    def text(self) -> str:
        """All of it, or the answer's content."""
        return self._text if self._parser is None else self._parser.message.content.text

    @property
    def reasoning_content(self) -> str | None:
        """The answer's reasoning, None if it has none."""
        return None if self._parser is None else self._parser.message.reasoning.text or None

    @property
    def tool_calls(self) -> list[ToolCall]:
        """The answer's tool calls so far."""
        return [] if self._parser is None else self._parser.message.tool_calls.copy()

    def push(self, token_id: int, *, check_stop: bool) -> str | None:
        """Add a token; return the stop string that it completed."""
        new, stop = self._stops.push(self._detokenizer.push(token_id), check=check_stop)
        self._add(new)
        self._ended = stop is not None
        return stop

    def end(self) -> None:
        """Give out what was held back, unless a stop string ended the text."""
        if not self._ended:
            self._ended = True
            new, stop = self._stops.push(self._detokenizer.end())
            self._add(new if stop else new + self._stops.end())
        if self._parser is not None:
            self._parser.end()

    def _add(self, new: str) -> None:
        if self._parser is None:
            self._text += new
        else:
            self._parser.push(new)

    def token_text(self, token_id: int) -> str:
        """The text of one token on its own."""
        return self._tokenizer.decode([token_id], skip_special_tokens=False)

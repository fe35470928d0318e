"""The text of one request as its tokens arrive."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

from ..text.detokenizer import Detokenizer
from ..text.parsers.base import MessageParser
from ..text.stop_strings import StopStrings
from ..text.tokenizer import Tokenizer
from ..types.outputs import ToolCall
from ..types.sampling_params import SamplingParams

# Enough for a tokenizer that joins words, and for a character of several tokens.
_CONTEXT = 6


class TextSpan(NamedTuple):
    """The text of some tokens, taken apart."""

    text: str
    reasoning_content: str | None
    tool_calls: list[ToolCall]


class _Understood(NamedTuple):
    """How much of a message had been understood after some pieces of text."""

    content: int = 0
    reasoning: int = 0
    tool_calls: int = 0


class OutputText:
    """Detokenizer, stop strings and message parser in a row.

    Only stop strings need the text while tokens are generated. Without them, ``push`` and ``end`` note what
    came, and the thread that reads the text decodes it. Messages are always parsed by the reader. Each piece
    of text is made once. ``push`` and ``end`` are for one thread, everything else is thread-safe.

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
        self._parser = parser
        self._tokenizer = tokenizer
        skip = params.skip_special_tokens and not (parser is not None and parser.needs_special_tokens)
        self._detokenizer = Detokenizer(tokenizer, prompt_token_ids[-_CONTEXT:], skip_special_tokens=skip)
        self._stops = StopStrings(params.stop, include=params.include_stop_str_in_output)
        self._eager = bool(params.stop)
        self._tokens: list[int] = []
        self._pieces: list[str] = []  # of text, one a token, and at the end what was held back
        self._ended = self._stopped = False
        self._understood = [_Understood()]  # before each piece, and after the last that was parsed
        self._fault: Exception | None = None
        self._reading = threading.Lock()

    @property
    def mark(self) -> int:
        """How many pieces of text the tokens so far make; what held-back text is left comes last."""
        return len(self._tokens) + self._ended

    @property
    def text(self) -> str:
        """All of it, or the answer's content."""
        return self.span(0, self.mark).text

    def push(self, token_id: int, *, check_stop: bool) -> str | None:
        """Add a token; return the stop string that it completed."""
        self._tokens.append(token_id)
        if not self._eager:
            return None
        new, stop = self._stops.push(self._detokenizer.push(token_id), check=check_stop)
        self._pieces.append(new)
        self._stopped = stop is not None
        return stop

    def end(self) -> None:
        """No more tokens will come: what is held back belongs to the text, unless a stop string ended it."""
        if not self._ended:
            if self._eager:
                self._pieces.append("" if self._stopped else self._rest())
            self._ended = True

    def catch_up(self, mark: int) -> None:
        """Make the text up to a mark, as far as it is missing.

        Raises:
            Exception: the tokenizer or the parser failed; the same again from then on.
        """
        with self._reading:
            if self._fault is not None:
                raise self._fault
            try:
                self._decode(mark)
                if self._parser is not None:
                    self._parse(self._parser, mark)
            except Exception as error:
                self._fault = error
                raise

    def span(self, start: int, stop: int) -> TextSpan:
        """The text between two marks.

        Raises:
            Exception: see ``catch_up``.
        """
        self.catch_up(stop)
        if self._parser is None:
            return TextSpan("".join(self._pieces[start:stop]), None, [])
        message = self._parser.message
        begin, end = self._understood[start], self._understood[stop]
        return TextSpan(
            message.content.between(begin.content, end.content),
            message.reasoning.between(begin.reasoning, end.reasoning) or None,
            message.tool_calls[begin.tool_calls : end.tool_calls],
        )

    def token_text(self, token_id: int) -> str:
        """The text of one token on its own."""
        return self._tokenizer.decode([token_id], skip_special_tokens=False)

    def _decode(self, mark: int) -> None:
        pieces = self._pieces
        while len(pieces) < mark:  # never where there are stop strings
            at_end = len(pieces) == len(self._tokens)
            pieces.append(self._rest() if at_end else self._detokenizer.push(self._tokens[len(pieces)]))

    def _rest(self) -> str:
        new, stop = self._stops.push(self._detokenizer.end())
        return new if stop else new + self._stops.end()

    def _parse(self, parser: MessageParser, mark: int) -> None:
        while len(self._understood) <= mark:
            piece = len(self._understood) - 1
            parser.push(self._pieces[piece])
            if piece == len(self._tokens):
                parser.end()
            message = parser.message
            self._understood.append(
                _Understood(message.content.mark, message.reasoning.mark, len(message.tool_calls))
            )

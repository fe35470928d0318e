"""The text of one output, made from its tokens as they arrive."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from typing import NamedTuple

from ..text.detokenizer import Detokenizer
from ..text.parsers.base import MessageParser
from ..text.stop_strings import StopStrings
from ..text.tokenizer import Tokenizer
from ..types.outputs import ToolCall, merged_calls
from ..types.sampling_params import SamplingParams

# Prompt tokens given to the detokenizer: enough for tokenizers that join words, and characters of several
# tokens.
_CONTEXT = 6


class TextSpan(NamedTuple):
    """A section of the output: text, reasoning and tool calls."""

    text: str
    reasoning_content: str | None
    tool_calls: list[ToolCall]
    reasoning_tokens: int = 0  # tokens that added to the reasoning


class _Parsed(NamedTuple):
    """How much of a message was parsed after some pieces of text."""

    content: int = 0
    reasoning: int = 0
    tool_calls: int = 0


class OutputText:
    """A pipeline of detokenizer, stop strings and message parser.

    Only stop strings need the text while tokens are generated. Without them, ``push`` and ``end`` record the
    tokens, and the thread that reads the text decodes them: in one call if it reads only the whole text, else
    token by token. The reader's thread always parses messages. Each piece of text is made once. ``push`` and
    ``end`` belong to one thread; everything else is thread-safe.

    Args:
        tokenizer: decodes tokens.
        prompt_token_ids: the tokens before the output.
        params: stop strings, and whether special tokens are left out.
        parser: parses the answer; None makes all of it text.
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
        self._pieces: list[str] = []  # the text of each token, and finally the text that was held back
        self._whole: str | None = None  # the text of all tokens, decoded in one call
        self._ended = self._stopped = False
        self._parsed = [_Parsed()]  # before each piece, and after the last parsed one
        self._fault: Exception | None = None
        self._reading = threading.Lock()

    @property
    def mark(self) -> int:
        """The number of pieces of text so far: one per token, and one for held-back text at the end."""
        return len(self._tokens) + self._ended

    @property
    def text(self) -> str:
        """The whole text; with a parser, the content of the answer."""
        return self.span(0, self.mark).text

    def push(self, token_id: int, *, check_stop: bool) -> str | None:
        """Add a token; return the stop string that it completed, if any."""
        self._tokens.append(token_id)
        if not self._eager:
            return None
        new, stop = self._stops.push(self._detokenizer.push(token_id), check=check_stop)
        self._pieces.append(new)
        self._stopped = stop is not None
        return stop

    def end(self) -> None:
        """Note that no more tokens follow; release held-back text unless a stop string ended the text."""
        if not self._ended:
            if self._eager:
                self._pieces.append("" if self._stopped else self._rest())
            self._ended = True

    def catch_up(self, mark: int) -> None:
        """Make the missing text up to a mark.

        Raises:
            Exception: the tokenizer or the parser failed; later calls raise the same error.
        """
        self._make(0, mark)

    def _make(self, start: int, mark: int) -> None:
        if self._parser is None and self._fault is None and 0 < mark <= len(self._pieces):
            return  # made before
        with self._reading:
            if self._fault is not None:
                raise self._fault
            try:
                if start == 0 and self._decoded_at_once(mark):
                    return
                self._decode(mark)
                if self._parser is not None:
                    self._parse(self._parser, mark)
            except Exception as error:
                self._fault = error
                raise

    def span(self, start: int, stop: int) -> TextSpan:
        """Return the text between two marks.

        Raises:
            Exception: see ``catch_up``.
        """
        self._make(start, stop)
        if self._whole is not None and start == 0 and stop == self.mark:
            return TextSpan(self._whole, None, [])
        if self._parser is None:
            return TextSpan("".join(self._pieces[start:stop]), None, [])
        message = self._parser.message
        begin, end = self._parsed[start], self._parsed[stop]
        return TextSpan(
            message.content.between(begin.content, end.content),
            message.reasoning.between(begin.reasoning, end.reasoning) or None,
            merged_calls(message.tool_calls[begin.tool_calls : end.tool_calls]),
            sum(after.reasoning > before.reasoning for before, after in
                itertools.pairwise(self._parsed[start : min(stop, len(self._tokens)) + 1])),
        )  # fmt: skip

    def token_text(self, token_id: int) -> tuple[str, tuple[int, ...] | None]:
        """Return the text of a single token, and its bytes if it holds a part of a character."""
        text = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return text, self._tokenizer.partial_bytes(token_id, text)

    def _decoded_at_once(self, mark: int) -> bool:
        """Decode a finished output in one call if nothing of it was decoded before; return whether it is."""
        if not self._ended or mark != self.mark:
            return False
        if self._whole is None and not self._pieces and self._parser is None and not self._eager:
            self._whole = self._detokenizer.text_of(self._tokens)
        return self._whole is not None

    def _decode(self, mark: int) -> None:
        pieces = self._pieces
        while len(pieces) < mark:  # with stop strings, ``push`` made all pieces
            at_end = len(pieces) == len(self._tokens)
            pieces.append(self._rest() if at_end else self._detokenizer.push(self._tokens[len(pieces)]))

    def _rest(self) -> str:
        new, stop = self._stops.push(self._detokenizer.end())
        return new if stop else new + self._stops.end()

    def _parse(self, parser: MessageParser, mark: int) -> None:
        while len(self._parsed) <= mark:
            piece = len(self._parsed) - 1
            parser.push(self._pieces[piece])
            if piece == len(self._tokens):
                parser.end()
            message = parser.message
            self._parsed.append(
                _Parsed(message.content.mark, message.reasoning.mark, len(message.tool_calls))
            )

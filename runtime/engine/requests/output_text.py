"""The text of one output, made from its tokens as they arrive."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ...text.detokenizer import Detokenizer
from ...text.parsers.base import MessageParser
from ...text.stop_strings import StopStrings
from ...text.tokenizer import Tokenizer
from ...types.outputs import ToolCall, merged_calls
from ...types.sampling_params import SamplingParams

# Prompt tokens given to the detokenizer: enough for tokenizers that join words, and characters of several
# tokens.
_CONTEXT = 6


class OutputPart(NamedTuple):
    """The next part of the output: text, reasoning and tool calls."""

    text: str = ""
    reasoning: str = ""
    tool_calls: Sequence[ToolCall] = ()
    reasoning_tokens: int = 0  # tokens that added to the reasoning


class OutputText:
    """A pipeline of detokenizer, stop strings and message parser.

    Only stop strings need the text while tokens are generated. Without them, ``push`` and ``end`` record the
    tokens, and the thread that reads the text decodes them: in one call if it takes the whole text at once,
    else token by token. The reader's thread always parses messages. So the engine's thread, which calls
    ``push`` and ``end``, and one reader's thread, which calls ``take``, need no lock: the lists only grow.

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
        self._pieces: list[str] = []  # with stop strings: the text of each token, then what was held back
        self._stopped = self._ended = self._cut = False
        self._taken = 0  # tokens whose text was taken
        self._whole = False  # whether the held-back text was taken too

    def push(self, token_id: int, *, check_stop: bool) -> str | None:
        """Add a token; return the stop string that it completed, if any."""
        stop = None
        if self._eager:
            new, stop = self._stops.push(self._detokenizer.push(token_id), check=check_stop)
            self._pieces.append(new)
            self._stopped = stop is not None
        self._tokens.append(token_id)
        return stop

    def end(self, *, cut: bool = False) -> None:
        """Note that no more tokens follow; release held-back text unless a stop string ended the text.

        Args:
            cut: see ``MessageParser.end``.
        """
        self._cut = cut
        if self._eager and not self._ended:
            self._pieces.append("" if self._stopped else self._rest())
        self._ended = True

    def take(self, limit: int, *, ended: bool) -> OutputPart:
        """Return the text of the first ``limit`` tokens that no earlier call returned.

        Args:
            limit: a number of tokens; fewer may have been pushed, since end tokens have no text.
            ended: whether ``end`` was called before; then held-back text is part of the result.

        Raises:
            Exception: the tokenizer or the parser failed; nothing can be taken any more.
        """
        start, stop = self._taken, min(limit, len(self._tokens))
        last = ended and not self._whole
        self._taken, self._whole = stop, ended
        if self._eager:
            pieces = self._pieces[start:stop] + (self._pieces[len(self._tokens) :] if last else [])
        else:
            if last and start == 0 and self._parser is None:
                text = self._detokenizer.text_of(self._tokens[:stop])
                if text is not None:
                    return OutputPart(text)
            pieces = [self._detokenizer.push(token) for token in self._tokens[start:stop]]
            if last:
                pieces.append(self._rest())
        if self._parser is None:
            return OutputPart("".join(pieces))
        return self._parsed(self._parser, pieces, stop - start, last=last, cut=self._cut)

    def token_text(self, token_id: int) -> tuple[str, tuple[int, ...] | None]:
        """Return the text of a single token, and its bytes if it holds a part of a character."""
        text = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return text, self._tokenizer.partial_bytes(token_id, text)

    def _rest(self) -> str:
        new, stop = self._stops.push(self._detokenizer.end())
        return new if stop else new + self._stops.end()

    @staticmethod
    def _parsed(
        parser: MessageParser, pieces: Sequence[str], tokens: int, *, last: bool, cut: bool
    ) -> OutputPart:
        """Parse pieces, of which the first ``tokens`` are of one token each; return what they added."""
        message = parser.message
        content, calls = message.content.mark, len(message.tool_calls)
        reasoning, thoughts = message.reasoning.mark, [message.reasoning.mark]
        for piece in pieces:
            parser.push(piece)
            thoughts.append(message.reasoning.mark)
        if last:
            parser.end(cut=cut)
        return OutputPart(
            message.content.between(content, message.content.mark),
            message.reasoning.between(reasoning, message.reasoning.mark),
            merged_calls(message.tool_calls[calls:]),
            sum(thoughts[i + 1] > thoughts[i] for i in range(tokens)),
        )

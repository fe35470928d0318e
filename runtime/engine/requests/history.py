"""The growing output of one request, and immutable views of it for readers.

A view stores only how far the output was, so publishing one has a constant cost. A reader's thread makes the
fields that it reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from ....errors import RequestFailedError
from ...types.outputs import Logprob, ToolCall
from ..sampling.sampler import TokenLogprob


class Span(Protocol):
    """A section of the output text; implemented in ``runtime/api/output_text.py``."""

    @property
    def text(self) -> str:
        """The text; in a chat, the content of the answer."""

    @property
    def reasoning_content(self) -> str | None:
        """The reasoning of the answer."""

    @property
    def tool_calls(self) -> list[ToolCall]:
        """The tool calls of the answer."""

    @property
    def reasoning_tokens(self) -> int:
        """The number of tokens that added to the reasoning."""


class OutputText(Protocol):
    """Turns tokens into text; implemented in ``runtime/api/output_text.py``."""

    @property
    def mark(self) -> int:
        """The current position in the text."""

    def push(self, token_id: int, *, check_stop: bool) -> str | None:
        """Add a token; return the stop string that it completed, if any."""

    def end(self) -> None:
        """Note that no more tokens follow."""

    def catch_up(self, mark: int) -> None:
        """Make the missing text up to a mark."""

    def span(self, start: int, stop: int) -> Span:
        """Return the text between two marks."""

    def token_text(self, token_id: int) -> tuple[str, tuple[int, ...] | None]:
        """Return the text of a single token, and its bytes if it holds a part of a character."""


class _Mark(NamedTuple):
    tokens: int = 0
    text: int = 0


class History:
    """Tokens, log-probabilities and text of one output. Its lists only grow, so any thread may read them.

    Args:
        text: makes the text; None leaves it empty.
        logprobs: whether log-probabilities are reported.
    """

    def __init__(self, text: OutputText | None, *, logprobs: bool) -> None:
        self.text = text
        self.token_ids: list[int] = []
        self.logprobs: list[Sequence[TokenLogprob]] | None = [] if logprobs else None
        self.cumulative_logprob = 0.0

    def add(self, token: int, logprobs: Sequence[TokenLogprob]) -> None:
        """Append a token; the first of ``logprobs`` is its own."""
        self.token_ids.append(token)
        if self.logprobs is not None:
            self.logprobs.append(logprobs)
            self.cumulative_logprob += logprobs[0].logprob if logprobs else 0.0

    def state(self) -> HistoryPart:
        """Return a view of everything until now."""
        return HistoryPart(self, _Mark(), _Mark(len(self.token_ids), self.text.mark if self.text else 0))

    def reported(self, logprobs: Sequence[TokenLogprob]) -> dict[int, Logprob]:
        """Return log-probabilities by token id, with the text of each token."""
        return {one.token_id: Logprob(one.token_id, one.logprob, one.rank, *self._token_text(one.token_id))
                for one in logprobs}  # fmt: skip

    def _token_text(self, token: int) -> tuple[str, tuple[int, ...] | None]:
        if self.text is None:
            return "", None
        try:
            return self.text.token_text(token)
        except Exception as error:
            raise RequestFailedError(f"token {token} cannot be decoded to text: {error!r}") from error


@dataclass(frozen=True, slots=True)
class HistoryPart:
    """The output between two marks; the ``Record`` of a ``CompletionOutput``."""

    history: History
    start: _Mark
    stop: _Mark

    def after(self, earlier: HistoryPart) -> HistoryPart:
        """Return the part that follows another part."""
        return HistoryPart(self.history, earlier.stop, self.stop)

    def catch_up(self) -> None:
        """Make the missing text.

        Raises:
            Exception: the tokenizer or the parser failed.
        """
        if self.history.text is not None:
            self.history.text.catch_up(self.stop.text)

    def fields(self, name: str) -> dict[str, Any]:
        """See ``Record``."""
        history, start, stop = self.history, self.start, self.stop
        if name == "token_ids":
            return {name: history.token_ids[start.tokens : stop.tokens]}
        if name == "logprobs":
            if history.logprobs is None:
                return {name: None}
            return {name: [history.reported(one) for one in history.logprobs[start.tokens : stop.tokens]]}
        if history.text is None:
            return {"text": "", "reasoning_content": None, "tool_calls": [], "reasoning_tokens": 0}
        span = history.text.span(start.text, stop.text)
        return {
            "text": span.text,
            "reasoning_content": span.reasoning_content,
            "tool_calls": span.tool_calls,
            "reasoning_tokens": span.reasoning_tokens,
        }

"""Everything generated for one request, which grows, and the states of it that readers get.

A state is how far the request was, so publishing one costs the same however long the request is. What a
reader asks of it is made in the reader's thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from ....errors import RequestFailedError
from ...types.outputs import Logprob, ToolCall
from ..sampling.sampler import TokenLogprob


class Span(Protocol):
    """See ``runtime/api/output_text.py``."""

    @property
    def text(self) -> str:
        """The text, or the content of an answer."""

    @property
    def reasoning_content(self) -> str | None:
        """An answer's reasoning."""

    @property
    def tool_calls(self) -> list[ToolCall]:
        """An answer's tool calls."""


class OutputText(Protocol):
    """Turns tokens into the request's text; see ``runtime/api/output_text.py``."""

    @property
    def mark(self) -> int:
        """How far the text is."""

    def push(self, token_id: int, *, check_stop: bool) -> str | None:
        """Add a token; return the stop string that it completed."""

    def end(self) -> None:
        """No more tokens will come."""

    def catch_up(self, mark: int) -> None:
        """Make the text up to a mark, as far as it is missing."""

    def span(self, start: int, stop: int) -> Span:
        """The text between two marks."""

    def token_text(self, token_id: int) -> str:
        """The text of one token on its own."""


class _Mark(NamedTuple):
    tokens: int = 0
    text: int = 0


class History:
    """Tokens, their log-probabilities and their text; lists that only grow, so any thread may read.

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
        """Take a token; its own log-probability is the first."""
        self.token_ids.append(token)
        if self.logprobs is not None:
            self.logprobs.append(logprobs)
            self.cumulative_logprob += logprobs[0].logprob if logprobs else 0.0

    def state(self) -> HistoryPart:
        """All of it until now."""
        return HistoryPart(self, _Mark(), _Mark(len(self.token_ids), self.text.mark if self.text else 0))

    def reported(self, logprobs: Sequence[TokenLogprob]) -> dict[int, Logprob]:
        """Log-probabilities by token, with the tokens' texts."""
        return {one.token_id: Logprob(one.token_id, one.logprob, one.rank, self._token_text(one.token_id))
                for one in logprobs}  # fmt: skip

    def _token_text(self, token: int) -> str:
        if self.text is None:
            return ""
        try:
            return self.text.token_text(token)
        except Exception as error:
            raise RequestFailedError(f"the text of token {token} cannot be made: {error!r}") from error


@dataclass(frozen=True, slots=True)
class HistoryPart:
    """What came between two moments; the ``Record`` of a ``CompletionOutput``."""

    history: History
    start: _Mark
    stop: _Mark

    def after(self, earlier: HistoryPart) -> HistoryPart:
        """The part that came after another."""
        return HistoryPart(self.history, earlier.stop, self.stop)

    def catch_up(self) -> None:
        """Make the text, as far as it is missing.

        Raises:
            Exception: the tokenizer or the parser failed.
        """
        if self.history.text is not None:
            self.history.text.catch_up(self.stop.text)

    def field(self, name: str) -> Any:
        """See ``Record``."""
        history, start, stop = self.history, self.start, self.stop
        if name == "token_ids":
            return history.token_ids[start.tokens : stop.tokens]
        if name == "logprobs":
            if history.logprobs is None:
                return None
            return [history.reported(one) for one in history.logprobs[start.tokens : stop.tokens]]
        if history.text is None:
            return {"text": "", "reasoning_content": None, "tool_calls": []}[name]
        return getattr(history.text.span(start.text, stop.text), name)

"""Logits processors of one request, one class for each option."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ....errors import RequestFailedError
from ....records import dataclass
from ...types.sampling_params import LogitsFunction

Logits = npt.NDArray[np.float32]  # [vocab_size]


class LogitsProcessor(Protocol):
    """Changes the logits of one request, and observes its tokens."""

    @property
    def lowers(self) -> bool:
        """Whether it lowers logits or leaves them, next time, and changes none because of another one."""

    def observe(self, token: int) -> None:
        """Record a generated token."""

    def apply(self, logits: Logits) -> None:
        """Change ``logits`` in place; -inf forbids a token."""


class LogitBias:
    """Adds a bias to the logits of some tokens, as ``logit_bias`` of OpenAI's API."""

    def __init__(self, bias: Mapping[int, float]) -> None:
        self._ids = np.array(list(bias), np.int64)
        self._values = np.array(list(bias.values()), np.float32)
        self.lowers = bool((self._values <= 0).all())

    def observe(self, token: int) -> None:
        """Do nothing."""

    def apply(self, logits: Logits) -> None:
        """Add the biases."""
        logits[self._ids] += self._values


class AllowedTokens:
    """Forbids all tokens except the given ones."""

    lowers = True

    def __init__(self, token_ids: Iterable[int]) -> None:
        self._ids = np.array(sorted(set(token_ids)), np.int64)

    def observe(self, token: int) -> None:
        """Do nothing."""

    def apply(self, logits: Logits) -> None:
        """Set all other logits to -inf."""
        kept = logits[self._ids]
        logits.fill(-np.inf)
        logits[self._ids] = kept


class MinTokens:
    """Forbids end tokens; ``SamplingState`` removes it after ``min_tokens`` tokens."""

    lowers = True

    def __init__(self, end_token_ids: Collection[int]) -> None:
        self._ids = np.array(sorted(end_token_ids), np.int64)

    def observe(self, token: int) -> None:
        """Do nothing."""

    def apply(self, logits: Logits) -> None:
        """Set the logits of end tokens to -inf."""
        logits[self._ids[self._ids < len(logits)]] = -np.inf


@dataclass(frozen=True, slots=True)
class ThoughtMarks:
    """The marks of a thought at the beginning of an answer.

    Args:
        begun: whether the answer begins in a thought; else it may begin with the opening mark.
        opening: a text.
        closing: a text.
        closing_ids: the tokens of the closing mark.
        message_ids: the tokens of a text that comes before it where a thought is ended.
        text_of: returns the text of a token.
    """

    begun: bool
    opening: str
    closing: str
    closing_ids: tuple[int, ...]
    text_of: Callable[[int], str]
    message_ids: tuple[int, ...] = ()


class ThoughtBudget:
    """Ends a thought after so many tokens: the closing mark is then the only way to go on.

    Args:
        budget: tokens between the marks.
        marks: of the thought.
    """

    def __init__(self, budget: int, marks: ThoughtMarks) -> None:
        self._left, self._marks = budget, marks
        self._text, self._begun, self._done = "", marks.begun, False
        self._forced = deque[int]()
        self._told = not marks.message_ids

    @property
    def lowers(self) -> bool:
        """Whether the thought is not ended by the next token: the token that must come may be raised."""
        return self._done or not self._begun or self._left > 0

    @property
    def thinks(self) -> bool:
        """Whether the answer is in a thought, or may begin with one."""
        return not self._done

    def end(self) -> None:
        """End the thought, or the one that follows, with the next token."""
        self._left = 0

    def observe(self, token: int) -> None:
        """Follow the thought; other text ends the watch."""
        if self._done:
            return
        marks = self._marks
        self._text += marks.text_of(token)
        if self._begun:
            self._left -= 1
            self._done = marks.closing in self._text
            self._text = self._text[-len(marks.closing) :]
        elif marks.opening in self._text:
            self._begun, self._text = True, ""
        else:
            self._done = not marks.opening.startswith(self._text.lstrip())
        if self._forced and self._forced.popleft() != token:
            self._forced.clear()

    def apply(self, logits: Logits) -> None:
        """Forbid all tokens but the next one of the closing mark, if the budget is spent."""
        if self.lowers:
            return
        if not self._forced and not self._told:
            self._forced.extend(self._marks.message_ids)
            self._told = True
        if not self._forced:
            self._forced.extend(self._marks.closing_ids[self._written() :])
        kept = logits[self._forced[0]]
        logits.fill(-np.inf)
        logits[self._forced[0]] = kept if np.isfinite(kept) else 0.0

    def _written(self) -> int:
        """Return how many tokens of the closing mark are the end of the text."""
        texts = [self._marks.text_of(token) for token in self._marks.closing_ids]
        counts = range(len(texts) - 1, 0, -1)
        return next((count for count in counts if self._text.endswith("".join(texts[:count]))), 0)


class BadWords:
    """Forbids the last token of a bad word if its other tokens were just generated."""

    lowers = True

    def __init__(self, sequences: Iterable[Sequence[int]]) -> None:
        self._by_last: dict[int, list[tuple[int, ...]]] = {}  # last but one token -> sequences
        self._always: list[int] = []
        longest = 1
        for sequence in sequences:
            if len(sequence) == 1:
                self._always.append(sequence[0])
            else:
                self._by_last.setdefault(sequence[-2], []).append(tuple(sequence))
            longest = max(longest, len(sequence))
        self._keep = longest - 1
        self._tail: list[int] = []

    def observe(self, token: int) -> None:
        """Record the last tokens."""
        self._tail = [*self._tail, token][-self._keep :] if self._keep else []

    def apply(self, logits: Logits) -> None:
        """Set the logits of tokens that would complete a bad word to -inf."""
        logits[self._always] = -np.inf
        for sequence in self._by_last.get(self._tail[-1], ()) if self._tail else ():
            rest = list(sequence[:-1])
            if self._tail[-len(rest) :] == rest:
                logits[sequence[-1]] = -np.inf


class NoRepeatNgram:
    """Forbids tokens that would repeat an n-gram of prompt or output (arXiv:1705.04304)."""

    lowers = True

    def __init__(self, size: int, token_ids: Iterable[int]) -> None:
        self._size = size
        self._tail: tuple[int, ...] = ()
        self._followers: dict[tuple[int, ...], list[int]] = {}
        for token in token_ids:
            self.observe(int(token))

    def observe(self, token: int) -> None:
        """Record which token followed the last n - 1."""
        if len(self._tail) == self._size - 1:
            self._followers.setdefault(self._tail, []).append(token)
        self._tail = (*self._tail, token)[-(self._size - 1) :] if self._size > 1 else ()

    def apply(self, logits: Logits) -> None:
        """Set the logits of tokens that followed the last n - 1 tokens before to -inf."""
        logits[self._followers.get(self._tail, [])] = -np.inf


class CustomFunctions:
    """Runs a request's own functions, in order."""

    lowers = False

    def __init__(self, functions: Sequence[LogitsFunction]) -> None:
        self._functions = functions
        self._token_ids: list[int] = []

    def observe(self, token: int) -> None:
        """Record the token for the functions."""
        self._token_ids.append(token)

    def apply(self, logits: Logits) -> None:
        """Call each function and replace the logits by its result.

        Raises:
            RequestFailedError: a function raised, or returned an array of another shape.
        """
        for function in self._functions:
            try:
                changed = np.asarray(function(self._token_ids.copy(), logits), np.float32)
                if changed.shape != logits.shape:
                    raise ValueError(f"it returned shape {changed.shape} for logits {logits.shape}")
            except Exception as error:
                raise RequestFailedError(f"logits processor {function!r} failed: {error!r}") from error
            logits[:] = changed

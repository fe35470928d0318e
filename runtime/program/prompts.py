"""A conversation as a prompt: a text, or messages."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from typing import Any, Protocol

from ...errors import CarryallError
from ...records import dataclass
from ..types.outputs import ToolCall, Usage
from .parts import Place

Json = dict[str, Any]


class ProgramCancelledError(CarryallError):
    """The program was cancelled before the model had answered."""

    def __init__(self) -> None:
        super().__init__("the program was cancelled")


class Cancellation:
    """Whether a program was cancelled, and what ends its requests then. Thread-safe."""

    def __init__(self) -> None:
        self._set = False
        self._ends: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    def is_set(self) -> bool:
        """Return whether the program was cancelled."""
        return self._set

    def check(self) -> None:
        """Check that the program goes on.

        Raises:
            ProgramCancelledError: it was cancelled.
        """
        if self._set:
            raise ProgramCancelledError

    def set(self) -> None:
        """Cancel the program."""
        with self._lock:
            self._set = True
            for end in self._ends:
                end()

    @contextlib.contextmanager
    def ending(self, end: Callable[[], None]) -> Iterator[None]:
        """Call ``end``, which must not wait, if the program is cancelled within the context.

        Raises:
            ProgramCancelledError: it was cancelled before.
        """
        with self._lock:
            if self._set:
                raise ProgramCancelledError
            self._ends.append(end)
        try:
            yield
        finally:
            with self._lock:
                self._ends.remove(end)


@dataclass(frozen=True, slots=True)
class PlaceAnswer:
    """What the model wrote in a place.

    Args:
        text: the answer, without thoughts and calls; of ``select`` the choice.
        reasoning: its thoughts.
        tool_calls: the functions that it calls.
        finish_reason: ``stop``, or ``length`` if ``max_tokens`` cut it.
        usage: tokens of the prompt, those of them found in the cache, and generated tokens.
        scores: the mean log-probability of each choice of ``select``; empty for ``gen``.
    """

    text: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: str = "stop"
    usage: Usage = field(default_factory=lambda: Usage(0, 0, 0))
    scores: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is before a place.

    Args:
        text: of a conversation without roles; None for a chat.
        messages: of a chat, in OpenAI's form.
        continues: whether the last message is one of the assistant that the model goes on with.
    """

    text: str | None = None
    messages: Sequence[Json] = ()
    continues: bool = False


class Model(Protocol):
    """Where programs run: a model in this process, or a service. Thread-safe."""

    def generate(
        self, prompt: Prompt, place: Place, take: Callable[[str], None], cancelled: Cancellation
    ) -> PlaceAnswer:
        """Return what the model writes in a place.

        Args:
            prompt: what is before it.
            place: its options.
            take: called with each new piece of the text.
            cancelled: ends the request when it is set.

        Raises:
            ProgramCancelledError: ``cancelled`` was set.
        """
        ...

    def select(self, prompt: Prompt, place: Place, cancelled: Cancellation) -> PlaceAnswer:
        """Return the likeliest choice of a place, by the mean log-probability of its tokens.

        Raises:
            ProgramCancelledError: ``cancelled`` was set.
        """
        ...


def chosen(choices: Sequence[str], scores: Sequence[float], usage: Usage) -> PlaceAnswer:
    """Return the answer of ``select``: the choice of the largest score, the first of equal ones."""
    by_choice = dict(zip(choices, scores, strict=True))
    return PlaceAnswer(max(choices, key=lambda choice: by_choice[choice]), usage=usage, scores=by_choice)

"""Split the deltas of a chat answer into parts: reasoning, text, and pieces of tool calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Literal

from ....records import dataclass
from .chat import Conversation
from .messages import Delta, GenerationRequest


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A piece of a tool call.

    Args:
        index: the index of the call in the answer.
        arguments: the next piece of the arguments' JSON text.
        id: the call's id, in its first piece only.
        name: the function's name, in the first piece only.
    """

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class TextPart:
    """A piece of the reasoning or of the answer text."""

    kind: Literal["reasoning", "text"]
    text: str


class AnswerParts:
    """Splits the deltas of one continuation into parts.

    A tool call has several pieces. The first piece has its name and id.

    Args:
        request: the request that the deltas answer.
    """

    def __init__(self, request: GenerationRequest) -> None:
        prompt = request.prompt
        self._conversation = prompt if isinstance(prompt, Conversation) else Conversation([])
        self.calls = 0  # number of tool calls that have begun
        self._ended = False  # whether no more calls may follow

    def of(self, delta: Delta) -> Iterator[TextPart | CallDelta]:
        """Yield the parts of a delta."""
        if delta.reasoning:
            yield TextPart("reasoning", delta.reasoning)
        if delta.text:
            yield TextPart("text", delta.text)
        for call in delta.tool_calls:
            if call.id and self.calls and not self._conversation.parallel_calls:
                self._ended = True
            if self._ended:
                break
            if call.id:
                yield CallDelta(self.calls, "", call.id, call.name)
                self.calls += 1
            if call.arguments:
                yield CallDelta(self.calls - 1, call.arguments)


def understood(request: GenerationRequest, choice: Delta) -> Delta:
    """Return the choice with at most 1 call if parallel calls are off."""
    prompt = request.prompt
    if isinstance(prompt, Conversation) and not prompt.parallel_calls:
        return dataclasses.replace(choice, tool_calls=choice.tool_calls[:1])
    return choice

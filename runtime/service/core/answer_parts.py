"""What an answer in a chat gains with each delta: reasoning, text, pieces of tool calls."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from .messages import Conversation, Delta, GenerationRequest
from .tool_choice import CallDelta, CallSplitter


@dataclass(frozen=True, slots=True)
class TextPart:
    """A piece of what is thought or said."""

    kind: Literal["reasoning", "text"]
    text: str


class AnswerParts:
    """Deltas of one continuation, in parts. A tool call comes in pieces, the first with its name.

    Args:
        request: what is answered.
    """

    def __init__(self, request: GenerationRequest) -> None:
        prompt = request.prompt
        self._conversation = prompt if isinstance(prompt, Conversation) else Conversation([])
        self._splitter = CallSplitter()
        self.calls = 0  # how many have begun

    def of(self, delta: Delta) -> Iterator[TextPart | CallDelta]:
        """The parts of a delta."""
        if delta.reasoning:
            yield TextPart("reasoning", delta.reasoning)
        if self._conversation.must_call:
            for piece in self._splitter.push(delta.text):
                self.calls = piece.index + 1
                yield piece
            return
        if delta.text:
            yield TextPart("text", delta.text)
        for call in delta.tool_calls:
            if self.calls and not self._conversation.parallel_calls:
                break
            yield CallDelta(self.calls, "", call.id, call.name)
            yield CallDelta(self.calls, call.arguments)
            self.calls += 1

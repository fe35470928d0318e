"""The conversation of ``carryall chat``, and of ``carryall run`` without a prompt."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import click

from ..errors import RequestError, UsageError
from ..runtime.api.llm import LLM
from ..runtime.types.sampling_params import SamplingParams
from . import generation
from .pictures import Shown

PROMPT = "> "


class ConsoleChat:
    """The messages of a conversation, and the model that answers them, with the LoRA adapter ``lora``.

    The first message has the pictures and videos ``shown``.
    """

    def __init__(
        self,
        llm: LLM,
        params: SamplingParams,
        opening: list[dict[str, str]],
        lora: str | None = None,
        shown: Sequence[Shown] = (),
    ) -> None:
        self._llm, self._params, self._opening = llm, params, opening
        self._lora, self._shown = lora, shown
        self.messages: list[dict[str, Any]] = list(opening)

    def reset(self) -> None:
        """Drop all messages except the system message."""
        self.messages = list(self._opening)

    def answer(self, message: str) -> Iterator[str]:
        """Yield the answer in pieces; a partial answer is kept in the conversation too."""
        first = len(self.messages) == len(self._opening)
        asked = [*self.messages, generation.user_message(message, self._shown if first else ())]
        said: list[str] = []
        try:
            prompt = generation.unparsed(self._llm.requests.chat_prompt(asked))
            for piece, _ in generation.stream_text(self._llm, prompt, self._params, self._lora):
                said.append(piece)
                yield piece
        finally:
            if said:
                self.messages = [*asked, {"role": "assistant", "content": "".join(said)}]

    def talk(self) -> None:
        """Answer each line of stdin on stdout, until its end or ``/exit``.

        Raises:
            UsageError: stdin is not a terminal and has no message.
        """
        message = None
        for message in _messages():
            if message == "/reset":
                self.reset()
            else:
                self._print_answer(message)
        if message is None and not sys.stdin.isatty():
            raise UsageError(
                "there is no message: stdin is no terminal and empty; give one line for each message, or a "
                "prompt: carryall run MODEL PROMPT"
            )

    def _print_answer(self, message: str) -> None:
        """Print an answer; on a terminal, Ctrl-C and invalid messages do not end the conversation."""
        try:
            for piece in self.answer(message):
                click.echo(piece, nl=False)
            click.echo()
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            click.echo()
        except RequestError as error:
            if not sys.stdin.isatty():
                raise
            click.echo(f"error: {error}", err=True)


def check_chat(llm: LLM, opening: list[dict[str, str]]) -> None:
    """Check that a model can chat.

    Raises:
        ChatTemplateError: the model has no chat template, or it does not take these messages.
    """
    llm.requests.chat_prompt([*opening, {"role": "user", "content": "?"}])


def _messages() -> Iterator[str]:
    """Yield the user's messages until the end of the input."""
    if not sys.stdin.isatty():
        yield from (line.strip() for line in sys.stdin if line.strip())
        return
    import readline  # noqa: F401 -- adds line editing to input()

    while True:
        try:
            message = input(PROMPT).strip()
        except (EOFError, KeyboardInterrupt):
            click.echo()
            return
        if message in ("/exit", "/bye"):
            return
        if message:
            yield message

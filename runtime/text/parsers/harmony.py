"""Parser of the harmony format of gpt-oss, whose messages have channels: analysis, commentary, final.

``<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...``. A recipient in
the header, ``to=functions.name``, makes a tool call. See https://github.com/openai/harmony.
"""

from __future__ import annotations

import re

from .base import MessageParser, ParsedMessage, StrippedText

_BODY = "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=(?:functions\.)?([^\s<]+)")


class HarmonyParser(MessageParser):
    """Alternates between headers and bodies."""

    def __init__(self, message: ParsedMessage) -> None:
        super().__init__(message)
        self._header: str | None = ""  # None within a body
        self._channel = ""
        self._recipient = ""
        self._arguments, self._passed = StrippedText(), 0  # of the call in progress

    def _advance(self, *, final: bool) -> bool:
        if self._header is None:
            return self._advance_body(final=final)
        text, marker = self._until(_BODY, final=final)
        self._header += text
        if marker:
            self._open(self._header)
        elif final and "<|" not in self._header:  # the message is not in this format
            self.message.content.add(self._header)
        return bool(marker)

    def _open(self, header: str) -> None:
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        self._channel = channel.group(1) if channel else "final"
        self._recipient = recipient.group(1) if recipient else ""
        self._header, self._arguments, self._passed = None, StrippedText(), 0
        if self._recipient:
            self.message.call(self._recipient, "")
        else:
            self._put("\n")

    def _advance_body(self, *, final: bool) -> bool:
        text, marker = self._until(*_ENDS, final=final)
        if self._recipient:
            self._arguments.add(text)
            self.message.continue_call(self._arguments.between(self._passed, self._arguments.mark))
            self._passed = self._arguments.mark
        else:
            self._put(text)
        if marker or final:
            self._header = ""
        return bool(marker)

    def _put(self, text: str) -> None:
        analysis = self._channel == "analysis"
        (self.message.reasoning if analysis else self.message.content).add(text)

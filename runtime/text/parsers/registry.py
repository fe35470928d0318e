"""Which parser reads the messages of a model: its chat template tells."""

from __future__ import annotations

from ....errors import UsageError
from .base import Message, MessageParser, PlainParser
from .harmony import HarmonyParser
from .hermes import HermesParser
from .llama import LlamaParser
from .mistral import MistralParser
from .think import TAGS, ThinkParser

# In order: a template that contains several markers is of the first style.
STYLES: dict[str, type[MessageParser]] = {
    "harmony": HarmonyParser,
    "mistral": MistralParser,
    "llama": LlamaParser,
    "hermes": HermesParser,
}


def message_parser(
    template: str, prompt: str = "", *, tools: bool = False, style: str | None = None
) -> MessageParser | None:
    """A parser for one message; None if there is nothing but content.

    Args:
        template: source of the chat template.
        prompt: what it made; where its end opens the reasoning, the message begins within.
        tools: whether the model may call any.
        style: a name from ``STYLES`` instead of what the template tells.

    Raises:
        UsageError: no such style.
    """
    chosen = _style(template, style)
    if chosen is HarmonyParser:
        return chosen(Message())
    answer = chosen(Message()) if chosen is not None and tools else PlainParser(Message())
    for tags in TAGS:
        if tags[1] in template:
            return ThinkParser(answer, tags, opened=prompt.rstrip().endswith(tags[0]))
    return None if isinstance(answer, PlainParser) else answer


def _style(template: str, name: str | None) -> type[MessageParser] | None:
    if name is None:
        return next((style for style in STYLES.values() if style.marker in template), None)
    if name not in STYLES:
        raise UsageError(f"there is no style of tool calls '{name}', only {', '.join(STYLES)}")
    return STYLES[name]

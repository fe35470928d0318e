"""Choose the message parser of a model by its chat template."""

from __future__ import annotations

from ....errors import UsageError
from .base import Message, MessageParser, PlainParser
from .harmony import HarmonyParser
from .hermes import HermesParser
from .llama import LlamaParser
from .mistral import MistralParser
from .think import TAGS, ThinkParser

# Ordered: if a template contains several markers, the first style is chosen.
STYLES: dict[str, type[MessageParser]] = {
    "harmony": HarmonyParser,
    "mistral": MistralParser,
    "llama": LlamaParser,
    "hermes": HermesParser,
}


def message_parser(
    template: str, prompt: str = "", *, tools: bool = False, style: str | None = None
) -> MessageParser | None:
    """Return a parser for one message; None if the whole message is content.

    Args:
        template: the source of the chat template.
        prompt: the rendered prompt; if it ends with an opening reasoning tag, the message starts inside it.
        tools: whether the request has tools.
        style: a name from ``STYLES``, in place of the template's style.

    Raises:
        UsageError: there is no such style.
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
        raise UsageError(f"there is no tool call style '{name}'; choose one of {', '.join(STYLES)}")
    return STYLES[name]

"""The format of the answers of a model, and the parser of one answer."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from ....errors import UsageError
from ..chat_template import ChatTemplate
from ..special_texts import SpecialTexts
from .answer import AnswerParser
from .base import MessageParser, ParsedMessage
from .derivation import Derived, derive
from .formats import HARMONY, NAMED, AnswerFormat
from .harmony import HarmonyParser
from .response_template import StatedFormat, stated_format

STYLES = ("harmony", *NAMED)

_MOST_TEMPLATES = 16  # of requests; a derivation takes about 0.1 s

_log = logging.getLogger(__name__)


class AnswerFormats:
    """The formats of the answers of a model's chat templates, each derived when first asked for. Thread-safe.

    Args:
        template: the chat templates.
        special: the texts of special tokens; None if there is no tokenizer.
        response_template: that of tokenizer_config.json; None if it has none.
    """

    def __init__(
        self, template: ChatTemplate, special: SpecialTexts | None = None, response_template: Any = None
    ) -> None:
        self._template, self._special = template, special
        self._stated = StatedFormat() if response_template is None else stated_format(response_template)
        self._derived = functools.lru_cache(maxsize=_MOST_TEMPLATES)(self._derive)

    def of(self, template: str | None, *, with_tools: bool, style: str | None = None) -> AnswerFormat:
        """Return the format of the answers to a rendered conversation.

        Args:
            template: see ``ChatTemplate.render``.
            with_tools: whether the conversation has tools.
            style: the form of calls, one of ``STYLES``; None takes the template's.

        Raises:
            ChatTemplateError: there is no such template.
            UsageError: there is no such style.
        """
        answer = self.derived(template, with_tools=with_tools).answer
        answer = answer if style is None else named_format(answer, style)
        return dataclasses.replace(answer, special=self._special is None or self._special.hold(answer.texts))

    def derived(self, template: str | None, *, with_tools: bool) -> Derived:
        """Return the format of a template's answers, and what could not be derived.

        Raises:
            ChatTemplateError: there is no such template.
        """
        return self._derived(self._template.source(template, with_tools=with_tools))

    def _derive(self, source: str) -> Derived:
        described = self._template.describes_tools(source)
        render = functools.partial(self._template.render, template=source)
        derived = derive(source, render, described=described)
        derived = with_stated(derived, self._stated)
        for note in derived.notes:
            level = logging.WARNING if derived.answer.calls is None else logging.INFO
            _log.log(level, "the chat template does not tell all of how the model answers: %s", note)
        return derived


def with_stated(derived: Derived, stated: StatedFormat) -> Derived:
    """Return a format in which a response template tells what could not be derived and proven."""
    answer, notes = derived.answer, list(derived.notes)

    def is_open(part: str) -> bool:
        return getattr(answer, part) is None or any(note.startswith(part) for note in notes)

    if stated.thought is not None and is_open("thought"):
        answer = dataclasses.replace(answer, thought=stated.thought)
        notes = [note for note in notes if not note.startswith("thought")]
    if stated.calls is not None and is_open("calls"):
        answer = dataclasses.replace(answer, calls=stated.calls)
        notes = [note for note in notes if not note.startswith("calls")]
    if stated.text is not None and not answer.text_open:
        answer = dataclasses.replace(answer, text_open=stated.text[0], text_close=stated.text[1])
    return Derived(answer, (*notes, *stated.notes))


def named_format(answer: AnswerFormat, style: str) -> AnswerFormat:
    """Return a format whose calls have a style by name.

    Args:
        answer: the format of the template.
        style: one of ``STYLES``.

    Raises:
        UsageError: there is no such style.
    """
    if style not in STYLES:
        raise UsageError(f"there is no tool call style '{style}'; choose one of {', '.join(STYLES)}")
    if style == "harmony":
        return HARMONY
    return dataclasses.replace(answer, source=style, calls=NAMED[style], harmony=False)


def message_parser(
    answer: AnswerFormat, prompt: str = "", *, tools: Sequence[Mapping[str, Any]] = ()
) -> MessageParser | None:
    """Return a parser for one answer; None if all of it is content.

    Args:
        answer: the format.
        prompt: the rendered prompt; if it ends with what opens a thought, the answer starts inside it.
        tools: the tools of the request.
    """
    if answer.harmony:
        return HarmonyParser(ParsedMessage())
    if answer.thought is None and not (answer.calls and tools) and not answer.text_open:
        return None
    return AnswerParser(ParsedMessage(), answer, tools, opened=answer.opens_thought(prompt))

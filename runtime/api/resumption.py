"""Lengths at which later prompts of a conversation will leave the present one.

A recurrent state cannot be cut, so it must be kept where a later prompt leaves this one. The template tells
two such places before any later prompt exists: the end of what it writes in front of the first message
(tools and system prompt, with which other conversations begin too), and the end of what stays when the user
writes again (many templates then drop the thoughts of earlier answers).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from ...errors import ChatTemplateError, PromptTooLongError
from ..text.chat_template import Message
from ..text.known_texts import common_length

_OTHER = "\ue000"  # a text that no conversation begins with
_LEADING = ("system", "developer")


class Resumption:
    """Finds the lengths of a model's prompts at which others will leave them.

    Args:
        encode: returns the tokens of a text that a template rendered, given a salt too; see ``KnownTexts``.
    """

    def __init__(self, encode: Callable[[str, str], Sequence[int]]) -> None:
        def tokens(text: str, mark: str, salt: str) -> npt.NDArray[np.int32]:
            pieces = text.split(mark) if mark else [text]
            return np.array([*itertools.chain(*(encode(piece, salt) for piece in pieces))], np.int32)

        # What stays is the same text for all requests until the user writes again.
        self._tokens = functools.lru_cache(maxsize=8)(tokens)

    def lengths(
        self,
        messages: Sequence[Message],
        text: str,
        mark: str,
        token_ids: Sequence[int],
        render: Callable[[Sequence[Message]], str],
        placed: Callable[[str], str],
        salt: str = "",
    ) -> tuple[int, ...]:
        """Return lengths in tokens, in order.

        Args:
            messages: of the conversation.
            text: what the template makes of them.
            mark: texts on both sides of it are tokenized apart; empty if there is none.
            token_ids: the tokens of the text.
            render: the template, with the conversation's tools and variables.
            placed: puts all tokens of each picture in its place, in a text with which ``text`` begins.
            salt: only conversations of the same salt share tokens.
        """
        whole = np.array(token_ids, np.int32)
        found = set[int]()
        for other in (_begun(messages), _continued(messages)):
            with suppress(ChatTemplateError, PromptTooLongError):  # it takes no such conversation
                begun = placed(text[: common_length(text, render(other))])
                found.add(_common(self._tokens(begun, mark, salt), whole))
        return tuple(sorted(found - {0}))


def _begun(messages: Sequence[Message]) -> list[Message]:
    """Return another conversation with the same system prompt."""
    roles = [_role(message) for message in messages]
    leading = next((at for at, role in enumerate(roles) if role not in _LEADING), len(roles))
    return [*messages[:leading], _message("user")]


def _continued(messages: Sequence[Message]) -> list[Message]:
    """Return the conversation after another answer and another message of the user."""
    answered = bool(messages) and _role(messages[-1]) == "assistant"
    return [*messages, *([] if answered else [_message("assistant")]), _message("user")]


def _role(message: Message) -> str:
    role = message.get("role") if isinstance(message, Mapping) else None
    return role if isinstance(role, str) else ""


def _message(role: str) -> dict[str, str]:
    return {"role": role, "content": _OTHER}


def _common(first: npt.NDArray[np.int32], second: npt.NDArray[np.int32]) -> int:
    """Return how many first tokens are equal."""
    size = min(len(first), len(second))
    differs = first[:size] != second[:size]
    return int(differs.argmax()) if differs.any() else size

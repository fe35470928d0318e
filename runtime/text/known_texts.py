"""Tokens of the last long texts: a text that begins like one of them is tokenized from where they part.

Every turn of a conversation renders all of it again. A tokenizer cuts a text at its special tokens before it
normalizes and splits it (the pipeline of Hugging Face's ``tokenizers``), so what stands in front of one has
the same tokens whatever follows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken

from ...records import dataclass

_MOST = 8  # texts
_LEAST = 4096  # characters that are worth looking for


def common_length(first: str, second: str) -> int:
    """Return the length of the longest text with which both begin."""
    low, high = 0, min(len(first), len(second))
    while low < high:  # each character is compared about once
        middle = (low + high + 1) // 2
        low, high = (middle, high) if first[low:middle] == second[low:middle] else (low, middle - 1)
    return low


@dataclass(frozen=True, slots=True)
class _Known:
    salt: str
    text: str
    token_ids: npt.NDArray[np.int64]


class KnownTexts:
    """The last long texts and their tokens. Thread-safe.

    Args:
        added: the added tokens of the tokenizer, by id.
    """

    def __init__(self, added: Mapping[int, AddedToken]) -> None:
        contents = [token.content for token in added.values()]
        self._cuts = {token.content: token_id for token_id, token in added.items() if _cuts(token, contents)}
        self._texts: list[_Known] = []  # the newest last
        self._lock = threading.Lock()

    def encode(self, text: str, encode: Callable[[str], Sequence[int]], salt: str = "") -> list[int]:
        """Return the tokens of a text.

        Args:
            text: without what a tokenizer adds around it.
            encode: returns the tokens of what is new in it.
            salt: only texts of the same salt are known, so that time tells no tenant of others' texts.
        """
        if not self._cuts or len(text) < _LEAST:
            return list(encode(text))
        with self._lock:
            texts = [known for known in self._texts if known.salt == salt]
        start, head, source = 0, np.empty(0, np.int64), None
        for known in texts:
            at, count = self._parting(known, text)
            if at > start:
                start, head, source = at, known.token_ids[:count], known
        tokens = [*head.tolist(), *encode(text[start:])]
        if source is None or not source.text.startswith(text):
            self._keep(_Known(salt, text, np.array(tokens, np.int64)))
        return tokens

    def _parting(self, known: _Known, text: str) -> tuple[int, int]:
        """Return where to cut a text, and how many tokens of a known one stand in front of it; or zeros."""
        common = common_length(known.text, text)
        if common < _LEAST:
            return 0, 0
        at, cut = max((text.rfind(each, 0, common), each) for each in self._cuts)
        if at < _LEAST:
            return 0, 0
        places = np.flatnonzero(known.token_ids == self._cuts[cut])
        # Else something made the token that is not this text, or took the text for something else.
        if len(places) != known.text.count(cut):
            return 0, 0
        return at, int(places[text.count(cut, 0, at)])

    def _keep(self, known: _Known) -> None:
        with self._lock:
            others = [
                each
                for each in self._texts
                if each.salt != known.salt or not known.text.startswith(each.text)
            ]
            self._texts = [*others[1 - _MOST :], known]


def _cuts(token: AddedToken, contents: Sequence[str]) -> bool:
    """Whether a token is taken wherever its text stands, and nothing beside it changes."""
    text = token.content
    if not text or token.lstrip or token.rstrip or token.normalized or token.single_word:
        return False
    return not any(_overlap(text, other) for other in contents)


def _overlap(text: str, other: str) -> bool:
    """Whether texts can share characters in a longer text, unless both are the same in the same place."""
    if text != other and (text in other or other in text):
        return True
    lengths = range(1, min(len(text), len(other)))
    return any(text.endswith(other[:n]) or other.endswith(text[:n]) for n in lengths)

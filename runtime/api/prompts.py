"""Prompts in all forms in which they may be given, as token ids that the model can read."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, TypedDict, cast

import numpy as np

from ...errors import CarryallError, PromptTooLongError, RequestError, RequestFailedError
from ..engine.requests.request import Pooling
from ..engine.schedule.admission import check_prompt
from ..text.parsers.base import MessageParser
from ..text.tokenizer import Tokenizer

# Tokenizing takes about 170 bytes of memory a byte of text. The larger of these is the most that is taken.
MOST_BYTES = 1 << 20
MOST_BYTES_A_TOKEN = 16  # of context; English has about 4.5

ACCEPTED = (
    "a prompt is a text, a list of token ids, {'prompt': text} or {'prompt_token_ids': ids}; "
    "several prompts are a list of these"
)


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation as the model reads it, and how its answer is to be read."""

    token_ids: list[int]
    new_parser: Callable[[], MessageParser | None]


@dataclass(frozen=True, slots=True)
class PooledPrompt:
    """A text of which a vector is wanted."""

    token_ids: list[int]
    pooling: Pooling


class TextPrompt(TypedDict):
    """A text in the form that vLLM takes too."""

    prompt: str


class TokensPrompt(TypedDict):
    """Token ids in the form that vLLM takes too."""

    prompt_token_ids: Sequence[int]


Prompt = str | Sequence[int] | ChatPrompt | PooledPrompt | TextPrompt | TokensPrompt


def listed_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as a list.

    Raises:
        RequestError: it is neither.
    """
    if isinstance(prompts, str | ChatPrompt | PooledPrompt | Mapping):
        return [cast(Prompt, prompts)]
    if isinstance(prompts, bytes | bytearray) or not isinstance(prompts, Sequence | np.ndarray):
        raise RequestError(f"{ACCEPTED}; not {shown(prompts)}")
    items = list(prompts)
    return [cast(Prompt, items)] if items and isinstance(items[0], Integral) else cast("list[Prompt]", items)


def plain_prompt(prompt: Prompt) -> str | Sequence[int] | ChatPrompt | PooledPrompt:
    """A prompt without the mapping it may lie in.

    Raises:
        RequestError: it is no prompt.
    """
    if isinstance(prompt, Mapping):
        if set(prompt) not in ({"prompt"}, {"prompt_token_ids"}):
            raise RequestError(f"{ACCEPTED}; not a mapping with the keys {list(prompt)}")
        (name, value), *_ = prompt.items()
        if isinstance(value, str) is not (name == "prompt") or isinstance(value, Mapping):
            raise RequestError(f"{ACCEPTED}; '{name}' is {shown(value)}")
        return plain_prompt(cast(Prompt, value))
    tokens = isinstance(prompt, Sequence | np.ndarray) and not isinstance(prompt, bytes | bytearray)
    if not tokens and not isinstance(prompt, ChatPrompt | PooledPrompt):
        raise RequestError(f"{ACCEPTED}; not {shown(prompt)}")
    return prompt


def shown(value: Any) -> str:
    """A value of the wrong kind, in a few words."""
    if isinstance(value, bytes | bytearray):
        return f"{type(value).__name__}; decode them into a text first"
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


class PromptReader:
    """Prompts to token ids, within bounds. Thread-safe; long texts are for a thread that has the time.

    Args:
        find_tokenizer: gives the model's tokenizer, or raises UsageError.
        vocab_size: token ids are below this.
        context_length: most tokens of a sequence, prompt and output together.
    """

    def __init__(self, find_tokenizer: Callable[[], Tokenizer], vocab_size: int, context_length: int) -> None:
        self._find_tokenizer = find_tokenizer
        self._vocab_size = vocab_size
        self._context_length = context_length

    @functools.cached_property
    def most_bytes(self) -> int:
        """UTF-8 bytes of the longest text that is tokenized at all."""
        return max(MOST_BYTES, MOST_BYTES_A_TOKEN * self._context_length)

    def token_ids(self, prompt: Prompt) -> list[int]:
        """The tokens of a prompt.

        Raises:
            UsageError: it needs a tokenizer, and there is none.
            PromptTooLongError: it has more tokens than the context holds, or so many bytes that it must.
            RequestError: it is no prompt, is empty, or names tokens that do not exist.
            RequestFailedError: the tokenizer failed.
        """
        plain = plain_prompt(prompt)
        if isinstance(plain, str):
            found = self.encode(plain)
        elif isinstance(plain, ChatPrompt | PooledPrompt):
            found = plain.token_ids
        else:
            self._check_length(len(plain))
            found = _integers(plain)
        self._check_length(len(found))
        check_prompt(found, self._vocab_size)
        return found

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The tokens of a text that is not too long.

        Raises:
            PromptTooLongError: it has so many bytes that its tokens cannot fit, or that it is not tokenized.
            RequestError: it is no Unicode text.
            RequestFailedError: the tokenizer failed.
        """
        tokenizer = self._find_tokenizer()
        self.check_bytes(len(text))  # at least; encoding a huge text takes time too
        try:
            if len(text) > self._context_length // 4:
                self.check_bytes(len(text.encode(errors="surrogatepass")))
                self._check_least_tokens(tokenizer, text)
            return tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except CarryallError:
            raise
        except Exception as error:
            raise RequestFailedError(f"the tokenizer failed: {error!r}") from error

    def check_bytes(self, count: int) -> None:
        """Refuse a text of so many bytes, unless it may be tokenized.

        Raises:
            PromptTooLongError: it may not.
        """
        if count > self.most_bytes:
            raise PromptTooLongError(
                f"the prompt has at least {count} bytes; for a context of {self._context_length} tokens, at "
                f"most {self.most_bytes} bytes are taken: {MOST_BYTES_A_TOKEN} a token, {MOST_BYTES} at least"
            )

    def _check_least_tokens(self, tokenizer: Tokenizer, text: str) -> None:
        covered = tokenizer.coverage
        if covered is None:
            return
        count = covered.bytes_of(text)
        least = -(-count // covered.bytes_per_token)
        if least >= self._context_length:
            raise PromptTooLongError(
                f"the prompt has {count} bytes and a token covers at most {covered.bytes_per_token}: that is "
                f"at least {least} tokens, but the context holds {self._context_length}, at least one of "
                "them generated; shorten the prompt or load the model with room for more"
            )

    def _check_length(self, count: int) -> None:
        if count > self._context_length:
            raise PromptTooLongError(
                f"the prompt has {count} tokens, but the context holds {self._context_length}, at least "
                "one of them generated; shorten the prompt or load the model with room for more"
            )


def _integers(prompt: Sequence[int]) -> list[int]:
    for token in prompt:
        if isinstance(token, bool) or not isinstance(token, Integral):
            raise RequestError(f"{ACCEPTED}; this list holds {shown(token)}")
    return [operator.index(token) for token in prompt]

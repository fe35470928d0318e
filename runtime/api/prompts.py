"""Convert prompts of all accepted types to token ids, and check them."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any, TypedDict, cast

import numpy as np

from ...errors import CarryallError, PromptTooLongError, RequestError, RequestFailedError
from ...providers.base import EncoderOutput
from ...records import dataclass
from ..engine.requests.pooled_states import Pooling
from ..engine.requests.prompt_images import PromptImages
from ..engine.schedule.admission import check_prompt
from ..text.parsers.answer_grammar import AnswerFrame
from ..text.parsers.base import MessageParser
from ..text.tokenizer import Tokenizer

# Tokenizing needs about 170 bytes of memory per byte of text. The larger of these limits applies to a text.
MOST_BYTES = 1 << 20
MOST_BYTES_A_TOKEN = 16  # per token of context; English has about 4.5

_BYTES = bytes | bytearray | memoryview  # sequences of integers, which would pass for token ids

ACCEPTED = (
    "a prompt must be a text, a list of token ids, {'prompt': text} or {'prompt_token_ids': ids}, "
    "or a list of these for several prompts"
)


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """The tokens of a rendered conversation, and how its answer is read.

    Args:
        token_ids: the tokens.
        new_parser: returns a parser of an answer; None if all of it is content.
        frame: what is around a structured output, or which calls the answer must hold.
        images: its pictures; None for none.
        encoder: what the encoder of the model made of its picture; None without an encoder.
        new_json_parser: returns a parser that makes JSON of an answer, in place of a grammar that holds the
            answer to JSON; None for a model that writes JSON itself.
        resumption: lengths at which later prompts may leave it, as ``Request`` takes them.
    """

    token_ids: list[int]
    new_parser: Callable[[], MessageParser | None]
    frame: AnswerFrame | None = None
    images: PromptImages | None = None
    encoder: EncoderOutput | None = None
    new_json_parser: Callable[[], MessageParser] | None = None
    resumption: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PooledPrompt:
    """The tokens of a text to embed; ``images`` are its pictures, None for none."""

    token_ids: list[int]
    pooling: Pooling
    images: PromptImages | None = None


@dataclass(frozen=True, slots=True, eq=False)
class EncodedPrompt:
    """The tokens of a prompt, and what the encoder of the model made of a sound or a picture."""

    token_ids: list[int]
    encoder: EncoderOutput


class TextPrompt(TypedDict):
    """A text prompt as a mapping, as in vLLM."""

    prompt: str


class TokensPrompt(TypedDict):
    """A prompt of token ids as a mapping, as in vLLM."""

    prompt_token_ids: Sequence[int]


Prompt = str | Sequence[int] | ChatPrompt | PooledPrompt | EncodedPrompt | TextPrompt | TokensPrompt


_READY = ChatPrompt | PooledPrompt | EncodedPrompt  # prompts whose tokens are known


def listed_prompts(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """Return one prompt or several, which may come from an iterator, as a list.

    Raises:
        RequestError: the value is neither.
    """
    if isinstance(prompts, str | _READY | Mapping):
        return [cast(Prompt, prompts)]
    if isinstance(prompts, _BYTES) or not isinstance(prompts, Sequence | Iterator | np.ndarray):
        raise RequestError(f"{ACCEPTED}; not {shown(prompts)}")
    items = list(prompts)
    return [cast(Prompt, items)] if items and isinstance(items[0], Integral) else cast("list[Prompt]", items)


def images_of(prompt: Prompt) -> PromptImages | None:
    """Return the pictures of a prompt; None for none."""
    return prompt.images if isinstance(prompt, ChatPrompt | PooledPrompt) else None


def encoder_of(prompt: Prompt) -> EncoderOutput | None:
    """Return what the encoder made of the sound or picture of a prompt; None for none."""
    return prompt.encoder if isinstance(prompt, ChatPrompt | EncodedPrompt) else None


def plain_prompt(prompt: Prompt) -> str | Sequence[int] | ChatPrompt | PooledPrompt | EncodedPrompt:
    """Return a prompt, unpacked from its mapping if it is one.

    Raises:
        RequestError: the value is not a prompt.
    """
    if isinstance(prompt, Mapping):
        if set(prompt) not in ({"prompt"}, {"prompt_token_ids"}):
            raise RequestError(f"{ACCEPTED}; not a mapping with the keys {list(prompt)}")
        (name, value), *_ = prompt.items()
        if isinstance(value, str) is not (name == "prompt") or isinstance(value, Mapping):
            raise RequestError(f"{ACCEPTED}; '{name}' is {shown(value)}")
        return plain_prompt(cast(Prompt, value))
    tokens = isinstance(prompt, Sequence | np.ndarray) and not isinstance(prompt, _BYTES)
    if not tokens and not isinstance(prompt, _READY):
        raise RequestError(f"{ACCEPTED}; not {shown(prompt)}")
    return prompt


def shown(value: Any) -> str:
    """Return the type and a shortened repr of a value, for error messages."""
    if isinstance(value, _BYTES):
        return f"{type(value).__name__}; decode it to text first"
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


class PromptReader:
    """Converts prompts to token ids, with limits on their size. Thread-safe.

    Args:
        find_tokenizer: returns the model's tokenizer, or raises UsageError.
        vocab_size: the size of the model's vocabulary.
        context_length: maximum tokens of a sequence, prompt and output together.
    """

    def __init__(self, find_tokenizer: Callable[[], Tokenizer], vocab_size: int, context_length: int) -> None:
        self._find_tokenizer = find_tokenizer
        self._vocab_size = vocab_size
        self._context_length = context_length

    @functools.cached_property
    def most_bytes(self) -> int:
        """The maximum size of a text in UTF-8 bytes; larger texts are not tokenized."""
        return max(MOST_BYTES, MOST_BYTES_A_TOKEN * self._context_length)

    def token_ids(self, prompt: Prompt) -> list[int]:
        """Return the tokens of a prompt.

        Raises:
            UsageError: the prompt is text, and the model has no tokenizer.
            PromptTooLongError: it has more tokens than the context holds, or so many bytes that it must.
            RequestError: it is not a prompt, is empty, or has token ids outside the vocabulary.
            RequestFailedError: the tokenizer failed.
        """
        plain = plain_prompt(prompt)
        if isinstance(plain, str):
            tokens = self.encode(plain)
        elif isinstance(plain, _READY):
            tokens = plain.token_ids
        else:
            self._check_length(len(plain))
            tokens = _integers(plain)
        self._check_length(len(tokens))
        check_prompt(tokens, self._vocab_size)
        return tokens

    def encode(self, text: str, *, add_special_tokens: bool = True, salt: str = "") -> list[int]:
        """Return the tokens of a text; see ``Tokenizer.encode``.

        Raises:
            PromptTooLongError: the text exceeds ``most_bytes``, or its tokens cannot fit the context.
            RequestError: it has a lone surrogate.
            RequestFailedError: the tokenizer failed.
        """
        tokenizer = self._find_tokenizer()
        self.check_bytes(len(text))  # a lower bound, checked before a huge text is encoded
        try:
            if len(text) > self._context_length // 4:
                self.check_bytes(len(text.encode(errors="surrogatepass")))
                self._check_least_tokens(tokenizer, text)
            return tokenizer.encode(text, add_special_tokens=add_special_tokens, salt=salt)
        except CarryallError:
            raise
        except Exception as error:
            raise RequestFailedError(f"the tokenizer failed: {error!r}") from error

    def check_bytes(self, count: int) -> None:
        """Check the size of a text.

        Raises:
            PromptTooLongError: ``count`` exceeds ``most_bytes``.
        """
        if count > self.most_bytes:
            raise PromptTooLongError(
                f"it has at least {count} bytes; for a context of {self._context_length} tokens the "
                f"limit is {self.most_bytes} bytes: {MOST_BYTES_A_TOKEN} per token, at least {MOST_BYTES}",
                -(-count // MOST_BYTES_A_TOKEN),
                self._context_length - 1,
            )

    def check_messages(self, count: int) -> None:
        """Check the number of messages of a conversation before a template renders them one by one.

        Raises:
            PromptTooLongError: there are more messages than tokens, of which each takes some.
        """
        if count > self._context_length:
            raise PromptTooLongError(
                f"it has {count} messages, of at least a token each; {self._remedy}",
                count,
                self._context_length - 1,
            )

    def _check_least_tokens(self, tokenizer: Tokenizer, text: str) -> None:
        covered = tokenizer.coverage
        if covered is None:
            return
        count = covered.bytes_of(text)
        least = -(-count // covered.bytes_per_token)
        if least >= self._context_length:
            raise PromptTooLongError(
                f"it has {count} bytes and a token covers at most {covered.bytes_per_token}; {self._remedy}",
                least,
                self._context_length - 1,
            )

    def _check_length(self, count: int) -> None:
        if count > self._context_length:
            raise PromptTooLongError(self._remedy, count, self._context_length - 1)

    @property
    def _remedy(self) -> str:
        return (
            f"the context holds {self._context_length}, including at least one generated token; shorten the "
            "prompt or load the model with a larger context_length"
        )


def _integers(prompt: Sequence[int]) -> list[int]:
    kinds = set(map(type, prompt))
    if kinds <= {int}:  # the check by abstract classes takes 2 ms for 4,096 tokens
        return list(prompt)
    for token in prompt:
        if isinstance(token, bool) or not isinstance(token, Integral):
            raise RequestError(f"{ACCEPTED}; the list has {shown(token)}")
    return [operator.index(token) for token in prompt]

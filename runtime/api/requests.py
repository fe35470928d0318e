"""Prompts and options to requests: what ``LLM`` and ``AsyncLLM`` have in common before the engine."""

from __future__ import annotations

import functools
import inspect
import threading
import time
import uuid
from collections.abc import Mapping, Sequence, Sized
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, cast

from ...errors import InvalidSamplingError, RequestError, UsageError
from ..engine.requests.request import Grammar, Request
from ..engine.requests.request_group import RequestGroup, sample_params
from ..engine.schedule.admission import check_token_ids
from ..text.chat_template import ChatTemplate, Message, check_variables
from ..text.parsers.registry import message_parser
from ..text.tokenizer import Tokenizer
from ..types.sampling_params import SamplingParams
from .encoder import Encoder
from .output_text import OutputText
from .prompts import ChatPrompt as ChatPrompt
from .prompts import PooledPrompt as PooledPrompt
from .prompts import Prompt as Prompt
from .prompts import PromptReader, plain_prompt

if TYPE_CHECKING:
    from ..models.loading import LoadedModel
    from ..text.grammars import GrammarCompiler


# Characters to tokenize in the thread that asks, for which all other requests of its event loop wait.
_QUICK_TEXT = 4096


class RequestFactory:
    """Makes requests for one model. Thread-safe."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self._lock = threading.Lock()
        self._grammars: GrammarCompiler | None = None
        info = model.runner.info
        self._reader = PromptReader(lambda: self.tokenizer, info.vocab_size, info.context_length)
        self.encoder = Encoder(model.open_encoder)

    @property
    def has_tokenizer(self) -> bool:
        """Whether the model came with a tokenizer."""
        return self._model.tokenizer is not None

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises:
            UsageError: it has none.
        """
        if self._model.tokenizer is None:
            raise UsageError(
                f"{self._model.name} has no tokenizer.json: give prompts as token ids, or add the file"
            )
        return self._model.tokenizer

    def group(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        tenant: str | None = None,
        timeout: float | None = None,
    ) -> RequestGroup:
        """Requests for the continuations of one prompt.

        Raises:
            UsageError: it needs a tokenizer, and there is none.
            RequestError: the prompt is neither text nor token ids, too long, or names tokens that do not
                exist; or another argument is not what it must be.
            RequestFailedError: the tokenizer failed.
        """
        _check_kinds(request_id=request_id, cache_salt=cache_salt, tenant=tenant)
        if not isinstance(priority, int):
            raise RequestError(f"the priority must be a whole number, not {priority!r}")
        if timeout is not None and not (isinstance(timeout, int | float) and timeout >= 0.0):
            raise RequestError(f"the timeout must be a number of seconds, not {timeout!r}")
        prompt = plain_prompt(prompt)
        text = prompt if isinstance(prompt, str) else None
        token_ids = self.token_ids(prompt)
        check_token_ids(token_ids, params, self._model.runner.info.vocab_size)
        new_parser = prompt.new_parser if isinstance(prompt, ChatPrompt) else _no_parser
        tokenizer = self._model.tokenizer
        if params.stop and tokenizer is None:
            raise InvalidSamplingError("stop strings need a tokenizer; use stop_token_ids")
        if any(isinstance(word, str) for word in params.bad_words) and tokenizer is None:
            raise InvalidSamplingError("bad words as text need a tokenizer; give their token ids")
        own = frozenset() if params.ignore_eos else self._model.defaults.end_token_ids
        name = request_id or uuid.uuid4().hex
        shared: dict[str, Any] = {
            "end_token_ids": own.union(params.stop_token_ids),
            "bad_words": self._bad_words(params),
            "dry_breakers": self._dry_breakers(params),
            "grammar": self._grammar(params),
            "prompt": text,
            "priority": priority,
            "cache_salt": cache_salt,
            "tenant": tenant,
            "pooling": prompt.pooling if isinstance(prompt, PooledPrompt) else None,
            "deadline": None if timeout is None else time.monotonic() + timeout,
        }
        requests = [
            Request(
                f"{name}-{i}" if i else name,
                token_ids,
                own_params,
                text=OutputText(tokenizer, token_ids, params, new_parser())
                if tokenizer is not None
                else None,
                **shared,
            )
            for i, own_params in enumerate(sample_params(params))
        ]
        return RequestGroup(params, requests)

    @property
    def end_token_ids(self) -> frozenset[int]:
        """The model's own end tokens."""
        return self._model.defaults.end_token_ids

    def token_ids(self, prompt: Prompt) -> list[int]:
        """The tokens of a prompt, in whatever form it is; see ``PromptReader.token_ids``."""
        return self._reader.token_ids(prompt)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The tokens of a text; see ``PromptReader.encode``."""
        return self._reader.encode(text, add_special_tokens=add_special_tokens)

    def is_quick(self, prompt: Prompt, params: SamplingParams) -> bool:
        """Whether making a request of it takes a few milliseconds; else it is not for an event loop."""
        if params.structured_output is not None or isinstance(prompt, Mapping):
            return False
        texts = [word for word in params.bad_words if isinstance(word, str)]
        tokenized = sum(map(len, texts)) + sum(map(len, params.dry_sequence_breakers))
        return tokenized + (len(prompt) if isinstance(prompt, Sized) else 0) <= _QUICK_TEXT

    def default_params(self, max_tokens: int | None) -> SamplingParams:
        """The checkpoint's own sampling options."""
        return self._model.defaults.params(max_tokens)

    def chat_prompt(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        tool_style: str | None = None,
        **variables: Any,
    ) -> ChatPrompt:
        """A conversation as a prompt; see ``ChatTemplate.render``.

        Args:
            messages: as there.
            tools: as there.
            add_generation_prompt: as there.
            chat_template: as there.
            tool_style: how the model writes tool calls, a name from ``parsers.registry.STYLES``; None leaves
                it to the chat template to tell.
            **variables: as there.

        Raises:
            ChatTemplateError: the template is missing, fails, or tries something forbidden; or a variable has
                a name that is taken.
            UsageError: no such style.
        """
        check_variables(variables, _RENDERING)
        template = self._model.chat_template
        text = template.render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            template=chat_template,
            max_size=self._reader.most_bytes,
            **variables,
        )
        source = template.source(chat_template, with_tools=bool(tools))
        new_parser = functools.partial(message_parser, source, text, tools=bool(tools), style=tool_style)
        new_parser()  # an unknown style is found out now
        # The template wrote its special tokens itself.
        return ChatPrompt(self.encode(text, add_special_tokens=False), new_parser)

    def _grammar(self, params: SamplingParams) -> Future[Grammar] | None:
        """The grammar of a structured output, compiled or about to be."""
        if params.structured_output is None:
            return None
        from ..text.grammars import GrammarCompiler  # loaded on demand: few requests need it

        with self._lock:
            if self._grammars is None:
                self._grammars = GrammarCompiler(
                    self.tokenizer, self._model.defaults.end_token_ids, self._model.runner.info.vocab_size
                )
        return cast("Future[Grammar]", self._grammars.compile(params.structured_output))

    def _bad_words(self, params: SamplingParams) -> set[tuple[int, ...]]:
        """Token sequences of the bad words; a text counts with and without a space before it."""
        words = set[tuple[int, ...]]()
        for word in params.bad_words:
            if isinstance(word, str):
                spellings = (word, f" {word.lstrip()}")
                words.update(tuple(self.encode(s, add_special_tokens=False)) for s in spellings)
            else:
                words.add(word)
        vocab_size = self._model.runner.info.vocab_size  # what a tokenizer has beyond it is never generated
        return {word for word in words if word and max(word) < vocab_size}

    def _dry_breakers(self, params: SamplingParams) -> set[int]:
        """The token with which each sequence breaker ends, alone and after a letter."""
        if not params.dry_multiplier or self._model.tokenizer is None:
            return set()
        texts = [prefix + text for text in params.dry_sequence_breakers for prefix in ("", "a")]
        encoded = [self.encode(text, add_special_tokens=False) for text in texts]
        return {token for token_ids in encoded for token in token_ids[-1:]}


# What a request's own variables must not be called: what the template is given anyway, and by whom.
_RENDERING = frozenset(inspect.signature(ChatTemplate.render).parameters)
RENDER_OPTIONS = _RENDERING | frozenset(inspect.signature(RequestFactory.chat_prompt).parameters)


def _no_parser() -> None:
    return None


def _check_kinds(**texts: Any) -> None:
    """Refuse here what would surprise the engine's thread, which serves others too."""
    for name, value in texts.items():
        if not isinstance(value, str | None):
            raise RequestError(f"{name} must be a text, not {value!r}")

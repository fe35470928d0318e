"""What ``LLM`` and ``AsyncLLM`` tell alike of the model behind them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..engine.engine import Engine
from ..text.chat_template import Message
from ..text.tokenizer import Tokenizer
from .requests import ChatPrompt, RequestFactory


class TextModel:
    """A model's tokenizer, chat template and limits."""

    _requests: RequestFactory
    _engine: Engine

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> ChatPrompt:
        """A conversation, as a prompt to generate from; see ``RequestFactory.chat_prompt``."""
        return self._requests.chat_prompt(messages, tools=tools, **options)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        return self._requests.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids."""
        return self._requests.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._requests.tokenizer

    @property
    def end_token_ids(self) -> frozenset[int]:
        """The model's own end tokens."""
        return self._requests.end_token_ids

    @property
    def context_length(self) -> int:
        """Most tokens of a sequence, prompt and output together."""
        return self._engine.max_length

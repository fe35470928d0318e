"""The methods that ``LLM`` and ``AsyncLLM`` share: tokenizer, chat template and limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..engine.engine import Engine
from ..text.chat_template import Message
from ..text.infill import Infill, infill_tokens
from ..text.tokenizer import Tokenizer
from ..types.arguments import checked_arguments
from .requests import ChatPrompt, RequestFactory


class TextModel:
    """Tokenizer, chat template and limits of a loaded model."""

    requests: RequestFactory
    engine: Engine
    name: str

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, context_length={self.context_length})"

    @checked_arguments
    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        tool_style: str | None = None,
        **options: Any,
    ) -> ChatPrompt:
        """Render a conversation to a prompt; see ``RequestFactory.chat_prompt``."""
        return self.requests.chat_prompt(
            messages, tools=tools, chat_template=chat_template, tool_style=tool_style, **options
        )

    @checked_arguments
    def infill_tokens(self, gap: Infill) -> tuple[list[int], tuple[int, ...]]:
        """Return the prompt of a gap in a text and the tokens that end it; see ``text.infill``."""
        return infill_tokens(self.requests.tokenizer, gap)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text."""
        return self.requests.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids."""
        return self.requests.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def load_lora(self, name: str, folder: str | Path, *, replace: bool = False) -> None:
        """Load a LoRA adapter of PEFT, which requests choose by ``lora=name``.

        Args:
            name: the name in requests.
            folder: ``adapter_config.json`` and ``adapter_model.safetensors``.
            replace: replace an adapter of this name; requests in progress finish with the old one.

        Raises:
            UsageError: the model was loaded without adapters (``max_loras``), the name is in use, or the
                adapter is not supported.
            CheckpointError: a file is damaged, or a module does not fit the model; the message names it.
        """
        self.requests.adapters.load(name, folder, replace=replace)

    def unload_lora(self, name: str) -> None:
        """Forget a LoRA adapter; requests in progress finish with it.

        Raises:
            UnknownModelError: there is no adapter of this name.
        """
        self.requests.adapters.unload(name)

    @property
    def loras(self) -> tuple[str, ...]:
        """The names of the LoRA adapters that requests can choose."""
        return self.requests.adapters.names

    @property
    def lora_folders(self) -> dict[str, str]:
        """The folders of the LoRA adapters, by name."""
        return self.requests.adapters.paths

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.requests.tokenizer

    @property
    def sampling_defaults(self) -> dict[str, Any]:
        """The sampling options of requests over a network and of programs that give none."""
        return self.requests.served_defaults

    @property
    def end_token_ids(self) -> frozenset[int]:
        """The model's own end tokens."""
        return self.requests.end_token_ids

    @property
    def context_length(self) -> int:
        """The maximum number of tokens of a sequence, prompt and output together."""
        return self.engine.max_length

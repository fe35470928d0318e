"""Requests of a language model with one of its LoRA adapters."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from ....errors import UnsupportedTaskError
from ...api.embedding import Pooling
from ...api.scoring import RERANK_INSTRUCTION, ContinuationScore
from ...engine.stats import EngineStats
from .handler import LLMHandler
from .messages import Delta, Embeddings, GenerationRequest, Prompt
from .served_model import ServedModel


class AdaptedHandler(LLMHandler):
    """The handler of a base model, with an adapter in each request, under the adapter's name.

    Args:
        base: the handler of the base model, which counts the requests.
        lora: the name of the adapter.
    """

    def __init__(self, base: LLMHandler, lora: str) -> None:
        super().__init__()
        self._base, self._lora = base, lora

    @property
    def model(self) -> ServedModel:
        """Return the base model under the adapter's name."""
        model = self._base.model
        return dataclasses.replace(model, info=dataclasses.replace(model.info, model=self._lora))

    @property
    def active(self) -> int:
        """See ``LLMHandler``."""
        return self._base.active

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Delta, None]:
        """See ``LLMHandler``."""
        async with aclosing(self._base.generate(dataclasses.replace(request, lora=self._lora))) as deltas:
            async for delta in deltas:
                yield delta

    async def tokenize(self, prompt: Prompt, *, add_special_tokens: bool = True) -> list[int]:
        """See ``LLMHandler``."""
        return await self._base.tokenize(prompt, add_special_tokens=add_special_tokens)

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """See ``LLMHandler``."""
        return await self._base.detokenize(token_ids, skip_special_tokens=skip_special_tokens)

    async def embed(
        self, prompts: Sequence[str | list[int]], *, pooling: Pooling | None = None, normalize: bool = True
    ) -> Embeddings:
        """Raise UnsupportedTaskError: adapters have no embeddings."""
        raise self._unsupported("embeddings")

    async def score(
        self, texts: str | Sequence[str], continuations: str | Sequence[str]
    ) -> list[ContinuationScore]:
        """Raise UnsupportedTaskError: adapters have no scores."""
        raise self._unsupported("scores")

    async def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        instruction: str = RERANK_INSTRUCTION,
        answers: Sequence[str] = ("yes", "no"),
    ) -> list[float]:
        """Raise UnsupportedTaskError: adapters do not rank."""
        raise self._unsupported("reranking")

    def abort(self, request_id: str) -> None:
        """See ``LLMHandler``."""
        self._base.abort(request_id)

    def stats(self) -> EngineStats:
        """See ``LLMHandler``."""
        return self._base.stats()

    async def drain(self, grace_seconds: float) -> bool:
        """See ``LLMHandler``."""
        return await self._base.drain(grace_seconds)

    def _unsupported(self, what: str) -> UnsupportedTaskError:
        return UnsupportedTaskError(
            f"'{self._lora}' is a LoRA adapter, which has no {what}; name its base model '{self._base.name}'"
        )

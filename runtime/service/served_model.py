"""A loaded model with its engine, as the handler serves it."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Unpack

from ...providers.placement import Placement
from ..api.async_llm import AsyncLLM
from ..engine.engine import EngineConfig
from ..models.loading import LoadOptions, load_model
from .messages import ModelInfo


@dataclass(frozen=True, slots=True)
class ServedModel:
    """An engine, what clients may know of it, and the sampling options of requests that leave them out."""

    llm: AsyncLLM
    info: ModelInfo
    defaults: Mapping[str, Any] = field(default_factory=dict)
    fallbacks: Sequence[Placement] = ()  # see ``LoadedModel``


def load_served_model(
    model: str | Path,
    *,
    max_queue: int | None = None,
    squeeze_kv: int | None = None,
    **options: Unpack[LoadOptions],
) -> ServedModel:
    """Load a model and start its engine.

    Args:
        model: see ``load_model``.
        max_queue: most requests that may wait; None is no limit.
        squeeze_kv: see ``EngineConfig``.
        **options: see ``load_model``.

    Raises:
        CarryallError: see ``load_model``.
    """
    loaded = load_model(model, **options)
    facts = loaded.runner.info
    info = ModelInfo(
        model=loaded.name,
        provider=loaded.provider,
        vocab_size=facts.vocab_size,
        context_length=facts.context_length,
        max_slots=facts.max_slots,
        server_version=importlib.metadata.version("carryall"),
    )
    llm = AsyncLLM(loaded, engine_config=EngineConfig(max_queue=max_queue, squeeze_kv=squeeze_kv))
    return ServedModel(llm, info, loaded.defaults.sampling, loaded.fallbacks)

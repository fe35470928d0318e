"""A loaded model with its engine."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

import numpy as np

from ....errors import CarryallError, ChatTemplateError, PromptTooLongError, ProviderRuntimeError, UsageError
from ....progress import Progress
from ....providers.base import DeviceMemory
from ....providers.placement import Placement
from ....records import dataclass
from ...api.async_llm import AsyncLLM
from ...api.prompts import Prompt
from ...engine.engine import EngineConfig
from ...models.config import ModelConfig
from ...models.loading import load_for_engine
from ...models.model_source import ModelSummary
from ...types.sampling_params import SamplingParams
from ...types.structured_output import StructuredOutput
from .messages import ModelInfo

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """An engine, public facts of its model, and default sampling options."""

    llm: AsyncLLM
    info: ModelInfo
    defaults: Mapping[str, Any] = field(default_factory=dict)
    fallbacks: Sequence[Placement] = ()  # see ``LoadedModel``
    device_memory: Callable[[], list[DeviceMemory]] = list  # see ``LoadedModel``
    summary: Callable[[], ModelSummary | None] = lambda: None  # see ``LoadedModel``


def load_served_model(
    model: str | Path | ModelConfig,
    *,
    name: str | None = None,
    engine_config: EngineConfig | None = None,
    progress: Progress | None = None,
    warm_up: bool = False,
    **fields: Any,
) -> ServedModel:
    """Load a model and start its engine.

    Args:
        model: as for ``LLM``.
        name: the name for clients; None takes the name of the package or folder.
        engine_config: scheduling options; None takes the defaults.
        progress: called with (done, total, name) after each tensor is written.
        warm_up: generate once, so that the first request does not wait for lazy initialization.
        **fields: fields of ``ModelConfig`` and ``EngineConfig``, as for ``LLM``.

    Raises:
        CarryallError: see ``load_model``.
    """
    loaded, config = load_for_engine(model, engine_config, fields, owner="a served model", progress=progress)
    facts = loaded.runner.info
    info = ModelInfo(
        model=name or loaded.name,
        provider=loaded.provider,
        vocab_size=facts.vocab_size,
        context_length=facts.context_length,
        max_slots=facts.max_slots,
        server_version=importlib.metadata.version("carryall"),
        reads_images=loaded.reads_images,
    )
    try:
        llm = AsyncLLM(loaded, engine_config=config)
    except CarryallError:
        loaded.close()
        raise
    if warm_up:
        asyncio.run(_warm_up(llm, hears=loaded.hears))
        if loaded.tokenizer is not None:
            loaded.tokenizer.read_all()
        if loaded.chat_template.names and loaded.tokenizer is not None:
            asyncio.run(_warm_up_chats(llm))
    if not loaded.defaults.says_how:
        options = ", ".join(f"{option} {value}" for option, value in loaded.defaults.served.items())
        _log.info(
            "the model %a says nothing of sampling; requests that do not either: %s", info.model, options
        )
    return ServedModel(
        llm, info, loaded.defaults.served, loaded.fallbacks, loaded.device_memory, loaded.summary
    )


async def _warm_up_chats(llm: AsyncLLM) -> None:
    """Render a chat, which derives how the model writes answers, and compile a grammar.

    The log tells what of the answers is not known. The first grammar reads the vocabulary, which takes 0.6 s
    for 49,000 tokens and 5 s for 262,000 and holds the GIL: later, all streams would stop for so long.
    """
    # A template may refuse this conversation; requests are told why theirs is refused.
    with contextlib.suppress(ChatTemplateError, PromptTooLongError):
        await llm.render([{"role": "user", "content": "x"}])
    params = SamplingParams(max_tokens=1, structured_output=StructuredOutput(json_object=True))
    with contextlib.suppress(CarryallError):  # requests are told why
        _ = [output async for output in llm.generate([0], params, cache_salt="warm-up")]


async def _warm_up(llm: AsyncLLM, *, hears: bool) -> None:
    """Generate 2 tokens: one step of a prompt, and one of a running request.

    A model that hears writes down a second of silence instead, and one whose encoder sees a black pixel.

    Raises:
        CarryallError: the model failed to run, or its KV memory is too small for any prompt.
    """
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    if hears:
        silence = np.zeros(llm.requests.hearing.transcriber.rate, np.float32)
        async for _ in llm.transcribe(silence, cache_salt="warm-up"):
            pass
        return
    try:
        prompt: Prompt = [0]
        if llm.engine.info.encoder_width:
            picture = {"type": "image", "image": np.zeros((1, 1, 3), np.uint8)}
            prompt = await llm.render([{"role": "user", "content": [picture]}], cache_salt="warm-up")
        async for output in llm.generate(prompt, params, cache_salt="warm-up"):
            if output.error is not None:
                raise ProviderRuntimeError(f"the model failed in its warm-up: {output.error}")
    except PromptTooLongError as error:  # of the warm-up's one token, which nobody gave
        llm.shutdown()
        raise UsageError(
            "the KV memory is too small for a prompt of 1 token and its answer; raise kv_bytes (--kv-bytes)"
        ) from error
    except CarryallError:
        llm.shutdown()
        raise

"""The real engine on the null provider, with the embedded model's tokenizer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from carryall.exporter.demo import demo_path
from carryall.providers.base import Row, RunnerConfig
from carryall.providers.targets.null import NullOptions, NullRunner
from carryall.runtime.api.async_llm import AsyncLLM
from carryall.runtime.engine.adapters import AdapterSet
from carryall.runtime.engine.engine import EngineConfig
from carryall.runtime.models.loading import LoadedModel
from carryall.runtime.text.chat_template import ChatTemplate
from carryall.runtime.text.tokenizer import Tokenizer

TEMPLATE = "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"


def null_model(
    *,
    max_slots: int = 4,
    step_seconds: float = 0.0,
    before_forward: Callable[[Sequence[Row]], None] | None = None,
    template: str = TEMPLATE,
    max_loras: int = 0,
) -> LoadedModel:
    """A model that is a pure function of the tokens."""
    tokenizer = Tokenizer(demo_path("pycoder"))
    options = NullOptions(vocab_size=tokenizer.vocab_size, step_seconds=step_seconds)
    runner = NullRunner(RunnerConfig(max_slots=max_slots, max_loras=max_loras), options)
    runner.before_forward = before_forward
    model = LoadedModel("toy", runner, tokenizer, ChatTemplate({"default": template}, {}))
    model.adapters = AdapterSet(runner.info)
    return model


@asynccontextmanager
async def null_llm(*, max_queue: int | None = None, **model: Any) -> AsyncIterator[AsyncLLM]:
    """Yield an engine of ``null_model``, and shut it down."""
    llm = AsyncLLM(null_model(**model), engine_config=EngineConfig(max_queue=max_queue))
    try:
        yield llm
    finally:
        llm.shutdown()

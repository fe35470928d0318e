"""carryall: one model, carried to every device.

    >>> from carryall import LLM, SamplingParams                        # doctest: +SKIP
    >>> llm = LLM("demo")                                               # doctest: +SKIP
    >>> llm.generate("def fib(n):", SamplingParams(max_tokens=32))      # doctest: +SKIP

Importing carryall is cheap: a name loads its module, and with it onnxruntime, on first use.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .errors import CarryallError
    from .runtime.api.async_llm import AsyncLLM
    from .runtime.api.dynamic_batching import DynamicBatcher
    from .runtime.api.llm import LLM
    from .runtime.api.session import InferenceSession
    from .runtime.engine.config import EngineConfig
    from .runtime.engine.sampling.beam_search import BeamSearchOptions
    from .runtime.models.config import ModelConfig
    from .runtime.types.outputs import CompletionOutput, RequestOutput
    from .runtime.types.sampling_params import SamplingParams
    from .runtime.types.structured_output import StructuredOutput

__version__ = "0.1.0"

_HOME = {
    "AsyncLLM": ".runtime.api.async_llm",
    "BeamSearchOptions": ".runtime.engine.sampling.beam_search",
    "CarryallError": ".errors",
    "CompletionOutput": ".runtime.types.outputs",
    "DynamicBatcher": ".runtime.api.dynamic_batching",
    "EngineConfig": ".runtime.engine.config",
    "InferenceSession": ".runtime.api.session",
    "LLM": ".runtime.api.llm",
    "ModelConfig": ".runtime.models.config",
    "RequestOutput": ".runtime.types.outputs",
    "SamplingParams": ".runtime.types.sampling_params",
    "StructuredOutput": ".runtime.types.structured_output",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchOptions",
    "CarryallError",
    "CompletionOutput",
    "DynamicBatcher",
    "EngineConfig",
    "InferenceSession",
    "ModelConfig",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutput",
    "__version__",
]


if os.environ.get("CARRYALL_LOG") or os.environ.get("CARRYALL_LOG_FORMAT"):
    from .logs import configure_at_import

    configure_at_import()


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'carryall' has no attribute '{name}'")
    value = getattr(importlib.import_module(_HOME[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

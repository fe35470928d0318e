"""carryall: export, optimize, quantize and run language models as portable ONNX packages.

    >>> from carryall import LLM, SamplingParams                        # doctest: +SKIP
    >>> llm = LLM("demo")                                               # doctest: +SKIP
    >>> llm.generate("def fib(n):", SamplingParams(max_tokens=32))      # doctest: +SKIP

    >>> from carryall import QuantizationRecipe, evaluate, export, quantize
    >>> export("demo", "coder")                                         # doctest: +SKIP
    >>> quantize("coder", "coder-int4", QuantizationRecipe("int4"))     # doctest: +SKIP
    >>> evaluate("coder-int4", reference="coder").perplexity_ratio      # doctest: +SKIP

Importing carryall is cheap: each name imports its module, and with it onnxruntime, at first use.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING

from .deferred_imports import defer_sympy

if TYPE_CHECKING:
    from .errors import CarryallError
    from .graph_opt.quantize.recipe import QuantizationRecipe
    from .progress import Progress
    from .runtime.api.async_llm import AsyncLLM
    from .runtime.api.dynamic_batching import DynamicBatcher
    from .runtime.api.llm import LLM
    from .runtime.api.session import InferenceSession
    from .runtime.api.text_classifier import TextClassifier
    from .runtime.api.text_encoder import TextEncoder
    from .runtime.api.token_classifier import TokenClassifier
    from .runtime.batch import api as batch
    from .runtime.engine.config import EngineConfig
    from .runtime.engine.sampling.beam_search import BeamSearchOptions
    from .runtime.models.config import ModelConfig
    from .runtime.tasks.benchmark import BenchmarkReport, benchmark
    from .runtime.tasks.detect import DetectionReport, detect
    from .runtime.tasks.diff import DiffReport, diff
    from .runtime.tasks.evaluate import EvaluationReport, evaluate
    from .runtime.tasks.export import ExportReport, export
    from .runtime.tasks.optimize import OptimizeReport, optimize
    from .runtime.tasks.plan import PlanReport, plan
    from .runtime.tasks.quantize import QuantizationWarning, QuantizeReport, quantize
    from .runtime.tasks.quantize_any import quantize_any
    from .runtime.tasks.verify import VerificationReport, verify
    from .runtime.types.outputs import CompletionOutput, RequestOutput
    from .runtime.types.sampling_params import SamplingParams
    from .runtime.types.structured_output import StructuredOutput
    from .runtime.types.watermark import Watermark

__version__ = "0.1.0"

# onnxruntime 1.31 sends usage data to Microsoft and keeps a device id in the home folder, unless this
# is set before it is imported. To permit it: ORT_DISABLE_TELEMETRY=0.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
defer_sympy()

_HOME = {
    "AsyncLLM": ".runtime.api.async_llm",
    "BeamSearchOptions": ".runtime.engine.sampling.beam_search",
    "BenchmarkReport": ".runtime.tasks.benchmark",
    "CarryallError": ".errors",
    "CompletionOutput": ".runtime.types.outputs",
    "DetectionReport": ".runtime.tasks.detect",
    "DiffReport": ".runtime.tasks.diff",
    "DynamicBatcher": ".runtime.api.dynamic_batching",
    "EngineConfig": ".runtime.engine.config",
    "InferenceSession": ".runtime.api.session",
    "LLM": ".runtime.api.llm",
    "ModelConfig": ".runtime.models.config",
    "EvaluationReport": ".runtime.tasks.evaluate",
    "ExportReport": ".runtime.tasks.export",
    "OptimizeReport": ".runtime.tasks.optimize",
    "PlanReport": ".runtime.tasks.plan",
    "Progress": ".progress",
    "QuantizationRecipe": ".graph_opt.quantize.recipe",
    "QuantizationWarning": ".runtime.tasks.quantize",
    "QuantizeReport": ".runtime.tasks.quantize",
    "RequestOutput": ".runtime.types.outputs",
    "SamplingParams": ".runtime.types.sampling_params",
    "StructuredOutput": ".runtime.types.structured_output",
    "TextClassifier": ".runtime.api.text_classifier",
    "TextEncoder": ".runtime.api.text_encoder",
    "TokenClassifier": ".runtime.api.token_classifier",
    "VerificationReport": ".runtime.tasks.verify",
    "Watermark": ".runtime.types.watermark",
    "benchmark": ".runtime.tasks.benchmark",
    "detect": ".runtime.tasks.detect",
    "diff": ".runtime.tasks.diff",
    "evaluate": ".runtime.tasks.evaluate",
    "export": ".runtime.tasks.export",
    "optimize": ".runtime.tasks.optimize",
    "plan": ".runtime.tasks.plan",
    "quantize": ".runtime.tasks.quantize",
    "quantize_any": ".runtime.tasks.quantize_any",
    "verify": ".runtime.tasks.verify",
}

# Modules with a short name: `carryall.batch.run(...)`.
_MODULES = {"batch": ".runtime.batch.api"}

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchOptions",
    "BenchmarkReport",
    "CarryallError",
    "CompletionOutput",
    "DetectionReport",
    "DiffReport",
    "DynamicBatcher",
    "EngineConfig",
    "EvaluationReport",
    "ExportReport",
    "InferenceSession",
    "ModelConfig",
    "OptimizeReport",
    "PlanReport",
    "Progress",
    "QuantizationRecipe",
    "QuantizationWarning",
    "QuantizeReport",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutput",
    "TextClassifier",
    "TextEncoder",
    "TokenClassifier",
    "VerificationReport",
    "Watermark",
    "__version__",
    "batch",
    "benchmark",
    "detect",
    "diff",
    "evaluate",
    "export",
    "optimize",
    "plan",
    "quantize",
    "quantize_any",
    "verify",
]


if os.environ.get("CARRYALL_LOG") or os.environ.get("CARRYALL_LOG_FORMAT"):
    from .logs import configure_at_import

    configure_at_import()


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return importlib.import_module(_MODULES[name], __name__)
    if name not in _HOME:
        raise AttributeError(f"module 'carryall' has no attribute '{name}'")
    value = getattr(importlib.import_module(_HOME[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

"""The CPU through ONNX Runtime: GroupQueryAttention and MatMulNBits on slots of reserved memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx_ir as ir

from ..graph_opt.lower.slots import SlotOptions, slot_passes
from ..runtime.errors import CarryallError, UsageError
from . import machine, ort
from .base import Provider, Runner, RunnerConfig
from .slot_runner import SlotRunner

_OPTIONS = {"spinning": True}


class CpuProvider(Provider):
    """Any processor that ONNX Runtime has kernels for (x86-64, arm64)."""

    name = "cpu"
    execution_provider = ort.CPU

    def available(self) -> str | None:
        """None if this provider can run here, else why not and what to do about it."""
        try:
            ort.load_onnxruntime(f"provider '{self.name}'")
            ort.check_available(self.execution_provider)
        except CarryallError as error:
            return str(error)
        return None

    def passes(self, config: RunnerConfig) -> list[ir.passes.PassBase]:
        """Passes that lower a portable decoder graph to slots, in order."""
        if config.context_length is None:
            raise UsageError("lowering needs RunnerConfig.context_length: rope tables have that length")
        return slot_passes(SlotOptions(context_length=config.context_length))

    def session(self, model: Path, options: RunnerConfig | None = None) -> Any:
        """Open any ONNX model on the CPU; an ``onnxruntime.InferenceSession``."""
        settings = _session_options(options or RunnerConfig(), fixed_shapes=True)
        return ort.open_session(model, self.execution_provider, settings)

    def runner(self, model: Path, config: RunnerConfig) -> Runner:
        """Load a graph lowered by ``passes`` for generation."""
        settings = _session_options(config, fixed_shapes=False)
        return SlotRunner(ort.open_session(model, self.execution_provider, settings), config, str(model))


def _session_options(config: RunnerConfig, *, fixed_shapes: bool) -> Any:
    unknown = config.options.keys() - _OPTIONS.keys()
    if unknown:
        raise UsageError(f"provider 'cpu' has no option '{min(unknown)}'; it has: {', '.join(_OPTIONS)}")
    spinning = config.options.get("spinning", _OPTIONS["spinning"])
    entries = {"session.intra_op.allow_spinning": "1" if spinning else "0"}
    return ort.session_options(
        config.num_threads or machine.usable_cores(), entries, fixed_shapes=fixed_shapes
    )


PROVIDER = CpuProvider

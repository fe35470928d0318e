"""The magnitude of the numbers that an output is computed from, where it differs from the output's own."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir

from ..graph.load import load_model

# Kernels compute a sigmoid as 1/2 plus an odd function: a result of 1e-6 has the rounding error of 1/2.
_MAGNITUDES = {"Sigmoid": 1.0, "HardSigmoid": 1.0}
_MOVES = {"Cast", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"}


def output_magnitudes(model: Path) -> dict[str, float]:
    """Return magnitudes by output; outputs computed from numbers of their own magnitude are left out."""
    found = {str(output.name): _producer(output) for output in load_model(model).graph.outputs}
    return {name: _MAGNITUDES[kind] for name, kind in found.items() if kind in _MAGNITUDES}


def _producer(value: ir.Value) -> str | None:
    """Return the operator that computed a value, before operators that only move elements."""
    node = value.producer()
    while node is not None and node.op_type in _MOVES and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    return None if node is None else node.op_type

"""Layers whose sums a logarithm reads, such as the filters of a spectrogram: 8 bits are too few for them.

Rounding errors are absolute, and a logarithm makes them relative: levels of 1/256 of the loudest value hold
48 dB, where spectrograms have twice as many.
"""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from .layers import Layer
from .placement import MOVERS

REASON = "a logarithm reads its result, for which 8 bits are too few"
_POWERS = {
    "Abs",
    "Add",
    "Div",
    "Max",
    "Mul",
    "Neg",
    "Pow",
    "ReduceL2",
    "ReduceSum",
    "ReduceSumSquare",
    "Sqrt",
    "Sub",
}
_LINEAR = {"Concat", "Conv", "Gather", "Gemm", "Identity", "MatMul", "Pad", "ReduceMean"}
_PASSED = MOVERS | _POWERS | _LINEAR | {"Clip"}


def before_logarithms(layers: Iterable[Layer]) -> dict[str, str]:
    """Return the weights of layers between which and a ``Log`` nothing but sums and powers stand, and why.

    An activation in between compresses what it reads, so that layers in front of it are not meant.
    """
    return {layer.name: REASON for layer in layers if _reaches_logarithm(layer.output)}


def _reaches_logarithm(value: ir.Value) -> bool:
    waiting, seen = [value], {value}
    while waiting:
        for node in waiting.pop().consumers():
            if node.domain:
                continue
            if node.op_type == "Log":
                return True
            if node.op_type in _PASSED:
                new = [output for output in node.outputs if output not in seen]
                seen.update(new)
                waiting += new
    return False

"""AWQ: important input channels are scaled up before rounding, which reduces their rounding error.

    MatMul(Norm(h) * gain, W)  ->  MatMul(Norm(h) * (gain / s), s * W)

J. Lin et al., "AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration",
https://arxiv.org/abs/2306.00978. The factors are a power of the channels' RMS. The power is the one on a
grid with the smallest error of the products. ``blockwise.choose_scales`` takes the place of the paper's
clipping search.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from ...graph.edit import weight
from .arithmetic import Arithmetic
from .blockwise import BlockFormat, Floats, Quantized, dequantize, levels_of
from .grouped import refitted
from .inputs import Inputs

_POWERS = tuple(step / 10 for step in range(11))
_COLUMNS = 256  # columns of each weight that the search uses
_PLAIN = Arithmetic()
_NORMS = ("RMSNormalization", "LayerNormalization")


def can_scale(source: ir.Value) -> bool:
    """Return whether a value comes from a norm whose gain can be divided without affecting other nodes."""
    norm = source.producer()
    if norm is None or norm.op_type not in _NORMS or source.is_graph_output():
        return False
    readers = [use.node.inputs[1] for use in source.uses() if use.node.op_type == "MatMul" and use.idx == 0]
    changed = [*readers, *(value for value in norm.inputs[1:] if value is not None)]
    own = all(weight(value) is not None and value is not None and len(value.uses()) == 1 for value in changed)
    return own and len(readers) == len(source.uses())


def factors(
    weights: Sequence[Floats], form: BlockFormat, inputs: Inputs, arithmetic: Arithmetic = _PLAIN
) -> Floats:
    """Return the factors [in] that divide the input channels and multiply the rows of ``weights``.

    Args:
        weights: matrices [in, out] that multiply the same inputs.
        form: their storage format.
        inputs: the inputs on the calibration text.
        arithmetic: the inner loops.
    """
    sizes: Floats = np.sqrt(np.maximum(inputs.importance, 1e-12)).astype(np.float32)
    plain = dataclasses.replace(form, group_size=0)  # the search takes free scales
    samples = [np.array(matrix[:, :: -(-matrix.shape[1] // _COLUMNS)], np.float32) for matrix in weights]
    tried = [_normalised(sizes**power) for power in _POWERS]
    errors = [
        sum(_error(sample, plain, inputs.moments, scale, arithmetic) for sample in samples) for scale in tried
    ]
    return tried[int(np.argmin(errors))]


def quantize(weight: Floats, form: BlockFormat, inputs: Inputs, arithmetic: Arithmetic = _PLAIN) -> Quantized:
    """Round a matrix [in, out] to nearest, with ranges of least error weighted by the inputs' mean squares.

    Args:
        weight: the matrix.
        form: its storage format.
        inputs: its inputs. The ranges depend on their mean squares, the final scales on all moments.
        arithmetic: the inner loops.

    Raises:
        GraphError: the matrix holds NaN or infinity.
    """
    found = arithmetic.starting_scales(weight, form, inputs.importance)
    result = levels_of(weight, form, found.scales, found.zero_points)
    levels = result.values.astype(np.float32) - np.repeat(found.zero_points, form.block_size, 0)
    slope = inputs.moments @ (weight - levels * np.repeat(found.scales, form.block_size, 0))
    return result._replace(scales=refitted(slope, levels, found, inputs.moments, form).scales)


def _normalised(scale: Floats) -> Floats:
    result: Floats = np.clip(scale / np.sqrt(scale.max() * scale.min()), 1e-4, 1e4).astype(np.float32)
    return result


def _error(
    sample: Floats, form: BlockFormat, moments: Floats, scale: Floats, arithmetic: Arithmetic
) -> float:
    """Return a value proportional to the mean squared error of products after scaling and rounding."""
    scaled = sample * scale[:, None]
    off = dequantize(arithmetic.round_to_nearest(scaled, form), form) / scale[:, None] - sample
    return float(np.einsum("ij,ij->", off, moments @ off))

"""An int8 KV cache: scales from calibration text, written as QDQ pairs in front of attention.

    Attention(q, k, v) -> Attention(q, Dequantize(Quantize(k)), Dequantize(Quantize(v)))

Keys are quantized after the rope, as they are cached. A lowering to kernels with an int8 cache uses these
scales (``lower/attention/kv_int8.py``); other targets compute the pairs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ....contract import PAST, is_past, present_of
from ....errors import GraphError
from ....progress import Progress
from ...graph.edit import add_initializer, insert, nodes_of
from ...graph.onnx_files import read_onnx
from ...passes.base import GraphPass
from ..calibration.activations import ActivationReader, Tokens, read_windows

Floats = npt.NDArray[np.float32]
_LEVELS = np.float32(127)
_SMALLEST = np.float32(1e-6)  # smallest magnitude, so that a channel of zeros has a scale
KV_FORMATS = {"int8": False, "int8-tensor": True}  # by name, whether the scale is per tensor


def kv_scales(
    model: Path,
    windows: Sequence[Tokens],
    *,
    context_length: int,
    progress: Progress | None = None,
) -> dict[str, Floats]:
    """Measure the scale of every channel of the cache: its largest magnitude on the calibration text.

    Args:
        model: a portable graph.
        windows: calibration text, each window run as a separate sequence.
        context_length: start positions of the windows are spread over it.
        progress: called after every window.

    Returns:
        Scales [kv_heads * head_dim] by name of the cache input.

    Raises:
        GraphError: the graph has no cache, or a value is NaN or infinite.
        UsageError: the text has fewer than ``MIN_TOKENS`` tokens.
    """
    inputs = [str(value.name) for value in read_onnx(model).graph.inputs]
    presents = {present_of(name): name for name in inputs if is_past(name)}
    if not presents:
        raise GraphError(f"{model} has no KV cache")
    largest: dict[str, Floats] = {}
    for values in read_windows(ActivationReader(model, list(presents)), windows, context_length, progress):
        for present, past in presents.items():
            magnitude = np.abs(values[present]).max(axis=(0, 2)).reshape(-1)  # [kv_heads * head_dim]
            largest[past] = np.maximum(magnitude, largest.get(past, _SMALLEST))
    return {name: np.divide(value, _LEVELS, dtype=np.float32) for name, value in largest.items()}


def has_quantized_kv(graph: ir.Graph) -> bool:
    """Return whether the keys of an attention are quantized before they are cached."""
    keys = [node.inputs[1] for node in nodes_of(graph, "Attention")]
    return any(_is_dequantized(key.producer()) for key in keys if key is not None)


class QuantizeKVPass(GraphPass):
    """Quantize the keys and values that every ``Attention`` caches.

    Args:
        scales: the result of ``kv_scales``, or a scale of shape [] per tensor.
    """

    def __init__(self, scales: Mapping[str, Floats]) -> None:
        super().__init__()
        self.scales = scales

    def rewrite(self, graph: ir.Graph) -> None:
        """Insert a QDQ pair in front of the keys and values of every attention with a cache."""
        for node in nodes_of(graph, "Attention"):
            caches = [node.inputs[index] if len(node.inputs) > 5 else None for index in (4, 5)]
            names = [str(cache.name) for cache in caches if cache is not None and cache.name in self.scales]
            if len(names) < 2:
                self.refuse(node, "it has no KV cache with known scales")
                continue
            for position, name in enumerate(names, start=1):
                node.replace_input_with(position, self._quantized(graph, node, node.inputs[position], name))
            self.fired += 1

    def _quantized(self, graph: ir.Graph, node: ir.Node, value: ir.Value | None, name: str) -> ir.Value:
        stem = name.replace(PAST, "kv_cache")
        content = np.asarray(self.scales[name], np.float32)
        scale = add_initializer(graph, f"{stem}.scale", content)
        zero = add_initializer(graph, f"{stem}.zero_point", np.zeros_like(content, np.int8))
        quantized = insert(node, "QuantizeLinear", [value, scale, zero], {"axis": 2})
        result = insert(node, "DequantizeLinear", [quantized.outputs[0], scale, zero], {"axis": 2})
        quantized.name, result.name = f"{stem}/QuantizeLinear", f"{stem}/DequantizeLinear"
        if value is not None:
            result.outputs[0].type, result.outputs[0].shape = value.type, value.shape
        return result.outputs[0]


def _is_dequantized(node: ir.Node | None) -> bool:
    return node is not None and node.op_type == "DequantizeLinear"

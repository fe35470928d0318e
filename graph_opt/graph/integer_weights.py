"""Weights whose 8-bit products onnxruntime sums exactly on x86 processors without VNNI.

With one entry of the session's configuration, onnxruntime makes constant int8 weights uint8, whose sums are
exact. It fails to convert some (onnxruntime 1.32): weights without zero points become invalid, shared ones
end with an error, those of QLinearMatMul of opset 21 stay. These are changed first. With VNNI the entry has
no effect.
Source: onnxruntime_session_options_config_keys.h of https://github.com/microsoft/onnxruntime.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError

from ...errors import GraphError
from .edit import add_initializer, weight
from .integer_sums import OPERATORS, saturates
from .lazy import shape_of
from .load import read_model

_ENTRY = ("session.x64quantprecision", "1")
_MIDDLE = np.uint8(128)
# Inputs with a weight and its zero point.
_WEIGHTS = {
    "DequantizeLinear": [(0, 2)],
    "DynamicQuantizeLSTM": [(1, 9), (2, 11)],
    "DynamicQuantizeMatMul": [(1, 3)],
    "MatMulInteger": [(1, 3)],
    "MatMulIntegerToFloat": [(1, 5)],
    "QAttention": [(1, 7)],
    "QGemm": [(3, 5)],
    "QLinearConv": [(3, 5)],
    "QLinearMatMul": [(3, 5)],
}
# Operators whose weights are always changed here; the two of an LSTM must have the same type.
_STAYING = ("DynamicQuantizeLSTM", "QLinearMatMul")
_FOLDER = "session.model_external_initializers_file_folder_path"


def exact_weights(model: str | bytes) -> tuple[str | bytes, dict[str, str]]:
    """Return what to open instead of a file or its content, and entries for the session.

    What is no ONNX is returned as it is.
    """
    try:
        proto = (
            ir.from_proto(onnx.load_from_string(model))
            if isinstance(model, bytes)
            else read_model(Path(model))
        )
    except (GraphError, DecodeError):
        return model, {}
    if not _multiplies_integers(proto):
        return model, {}
    entries = dict([_ENTRY])
    if not _ease_conversion(proto):
        return model, entries
    if isinstance(model, str):
        entries[_FOLDER] = str(Path(model).parent)
    return ir.to_proto(proto).SerializeToString(), entries


def prepare_sums(model: ir.Model) -> dict[str, str]:
    """Change a model in memory so that its 8-bit sums are exact; return entries for its session."""
    if not (saturates() and _multiplies_integers(model)):
        return {}
    _ease_conversion(model)
    return dict([_ENTRY])


def _ease_conversion(model: ir.Model) -> bool:
    """Change the weights that onnxruntime cannot convert, and zero points that are missing or shared."""
    nodes = [node for graph in model.graphs() for node in graph if _is_product(node)]
    changes = [_ease(node, at, zero_at) for node in nodes for at, zero_at in _WEIGHTS[node.op_type]]
    return any(changes)


def _is_product(node: ir.Node) -> bool:
    return node.op_type in _WEIGHTS and node.domain in ("", "com.microsoft")


def _ease(node: ir.Node, at: int, zero_at: int) -> bool:
    """Change one weight of a node; return whether that was necessary."""
    stored, zero = node.inputs[at], node.inputs[zero_at] if len(node.inputs) > zero_at else None
    values, zeros = weight(stored), weight(zero)
    if stored is None or values is None or values.dtype != ir.DataType.INT8 or (zero and zeros is None):
        return False
    dequantizes = node.op_type == "DequantizeLinear"
    readers = max(len(stored.uses()), len(node.outputs[0].uses()) if dequantizes else 0)
    shape = shape_of(zeros) if zeros is not None else _scale_shape(node) if dequantizes else ()
    offsets = np.zeros(shape, np.int8) if zeros is None else zeros.numpy()
    if node.op_type in _STAYING or readers > 1:
        unsigned = values.numpy().view(np.uint8) ^ _MIDDLE
        _replace(node, at, f"{values.name}.uint8", unsigned)
        _replace(node, zero_at, f"{values.name}.zero_points", offsets.view(np.uint8) ^ _MIDDLE)
    elif (dequantizes and zero is None) or (zero is not None and len(zero.uses()) > 1):
        _replace(node, zero_at, f"{values.name}.zero_points", offsets)
    else:
        return False
    return True


def _scale_shape(node: ir.Node) -> tuple[int, ...]:
    scale = node.inputs[1]
    return () if scale is None or scale.shape is None else tuple(scale.shape.numpy())


def _replace(node: ir.Node, at: int, name: str, array: npt.NDArray[Any]) -> None:
    if node.graph is not None:
        node.resize_inputs(max(len(node.inputs), at + 1))
        node.replace_input_with(at, add_initializer(node.graph, name, np.asarray(array)))


def _multiplies_integers(model: ir.Model) -> bool:
    return any(name in node.op_type for node in model.graph.all_nodes() for name in OPERATORS)

"""Run small graphs in ONNX's own evaluator, which shares no kernel with onnxruntime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

from ..graph.edit import hold_in_memory
from ..graph.lazy import Array
from ..graph.load import load_model

# What the evaluator computes in about a second: it has no threads, and convolutions are in NumPy.
_MOST_NODES, _MOST_WEIGHTS, _MOST_ELEMENTS = 400, 1 << 20, 1 << 14
_SLOW = frozenset({"Loop", "Scan", "If", "LSTM", "GRU", "RNN", "SequenceMap"})
_FLOATS = frozenset({ir.DataType.FLOAT, ir.DataType.DOUBLE, None})
_NOT_FLOAT = ("Quantize", "Integer", "Random", "QLinear", "Dropout", "Bernoulli", "Multinomial")


def evaluated(model: Path, names: Sequence[str], feed: Mapping[str, Any]) -> dict[str, Array] | None:
    """Return the outputs of a small float graph of standard operators; None for others.

    Args:
        model: the ONNX file.
        names: what its inputs are called in ``feed``, in order.
        feed: the inputs.
    """
    graph = load_model(model).graph
    if not _is_small(graph) or sum(np.size(array) for array in feed.values()) > _MOST_ELEMENTS:
        return None
    loaded = load_model(model)
    hold_in_memory(loaded.graph)
    inputs_of_graph = [str(value.name) for value in graph.inputs if not value.is_initializer()]
    try:
        evaluator = ReferenceEvaluator(onnx.ModelProto.FromString(ir.to_proto(loaded).SerializeToString()))
        with np.errstate(all="ignore"):
            results = evaluator.run(
                None, {mine: feed[name] for mine, name in zip(inputs_of_graph, names, strict=True)}
            )
    except Exception:  # noqa: BLE001 -- of many types: it lacks operators, or forms of them
        return None
    outputs = [str(value.name) for value in graph.outputs]
    return {name: np.asarray(array) for name, array in zip(outputs, results, strict=True)}


def _is_small(graph: ir.Graph) -> bool:
    nodes = list(graph.all_nodes())
    weights = [value.const_value for value in graph.initializers.values() if value.const_value is not None]
    return (
        len(nodes) <= _MOST_NODES
        and sum(tensor.size for tensor in weights) <= _MOST_WEIGHTS
        and all(not node.domain and node.op_type not in _SLOW for node in nodes)
        and not any(part in node.op_type for node in nodes for part in _NOT_FLOAT)
        and all(value.dtype in _FLOATS for value in graph.outputs)
    )

"""Convert weights of 8-bit floats to int8 in blocks, for targets whose products have no kernel for them.

A level of int8 is about 1/128 of a block's largest weight, and the largest one may be clipped by a level, so
the error is at most 0.9 % of it. E4M3 itself rounds a weight by up to 1/16 of its own value.
"""

from __future__ import annotations

import logging

import numpy as np
import onnx_ir as ir

from ...graph.edit import add_initializer, insert, int_attribute, nodes_of, replace, weight
from ...graph.lazy import Array, SharedComputation, lazy, shape_of
from ...passes.base import GraphPass
from ...quantize.algorithms.blockwise import BlockFormat, round_to_nearest
from .dequantize_weights import dequantized

_log = logging.getLogger(__name__)


class Float8WeightsPass(GraphPass):
    """Store weights of FLOAT8E4M3FN as int8 in blocks of at most 32 inputs."""

    def rewrite(self, graph: ir.Graph) -> None:
        """Rewrite every DequantizeLinear of a constant matrix."""
        for node in nodes_of(graph, "DequantizeLinear"):
            tensors = [tensor for value in node.inputs if (tensor := weight(value)) is not None]
            if len(tensors) < len(node.inputs) or tensors[0].dtype != ir.DataType.FLOAT8E4M3FN:
                continue
            axis, shape = int_attribute(node, "axis", 1), shape_of(tensors[0])
            form = BlockFormat(bits=8).fitted(shape[axis]) if len(shape) == 2 else None
            if form is None:
                self.refuse(node, "no size of blocks divides its inputs")
                continue
            self._convert(graph, node, dequantized(node, tensors), axis, form)
            self.fired += 1
        if self.fired:
            _log.warning(
                "%d weights of 8-bit floats are computed as int8, which this target has a kernel for; the "
                "error is at most 0.9 %% of the largest weight of a block",
                self.fired,
            )

    def _convert(
        self, graph: ir.Graph, node: ir.Node, floats: ir.LazyTensor, axis: int, form: BlockFormat
    ) -> None:
        def compute() -> tuple[Array, ...]:
            matrix = floats.numpy().astype(np.float32)
            found = round_to_nearest(matrix if axis == 0 else np.ascontiguousarray(matrix.T), form)
            parts = (found.values, found.scales)
            return parts if axis == 0 else tuple(np.ascontiguousarray(part.T) for part in parts)

        shared, shape = SharedComputation(compute), shape_of(floats)
        small = tuple(size // form.block_size if i == axis else size for i, size in enumerate(shape))
        stem = str(node.inputs[0] and node.inputs[0].name).removesuffix(".values")
        operands = [
            add_initializer(graph, f"{stem}.int8", lazy(lambda: shared.part(0), ir.DataType.INT8, shape)),
            add_initializer(
                graph, f"{stem}.int8_scales", lazy(lambda: shared.part(1), ir.DataType.FLOAT, small)
            ),
        ]
        attributes = {"axis": axis, "block_size": form.block_size}
        rewritten = insert(node, "DequantizeLinear", operands, attributes).outputs[0]
        replace(node.outputs[0], rewritten)
        graph.remove(node, safe=True)

"""Lower products with blocked weights to int8 products with one scale per row, for runs of several tokens.

    m = max(|x|) of each row      MatMulIntegerToFloat(QuantizeLinear(x / m), W') * m
    W' = the dequantized weight in int8, one scale per column

MatMulNBits unpacks its weight again for every few rows, so int8 kernels are about twice as fast from three
rows on. For one row they read twice the bytes of a 4-bit weight. With a scale per row, unlike a scale per
tensor, a row does not depend on other rows, and the very large activations of first tokens do not affect
other tokens.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ...graph.edit import (
    MICROSOFT,
    add_initializer,
    insert,
    nodes_of,
    remove_unused,
    replace,
    shared_constant,
)
from ...graph.lazy import Array
from ...passes.base import GraphPass
from ...quantize.formats.integer_products import lazy_columns
from .blocked_weight import BlockedWeight, blocked_weight
from .dequantize_weights import dequantized

_LEVELS, _MIDDLE = 127, 128
_TINY = np.finfo(np.float32).tiny


class WideProductsPass(GraphPass):
    """Rewrite every MatMul whose weight is blocked along its inputs, but not embeddings and tied heads.

    8-bit weights beside 4-bit ones belong to sensitive layers, so they keep a scale per block.
    """

    def rewrite(self, graph: ir.Graph) -> None:
        """Rewrite all such products."""
        weights = {node: blocked_weight(node.inputs[1]) for node in nodes_of(graph, "MatMul")}
        least = min((one.bits for one in weights.values() if isinstance(one, BlockedWeight)), default=0)
        for node, found in weights.items():
            if found is None:
                continue
            if isinstance(found, str):
                self.refuse(node, found)
            elif found.axis != 0:
                self.refuse(node, "it is blocked along its outputs")
            elif found.bits > least:
                self.refuse(node, f"its weight has {found.bits} bits, others have {least}")
            else:
                self._lower(graph, node, found)
                self.fired += 1

    @staticmethod
    def _lower(graph: ir.Graph, node: ir.Node, found: BlockedWeight) -> None:
        def op(op_type: str, *operands: ir.Value | None, domain: str = "", **attributes: int) -> ir.Value:
            return insert(node, op_type, operands, attributes, domain=domain).outputs[0]

        def held(name: str, content: Array) -> ir.Value:
            return shared_constant(graph, f"wide.{name}", content)

        stored = [found.values, found.scales, *([found.zero_points] if found.zero_points is not None else [])]
        columns = lazy_columns(dequantized(found.node, stored), found.stem)
        values, scales = (add_initializer(graph, f"{found.stem}.wide_{what}", part) for what, part in columns)
        x = node.inputs[0]
        largest = op("ReduceMax", op("Abs", x), held("last_axis", np.array([-1])), keepdims=1)
        largest = op("Max", largest, held("tiny", np.array(_TINY)))
        step = held("step", np.array(1 / _LEVELS, np.float32))
        middle = held("middle", np.array(_MIDDLE, np.uint8))
        rounded = op("QuantizeLinear", op("Div", x, largest), step, middle)
        operands = (rounded, values, step, scales, middle)
        product = op("MatMulIntegerToFloat", *operands, domain=MICROSOFT)
        replace(node.outputs[0], op("Mul", product, largest))
        remove_unused(graph, node)

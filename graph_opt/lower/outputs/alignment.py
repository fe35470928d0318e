"""Return where a decoder's tokens attend to in the rows of an encoder, in place of the logits.

Some heads of cross-attention follow the sound that is written down (Whisper's alignment heads): with them,
tokens get times.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from ....contract import ALIGNMENT
from ....errors import GraphError
from ...analysis.decoder_inputs import encoder_caches
from ...graph.edit import float_attribute, insert, nodes_of, shared_constant, static_size
from ...passes.base import GraphPass


class AlignmentPass(GraphPass):
    """Make weights float32 [heads, tokens, rows] of one sequence the output, beside its caches.

    Layers behind the last one of these heads are left without readers.

    Args:
        heads: layer and head of each; empty for all heads of the last half of the layers, as in Whisper's own
            code.

    Raises:
        GraphError: the graph has no such layer or head.
    """

    def __init__(self, heads: Sequence[tuple[int, int]]) -> None:
        super().__init__()
        self._heads = heads

    def rewrite(self, graph: ir.Graph) -> None:
        """Replace the outputs."""
        nodes = [(node, caches) for node in nodes_of(graph, "Attention") if (caches := encoder_caches(node))]
        layers = [(node, caches[0]) for node, caches in nodes]
        chosen = list(self._heads) or [
            (layer, head)
            for layer in range(len(layers) // 2, len(layers))
            for head in range(_heads(layers[layer][1]))
        ]
        weights = []
        for layer in dict.fromkeys(layer for layer, _ in chosen):
            heads = [head for each, head in chosen if each == layer]
            count = _heads(layers[layer][1]) if 0 <= layer < len(layers) else 0
            if not all(0 <= head < count for head in heads):
                raise GraphError(
                    f"the decoder has no heads {heads} in layer {layer}, which 'alignment_heads' of "
                    "generation_config.json states"
                )
            weights.append(_weights(graph, *layers[layer], heads))
        if not weights:
            raise GraphError("the decoder attends to no rows of an encoder, so its tokens have no times")
        joined = ir.node("Concat", weights, {"axis": 1})
        alone = ir.node(
            "Squeeze", [joined.outputs[0], shared_constant(graph, "axis_0", np.array([0], np.int64))]
        )
        graph.extend([joined, alone])
        output = alone.outputs[0]
        output.name, output.type = ALIGNMENT, ir.TensorType(ir.DataType.FLOAT)
        output.shape = ir.Shape(["heads", "sequence", "total_encoder_rows"])
        needed = _behind(output)
        # onnxruntime 1.32 computes no attention with a cache whose present one is no output.
        kept = [value for value in graph.outputs if value.producer() in needed]
        graph.outputs.clear()
        graph.outputs.extend([output, *kept])
        self.fired += 1


def _behind(value: ir.Value) -> set[ir.Node | None]:
    """Return the nodes that compute a value."""
    found, left = set[ir.Node | None](), [value.producer()]
    while left:
        node = left.pop()
        if node is None or node in found:
            continue
        found.add(node)
        left += [operand.producer() for operand in node.inputs if operand is not None]
    return found


def _heads(keys: ir.Node) -> int:
    """Return the number of heads of a cache of keys, which a node appends to."""
    return static_size(keys.inputs[0], 1) or 0


def _weights(graph: ir.Graph, node: ir.Node, keys: ir.Node, heads: Sequence[int]) -> ir.Value:
    """Return the weights of some heads, [1, heads, tokens, rows], of new rows only."""
    key = keys.inputs[1]
    numbers = shared_constant(graph, f"heads_{'_'.join(map(str, heads))}", np.array(heads, np.int64))
    q, k = (
        insert(node, "Gather", [value, numbers], {"axis": 1}).outputs[0] for value in (node.inputs[0], key)
    )
    size = static_size(keys.inputs[0], 3) or 1
    scale = np.array(float_attribute(node, "scale", size**-0.5), np.float32)
    scaled = insert(node, "Mul", [q, shared_constant(graph, f"scale_{scale}", scale)]).outputs[0]
    turned = insert(node, "Transpose", [k], {"perm": [0, 1, 3, 2]}).outputs[0]
    scores = insert(node, "MatMul", [scaled, turned]).outputs[0]
    return insert(node, "Softmax", [scores], {"axis": -1}).outputs[0]

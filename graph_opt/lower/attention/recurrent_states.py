"""Layers with recurrent states: carryall's operators, onnxruntime's, or the refusal of a target without them.

The standard's operators of opset 27 are ``LinearAttention`` and ``CausalConvWithState``; carryall's are in
``recurrent_operator.cpp`` in ``providers/native/sources``.
"""

from __future__ import annotations

import onnx_ir as ir

from ....contract import ENCODER_STATES, is_past_state
from ....errors import UnsupportedAttentionError
from ...analysis.decoder_inputs import find_input
from ...graph.edit import (
    add_initializer,
    float_attribute,
    insert,
    int_attribute,
    nodes_of,
    remove_unused,
    replace,
    static_size,
    text_attribute,
    weight,
)
from ...graph.lazy import lazy, shape_of
from ...graph.recurrent_states import use_microsoft_states
from ...passes.base import GraphPass
from ..paged_kv import BEGINS, STATE_PLACES
from .unpadded_masks import remove_padding

DOMAIN = "carryall"
LAYOUT = 2  # version of the states; the kernels refuse others
_LANES = 16  # columns of a delta rule's state that lie together
_TRANSPOSED = [0, 2, 1]


class RefuseStatesPass(GraphPass):
    """Refuse a graph with recurrent states or an encoder's rows, which are explicit where that is possible.

    Raises:
        UnsupportedAttentionError: the graph has such inputs.
    """

    def rewrite(self, graph: ir.Graph) -> None:
        """Check the inputs."""
        if find_input(graph, ENCODER_STATES) is not None:
            raise UnsupportedAttentionError(
                "the graph attends to rows of an encoder, which these slots and blocks do not hold"
            )
        states = [value.name for value in graph.inputs if is_past_state(value.name)]
        if states:
            raise UnsupportedAttentionError(
                f"the graph has recurrent states ({states[0]} and others), which slots and blocks do not hold"
            )


class MicrosoftStatesPass(GraphPass):
    """Replace the standard's operators with states, of opset 27, by equal ones of com.microsoft.

    So the graph needs no newer opset than its other operators do.
    """

    def rewrite(self, graph: ir.Graph) -> None:
        """Change the domain of each such node."""
        self.fired += use_microsoft_states(graph)


class NativeStatesPass(GraphPass):
    """Rewrite the operators with states to carryall's, for one flat batch of the tokens of all rows.

    The states of all sequences are one input for each layer and kind, written in place; ``STATE_PLACES``,
    [rows], has the index of each row's. A batch has no padding, so products with the attention mask go.

    Args:
        bfloat16: store the states of linear attention in bfloat16, rounded after each pair of tokens;
            arithmetic and the states of convolutions stay float32.

    Raises:
        UnsupportedAttentionError: the kernels do not compute such a layer.
    """

    def __init__(self, *, bfloat16: bool = False) -> None:
        super().__init__()
        self._bfloat16 = bfloat16

    def rewrite(self, graph: ir.Graph) -> None:
        """Rewrite the nodes, then the inputs and outputs of the states."""
        delta = list(nodes_of(graph, "LinearAttention"))
        convolutions = list(nodes_of(graph, "CausalConvWithState"))
        if not delta and not convolutions:
            return
        begins = next((value for value in graph.inputs if value.name == BEGINS), None)
        if begins is None:
            raise UnsupportedAttentionError("states in blocks need layers with attention; the graph has none")
        places = ir.val(STATE_PLACES, ir.DataType.INT32, ["rows"])
        graph.inputs.append(places)
        for node in delta:
            _delta_rule(graph, node, begins, places, bfloat16=self._bfloat16)
        for node in convolutions:
            _short_convolution(graph, node, begins, places)
        for node in list(nodes_of(graph, "Mul")):
            remove_padding(graph, node)
        self.fired += len(delta) + len(convolutions)


def _delta_rule(
    graph: ir.Graph, node: ir.Node, begins: ir.Value, places: ir.Value, *, bfloat16: bool
) -> None:
    query, key, value, states, decay, beta = [*node.inputs, *[None] * 6][:6]
    heads, rule = int_attribute(node, "kv_num_heads", 0), text_attribute(node, "update_rule", "gated_delta")
    sizes = [static_size(states, axis) for axis in (1, 2, 3)]
    if states is None or None in sizes or sizes[0] != heads or int_attribute(node, "q_num_heads", 0) != heads:
        raise _unsupported(node, "has other heads of queries than of states, or states of unknown sizes")
    if rule not in ("gated_delta", "gated") or decay is None or (beta is None) != (rule == "gated"):
        raise _unsupported(node, f"has the update rule {rule}")
    _, key_size, value_size = (size or 0 for size in sizes)
    if value_size % _LANES:
        raise _unsupported(node, f"has heads of {value_size} values, which is no multiple of {_LANES}")
    attributes = {
        "layout": LAYOUT,
        "heads": heads,
        "key_heads": heads,
        "key_size": key_size,
        "value_size": value_size,
        "scale": float_attribute(node, "scale", 0.0) or key_size**-0.5,
        "bfloat16": int(bfloat16),
    }
    operands = [query, key, value, decay, beta, states, begins, places]
    lowered = insert(node, "DeltaRule", operands, attributes, domain=DOMAIN)
    lowered.name = node.name
    replace(node.outputs[0], lowered.outputs[0])
    tiles, key_lines = value_size // _LANES, -(-key_size // _LANES)
    held = 2 * key_lines + tiles + 1  # lines of a token that the states do not contain yet; see recurrent.h
    content = -(-tiles * key_size // 2) if bfloat16 else tiles * key_size  # lines of 16 floats
    _keep_in_place(graph, node, states, [heads, content + held, _LANES])


def _short_convolution(graph: ir.Graph, node: ir.Node, begins: ir.Value, places: ir.Value) -> None:
    x, weights, bias, states = [*node.inputs, *[None] * 4][:4]
    tensor, activation = weight(weights), text_attribute(node, "activation", "none")
    if x is None or states is None or tensor is None or len(tensor.shape) != 3 or tensor.shape[1] != 1:
        raise _unsupported(node, "has weights that are no initializer [channels, 1, taps]")
    channels, _, taps = shape_of(tensor)
    if taps < 2 or activation not in ("none", "silu", "swish") or static_size(states, 1) != channels:
        raise _unsupported(node, f"has {taps} taps of {channels} channels, and the activation {activation}")
    by_tap = lazy(lambda: tensor.numpy()[:, 0].T.copy(), tensor.dtype, (taps, channels))
    # The kernel reads tokens first, [batch, sequence, channels], as the products around it write them; the
    # standard operator has channels first. The transposes around it go, or one is written where the graph
    # had none.
    source = x.producer()
    if source is not None and _transposes(source) and source.inputs[0] is not None:
        x = source.inputs[0]
    else:
        x = insert(node, "Transpose", [x], {"perm": _TRANSPOSED}).outputs[0]
    taps_first = add_initializer(graph, f"{tensor.name}_by_tap", by_tap)
    attributes = {"layout": LAYOUT, "silu": int(activation != "none")}
    operands = [x, taps_first, bias, states, begins, places]
    lowered = insert(node, "ShortConvolution", operands, attributes, domain=DOMAIN)
    lowered.name = node.name
    out = lowered.outputs[0]
    out.type, out.shape = x.type, x.shape
    for use in list(node.outputs[0].uses()):
        if _transposes(use.node):
            replace(use.node.outputs[0], out)
            remove_unused(graph, use.node)
    if node.outputs[0].uses() or node.outputs[0].is_graph_output():
        replace(node.outputs[0], insert(node, "Transpose", [out], {"perm": _TRANSPOSED}).outputs[0])
    _keep_in_place(graph, node, states, [taps - 1, channels])
    remove_unused(graph, source)


def _transposes(node: ir.Node) -> bool:
    """Whether a node swaps the axes of channels and tokens."""
    perm = node.attributes.get("perm")
    return node.op_type == "Transpose" and perm is not None and list(perm.as_ints()) == _TRANSPOSED


def _keep_in_place(graph: ir.Graph, node: ir.Node, states: ir.Value, shape: list[int]) -> None:
    """Remove a rewritten node and its output of states; the input holds the states of all sequences."""
    present = node.outputs[1]
    if present.uses() or not states.is_graph_input():
        raise _unsupported(node, "has a state that other nodes read or write")
    if present.is_graph_output():
        graph.outputs.remove(present)
    states.shape = ir.Shape(["places", *shape])
    remove_unused(graph, node)


def _unsupported(node: ir.Node, why: str) -> UnsupportedAttentionError:
    return UnsupportedAttentionError(f"{node.op_type} {node.name} {why}; carryall's kernels lack that")

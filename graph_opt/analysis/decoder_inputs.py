"""The inputs and causal mask of canonical decoders, added where an exporter omitted them."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ...contract import ATTENTION_MASK, INPUT_IDS, LOGITS, POSITION_IDS, is_past, is_past_encoder
from ..graph.edit import insert, shared_constant, static_size

LOWEST = float(np.finfo(np.float32).min)
_SHAPES = {ATTENTION_MASK: ["batch", "total"], POSITION_IDS: ["batch", "sequence"]}


def is_decoder(graph: ir.Graph) -> bool:
    """Return whether a graph has the input ``input_ids`` and the output ``logits``."""
    ids = any(value.name == INPUT_IDS for value in graph.inputs)
    return ids and any(value.name == LOGITS for value in graph.outputs)


def find_input(graph: ir.Graph, name: str) -> ir.Value | None:
    """Return the graph input ``name``, None if there is none."""
    return next((value for value in graph.inputs if value.name == name), None)


def first_cache(graph: ir.Graph) -> ir.Value | None:
    """Return the first KV cache input, None if there is none; all have the same length."""
    return next((value for value in graph.inputs if is_past(value.name)), None)


def encoder_caches(node: ir.Node) -> tuple[ir.Node, ir.Node] | None:
    """Return what appends to the encoder's caches that an ``Attention`` reads; None for others."""
    found = [value.producer() if value is not None else None for value in node.inputs[1:3]]
    nodes = [one for one in found if one is not None and one.op_type == "Concat" and len(one.inputs) == 2]
    if len(nodes) != 2 or not all(
        one.inputs[0] is not None and is_past_encoder(one.inputs[0].name) for one in nodes
    ):
        return None
    return nodes[0], nodes[1]


def fixed_tokens(graph: ir.Graph) -> str | None:
    """Return an error text if a decoder accepts only a fixed number of tokens, else None."""
    tokens = static_size(find_input(graph, INPUT_IDS), 1) if is_decoder(graph) else None
    if tokens is None:
        return None
    return (
        f"the graph accepts exactly {tokens} token{'s' * (tokens > 1)}, so it cannot generate; "
        "export it with a dynamic sequence axis"
    )


def decoder_input(graph: ir.Graph, name: str) -> ir.Value:
    """Return the input ``attention_mask`` or ``position_ids``; add it to the graph if it is missing."""
    value = find_input(graph, name)
    if value is None:
        value = ir.val(name, ir.DataType.INT64, _SHAPES[name])
        graph.inputs.append(value)
    return value


class CausalMasks:
    """Write the additive causal masks of a graph, one per window, on first use.

    Args:
        graph: a decoder graph.
    """

    def __init__(self, graph: ir.Graph) -> None:
        self._graph = graph
        self._first = next(iter(graph))
        self._visible: dict[int | None, ir.Value] = {}
        self._additive: dict[int | None, ir.Value] = {}
        self._real: ir.Value | None = None

    def additive(self, window: int | None = None) -> ir.Value:
        """Return the mask [batch, 1, sequence, total]: 0 where a token attends, else the lowest float32."""
        if window not in self._additive:
            seen = self._op("And", self.visible(window), self.real())
            self._additive[window] = self.as_numbers(seen)
        return self._additive[window]

    def as_numbers(self, seen: ir.Value, before: ir.Node | None = None) -> ir.Value:
        """Convert a boolean mask into an additive one."""
        zero = shared_constant(self._graph, "mask.zero", np.array(0, np.float32))
        made = insert(before or self._first, "Where", [seen, zero, self._lowest()]).outputs[0]
        return _annotated(made, ["batch", 1, "sequence", "total"], ir.DataType.FLOAT)

    def where_seen(self, bias: ir.Value, mask: ir.Value, before: ir.Node) -> ir.Value:
        """Return ``bias`` where the additive ``mask`` is 0, else the lowest float32."""
        made = insert(before, "Max", [insert(before, "Add", [bias, mask]).outputs[0], self._lowest()])
        return _annotated(made.outputs[0], ["batch", 1, "sequence", "total"], ir.DataType.FLOAT)

    def _lowest(self) -> ir.Value:
        return shared_constant(self._graph, "mask.lowest", np.array(LOWEST, np.float32))

    def visible(self, window: int | None = None) -> ir.Value:
        """Return the causal or window mask [sequence, total], boolean, without padding."""
        if window not in self._visible:
            self._visible[window] = self._write(window)
        return self._visible[window]

    def real(self) -> ir.Value:
        """Return which keys are not padding, boolean [batch, 1, 1, total]."""
        if self._real is None:
            given = decoder_input(self._graph, ATTENTION_MASK)
            axes = shared_constant(self._graph, "mask.axes", np.array([1, 2], np.int64))
            real = self._op("Unsqueeze", self._op("Cast", given, to=int(ir.DataType.BOOL)), axes)
            self._real = _annotated(real, ["batch", 1, 1, "total"], ir.DataType.BOOL)
        return self._real

    def _write(self, window: int | None) -> ir.Value:
        """Write the mask of ``visible``. Query i of the new tokens has cache index past + i."""
        ids = find_input(self._graph, INPUT_IDS)
        if ids is None:
            raise ValueError("the graph has no input_ids")
        zero, one = (
            shared_constant(self._graph, f"mask.{name}", np.array(number, np.int64))
            for name, number in (("first", 0), ("step", 1))
        )
        new = self._op("Squeeze", self._op("Shape", ids, start=1, end=2))
        cache = first_cache(self._graph)
        past = zero if cache is None else self._op("Squeeze", self._op("Shape", cache, start=2, end=3))
        total = self._op("Add", past, new)
        keys = self._op("Range", zero, total, one)
        axis = shared_constant(self._graph, "mask.axis", np.array([1], np.int64))
        queries = self._op("Unsqueeze", self._op("Range", past, total, one), axis)
        visible = self._op("LessOrEqual", keys, queries)
        if window is not None:
            size = shared_constant(self._graph, f"mask.window_{window}", np.array(window, np.int64))
            visible = self._op("And", visible, self._op("Greater", keys, self._op("Sub", queries, size)))
        return _annotated(visible, ["sequence", "total"], ir.DataType.BOOL)

    def _op(self, op_type: str, *operands: ir.Value, **attributes: int) -> ir.Value:
        return insert(self._first, op_type, operands, attributes).outputs[0]


def _annotated(value: ir.Value, shape: list[int | str], dtype: ir.DataType) -> ir.Value:
    value.shape, value.dtype = ir.Shape(shape), dtype
    return value

"""Rename caches, states and axes to the contract's names: past_key_values.N.key, present_conv.N, batch.

Exporters name axes differently. With the contract's names, passes can see which axes are equal.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import onnx_ir as ir

from ....contract import (
    ATTENTION_MASK,
    INPUT_IDS,
    LOGITS,
    PAST,
    POSITION_IDS,
    PRESENT,
    past_state_name,
    present_state_name,
)
from ...analysis.decoder_inputs import is_decoder
from ...graph.edit import all_nodes, take_name
from ..base import GraphPass

_CONTRACT = re.compile(rf"({PAST}|{PRESENT})\.\d+\.(key|value)")
_LAYER_THEN_KIND = re.compile(r"(?:^|.*[._])(\d+)[._]?(key|value|k|v)s?")
_KIND_THEN_LAYER = re.compile(r".*?(key|value|k|v)s?(?:_cache|_values)?[._](\d+)")
_STATE = re.compile(r"(?:past|present)\.(\d+)\.(conv|recurrent)")  # of onnxruntime-genai's builder
_RANK = 4
_AXES = {
    INPUT_IDS: ("batch", "sequence"),
    POSITION_IDS: ("batch", "sequence"),
    ATTENTION_MASK: ("batch", "total"),
    PAST: ("batch", None, "past", None),
    LOGITS: ("batch", "sequence", None),
    PRESENT: ("batch", None, "total", None),
}


class ContractNamesPass(GraphPass):
    """Rename the caches and axes of a decoder to the contract's names."""

    def rewrite(self, graph: ir.Graph) -> None:
        """Rename inputs, outputs and axes, unless two would get the same name."""
        if not is_decoder(graph):
            return
        self._rename_caches(graph)
        values = [value for value in _values(graph) if value.shape is not None]
        names = _axis_names(graph, values)
        for value in values:
            if value.shape is not None and any(_symbol(dim) in names for dim in value.shape):
                value.shape = ir.Shape([names.get(_symbol(dim), dim) for dim in value.shape])
                self.fired += 1

    def _rename_caches(self, graph: ir.Graph) -> None:
        for values, prefix in ((graph.inputs, PAST), (graph.outputs, PRESENT)):
            names = {value: name for value in values if (name := _name(value, prefix)) is not None}
            if len(set(names.values())) < len(names):
                self.refuse(graph[0], f"two of its caches would be named {prefix}.N.key")
                continue
            taken = {value.name for value in [*graph.inputs, *graph.outputs] if value not in names}
            for value, name in names.items():
                if name in taken:
                    continue
                self.fired += value.name != name
                take_name(graph, value, name)
                value.shape = _with_numbers(value)


def _axis_names(graph: ir.Graph, values: Sequence[ir.Value]) -> dict[str | None, str]:
    """Return the contract's name of each differently named axis, unless another axis has that name.

    Args:
        graph: the graph.
        values: those of its values that have a shape.
    """
    axis_names: dict[str | None, str] = {}
    for value in [*graph.inputs, *graph.outputs]:
        name = str(value.name)
        names = _AXES.get(name.split(".")[0] if _CONTRACT.fullmatch(name) else name, ())
        for dim, wanted in zip(value.shape or (), names, strict=False):
            if wanted is not None and _symbol(dim) is not None:
                axis_names.setdefault(_symbol(dim), wanted)
    taken = {_symbol(dim) for value in values for dim in value.shape or ()} - set(axis_names)
    return {old: name for old, name in axis_names.items() if old != name and name not in taken}


def _symbol(dim: int | ir.SymbolicDim) -> str | None:
    return None if isinstance(dim, int) else dim.value


def _values(graph: ir.Graph) -> Iterator[ir.Value]:
    yield from graph.inputs
    for node in all_nodes(graph):
        yield from node.outputs


def _name(value: ir.Value, prefix: str) -> str | None:
    if state := _STATE.fullmatch(value.name or ""):
        return (past_state_name if prefix == PAST else present_state_name)(*state.groups())
    if value.shape is None or len(value.shape) != _RANK or value.name is None:
        return None
    if _CONTRACT.fullmatch(value.name):
        return value.name
    by_layer, by_kind = _LAYER_THEN_KIND.fullmatch(value.name), _KIND_THEN_LAYER.fullmatch(value.name)
    if by_layer is not None:
        layer, kind = by_layer.groups()
    elif by_kind is not None:
        kind, layer = by_kind.groups()
    else:
        return None
    return f"{prefix}.{int(layer)}.{'key' if kind[0] == 'k' else 'value'}"


def _with_numbers(value: ir.Value) -> ir.Shape | None:
    """Return the shape of a value, with symbols such as '32', which some exporters write, as numbers."""
    if value.shape is None:
        return None
    names = [dim if isinstance(dim, int) else dim.value for dim in value.shape]
    return ir.Shape([int(name) if isinstance(name, str) and name.isdecimal() else name for name in names])

"""Caches get the names of the contract: past_key_values.N.key|value and present.N.key|value."""

from __future__ import annotations

import re

import onnx_ir as ir

from .base import GraphPass
from .decoder_inputs import is_decoder

_CONTRACT = re.compile(r"(past_key_values|present)\.\d+\.(key|value)")
_LAYER_THEN_KIND = re.compile(r"(?:^|.*[._])(\d+)[._]?(key|value|k|v)s?")
_KIND_THEN_LAYER = re.compile(r".*?(key|value|k|v)s?(?:_cache|_values)?[._](\d+)")
_RANK = 4


class ContractNamesPass(GraphPass):
    """Rename the caches of a decoder whose exporter calls them otherwise."""

    def rewrite(self, graph: ir.Graph) -> None:
        """Rename inputs and outputs apart, each only if no two would share a name."""
        if not is_decoder(graph):
            return
        for values, prefix in ((graph.inputs, "past_key_values"), (graph.outputs, "present")):
            found = {value: name for value in values if (name := _name(value, prefix)) is not None}
            if len(set(found.values())) < len(found):
                self.refuse(graph[0], f"two of its caches would be called {prefix}.N.key")
                continue
            taken = {value.name for value in [*graph.inputs, *graph.outputs] if value not in found}
            for value, name in found.items():
                if name in taken:
                    continue
                self.fired += value.name != name
                value.name, value.shape = name, _with_numbers(value)


def _name(value: ir.Value, prefix: str) -> str | None:
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
    """Return the shape of a value; exporters have written sizes as symbols, like '32'."""
    if value.shape is None:
        return None
    names = [dim if isinstance(dim, int) else dim.value for dim in value.shape]
    return ir.Shape([int(name) if isinstance(name, str) and name.isdecimal() else name for name in names])

"""Add past_key_values.N inputs and present.N outputs to a decoder traced without a KV cache.

Such graphs, input_ids -> logits, recompute every token at every step. The cache is added only if every
attention is proven causal and nothing else mixes tokens (``token_axes.py``).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from ....contract import ATTENTION_MASK, INPUT_IDS, PRESENT_CACHE, past_name, present_name
from ....records import dataclass
from ...analysis.decoder_inputs import CausalMasks, find_input, first_cache, fixed_tokens, is_decoder
from ...analysis.known_masks import joined_mask, known_meaning
from ...analysis.probe import MaskMeaning
from ...analysis.region import region
from ...analysis.token_axes import Mixed, TokenAxes
from ...experts.mixture import Mixture, find_mixture
from ...graph.edit import insert, int_attribute, nodes_of, replace, sole_consumer
from ..base import GraphPass

_KINDS = ("key", "value")


@dataclass(frozen=True, slots=True)
class _Layer:
    """An attention with a known mask; ``window`` None means full causal attention."""

    node: ir.Node
    window: int | None
    heads: int
    sizes: tuple[int, int]  # head_dim of key and value

    def operand(self, kind: str) -> ir.Value:
        value = self.node.inputs[1 + _KINDS.index(kind)]
        if value is None:
            raise AssertionError("unreachable: TokenAxes has checked its operands")
        return value


class AddCachePass(GraphPass):
    """Add the inputs and outputs of a KV cache to a decoder without one."""

    def rewrite(self, graph: ir.Graph) -> None:
        """Rewrite all attentions, or none."""
        if not is_decoder(graph) or first_cache(graph) is not None or not len(graph):
            return
        fixed = fixed_tokens(graph)
        if fixed is not None:
            self.refuse(graph[0], fixed)
            return
        nodes = list(nodes_of(graph, "Attention"))
        if not nodes:
            return
        try:
            tokens = TokenAxes(graph, _mixtures(graph))
        except Mixed as mixed:
            self.refuse(mixed.node, f"the graph has no KV cache, and none can be added: {mixed}")
            return
        cached_layers = [_layer(graph, tokens, node) for node in nodes]
        for node, layer in zip(nodes, cached_layers, strict=True):
            if isinstance(layer, str):
                self.refuse(node, layer)
        layers = [layer for layer in cached_layers if isinstance(layer, _Layer)]
        if len(layers) < len(nodes):
            return
        old = _present_outputs(graph, layers)
        if isinstance(old, str):
            self.refuse(nodes[0], old)
        else:
            self._add(graph, layers, old)

    def _add(self, graph: ir.Graph, layers: list[_Layer], old: dict[str, ir.Value]) -> None:
        _read_length_of_ids(graph)
        pasts = [_pasts(number, layer) for number, layer in enumerate(layers)]
        graph.inputs.extend(past for pair in pasts for past in pair)
        masks = CausalMasks(graph)
        for number, (layer, past) in enumerate(zip(layers, pasts, strict=True)):
            node = layer.node
            attributes: dict[str, Any] = {name: x.value for name, x in node.attributes.items()}
            attributes.pop("is_causal", None)
            operands = [*node.inputs[:3], masks.additive(layer.window), *past]
            attention = insert(node, "Attention", operands, attributes, num_outputs=3)
            attention.name = node.name
            attention.meta.update(node.meta)
            replace(node.outputs[0], attention.outputs[0])
            graph.remove(node, safe=True)
            for kind, new, given in zip(_KINDS, attention.outputs[1:], past, strict=True):
                name = present_name(number, kind)
                new.type, new.shape = given.type, _with_length(given, "total")
                _set_output(graph, new, name, old.get(name))
            self.fired += 1


def _read_length_of_ids(graph: ir.Graph) -> None:
    """Read the number of tokens from ``input_ids`` only; with a cache, ``attention_mask`` is longer."""
    ids, mask = find_input(graph, INPUT_IDS), find_input(graph, ATTENTION_MASK)
    given = [] if mask is None else list(mask.uses())
    casts = [use.node.outputs[0] for use in given if use.node.op_type == "Cast"]
    for use in [*given, *(use for value in casts for use in value.uses())]:
        if use.node.op_type == "Shape" and not use.node.domain:
            use.node.replace_input_with(0, ids)


def _mixtures(graph: ir.Graph) -> dict[ir.Value, tuple[ir.Value, ...]]:
    """Return the reshaped results of canonical mixtures of experts, with tokens and the router's scores."""
    found = [find_mixture(node) for node in nodes_of(graph, "Split")]
    mixtures = [(one, sole_consumer(one.result)) for one in found if isinstance(one, Mixture)]
    return {
        reshape.outputs[0]: (one.tokens, one.router.scores)
        for one, reshape in mixtures
        if one.router is not None and reshape is not None and reshape.op_type == "Reshape"
    }


def _layer(graph: ir.Graph, tokens: TokenAxes, node: ir.Node) -> _Layer | str:
    """Return an attention if it is causal, else the reason why that is not proven."""
    if any(value is not None for value in node.inputs[4:]) or len(node.outputs) > 1:
        return "it has another kind of cache, or more than one output"
    heads = int_attribute(node, "kv_num_heads", 0)
    if not heads or not int_attribute(node, "q_num_heads", 0):
        return "its q, k and v are not [batch, sequence, heads * head_dim]"
    widths = [tokens.shapes(tokens.operand(node, index))[0][-1] for index in (1, 2)]
    meaning = _meaning(graph, node)
    if isinstance(meaning, str):
        return meaning
    return _Layer(node, meaning.window, heads, (widths[0] // heads, widths[1] // heads))


def _meaning(graph: ir.Graph, node: ir.Node) -> MaskMeaning | str:
    stated_mask = node.inputs[3] if len(node.inputs) > 3 else None
    if stated_mask is None:
        causal = bool(int_attribute(node, "is_causal", 0))
        return MaskMeaning() if causal else "it has no mask, so it is not causal"
    mask = joined_mask(graph, CausalMasks(graph), node, padding=False)
    return known_meaning(graph, mask if mask is not None else stated_mask)


def _present_outputs(graph: ir.Graph, layers: list[_Layer]) -> dict[str, ir.Value] | str:
    """Return the existing outputs present.N.key|value by name, or why one is not what its name says."""
    presents: dict[str, ir.Value] = {}
    for output in graph.outputs:
        named = PRESENT_CACHE.fullmatch(str(output.name))
        if named is None:
            continue
        number, kind = int(named[1]), named[2]
        if number >= len(layers) or not _are_heads(layers[number], kind, output):
            return f"the graph output {output.name} is not the {kind} of attention {number}"
        presents[str(output.name)] = output
    return presents


def _are_heads(layer: _Layer, kind: str, output: ir.Value) -> bool:
    """Return whether an output is an attention's key or value, as [batch, heads, sequence, head_dim]."""
    operand, size = layer.operand(kind), layer.sizes[_KINDS.index(kind)]
    joined = np.random.default_rng(0).standard_normal((2, 3, layer.heads * size)).astype(np.float32)
    split = joined.reshape(2, 3, layer.heads, size).swapaxes(1, 2)
    for source, result, stated, wanted in (
        (operand, output, joined, split),
        (output, operand, split, joined),
    ):
        part = region([source], result)
        if not isinstance(part, str) and np.array_equal(part(stated), wanted):
            return True
    return False


def _pasts(number: int, layer: _Layer) -> list[ir.Value]:
    return [
        ir.val(
            past_name(number, kind),
            layer.operand(kind).dtype or ir.DataType.FLOAT,
            ["batch", layer.heads, "past", size],
        )
        for kind, size in zip(_KINDS, layer.sizes, strict=True)
    ]


def _with_length(past: ir.Value, length: str) -> ir.Shape:
    axes = list(past.shape or ())
    return ir.Shape([*axes[:2], length, *axes[3:]])


def _set_output(graph: ir.Graph, new: ir.Value, name: str, old: ir.Value | None) -> None:
    """Make ``new`` the graph output ``name``, in the place of ``old`` if there is one."""
    if old is None:
        graph.outputs.append(new)
    else:
        graph.outputs[list(graph.outputs).index(old)] = new
        old.name = f"{name}_new"
    new.name = name

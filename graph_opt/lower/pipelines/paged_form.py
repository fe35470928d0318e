"""The forms of ``PagedAttention``, and the layers of a graph that has it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any

import onnx_ir as ir

from ....records import dataclass
from ...graph.edit import int_attribute, nodes_of, static_size

DOMAIN = "carryall"
OPERATOR = "PagedAttention"
# The block tables and their shapes; every PagedAttention has them as inputs after its caches, in this order.
TABLES: dict[str, list[str | int]] = {
    "past_lens": ["rows"],
    "subsequence_begins": ["rows_and_one"],
    "block_indices": ["used_blocks"],
    "block_indices_begins": ["rows_and_one"],
    "max_context_len": [],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedForm:
    """The form of a target's ``PagedAttention``.

    Args:
        domain: domain of the operator.
        tables: its integer inputs and their shapes, in order.
        gap: number of absent inputs in front of the last table.
        block_axis: axis of a cache that holds the positions of a block.
        outputs: whether the caches are outputs too, in the memory of the inputs.
        softcap: whether it supports softcap.
        rotary: whether it applies rotary embeddings.
        flat: whether query, key and value are [tokens, heads * size], else [tokens, 1, heads * size].
        sinks: index of its input for sinks; 0 if it has none.
        slopes: index of its input for ALiBi's slopes; 0 if it has none.
        ahead: index of its input ``image_ahead``; 0 if it has none.
        own_angles: whether the angles may be those of the step's tokens, in place of a table of positions.
        cross: whether a later pass lowers attention to an encoder's rows.
        largest_head: the most elements of a head, whose number is then divisible by 8; 0 for any.
        equal_heads: whether all layers have equal numbers of KV heads, as blocks of one shape need.
    """

    domain: str = DOMAIN
    tables: Mapping[str, list[str | int]] = field(default_factory=lambda: TABLES)
    gap: int = 0
    block_axis: int = 2
    outputs: bool = False
    softcap: bool = False
    rotary: bool = False
    flat: bool = True
    sinks: int = 0
    slopes: int = 0
    ahead: int = 0
    own_angles: bool = False
    cross: bool = False
    largest_head: int = 0
    equal_heads: bool = False

    def nodes(self, graph: ir.Graph) -> list[ir.Node]:
        """Return the nodes of the operator."""
        return list(nodes_of(graph, OPERATOR, self.domain))

    def cache_shape(self, heads: object, size: object) -> ir.Shape:
        """Return the shape of a paged cache of [batch, heads, length, size]."""
        shape: list[Any] = ["blocks", heads, size]
        shape.insert(self.block_axis, "block_size")
        return ir.Shape(shape)


PLAIN = PagedForm(sinks=10, slopes=11)


@dataclass(frozen=True, slots=True)
class PagedLayer:
    """An attention of a paged graph.

    Args:
        key: name of its key cache input.
        value: name of its value cache input.
        head_size: elements of a key.
        window: number of positions that a token sees, itself included; 0 for all.
    """

    key: str
    value: str
    head_size: int
    window: int


def paged_layers(model: ir.Model) -> list[PagedLayer]:
    """Return the layers of a graph with carryall's ``PagedAttention``."""
    layers = []
    for node in PLAIN.nodes(model.graph):
        key, value = node.inputs[3:5]
        if key is not None and value is not None:
            window = max(0, int_attribute(node, "local_window_size", -1))
            layers.append(PagedLayer(str(key.name), str(value.name), static_size(key, 3) or 0, window))
    return layers

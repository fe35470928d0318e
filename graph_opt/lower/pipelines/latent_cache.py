"""Keep the compressed keys and values of latent attention in the cache, instead of those of all heads.

    k = [rotary, c Wk], v = c Wv       ->   q' = [rotary q, q Wk^T], k' = v' = [rotary, c], one head for all
    out = attention(q, k, v)                out = (attention(q', k', v') without the rotary part) Wv

The products with Wk and Wv by head move from the keys and values to the queries and results (DeepSeek-V2,
https://arxiv.org/abs/2405.04434, section 2.1.2). The rotary part of the results is left out, so the rotated
keys may be the values too: the runner binds one cache to both inputs, where the kernel reads it so.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from ....errors import UsageError
from ....records import dataclass
from ...graph.edit import (
    add_initializer,
    constant,
    insert,
    int_attribute,
    nodes_of,
    replace,
    static_size,
    weight,
)
from ...graph.lazy import Array, halves_of, shape_of
from ...passes.base import GraphPass
from ...passes.remove_unused import RemoveUnusedNodesPass
from ..paged_kv import COMPRESSED, LARGEST_HEAD
from ..products.dequantize_weights import dequantized
from ..products.half_products import OFFSETS, float_tiles
from ..products.tiles import COLUMNS

DOMAIN = "carryall"
LAYOUT = 2  # version of weights in tiles; the kernels refuse others


@dataclass(frozen=True, slots=True)
class _Latent:
    """The parts of one latent attention in its canonical form (``exporter/models/deepseek_v2.py``).

    Args:
        query: of all heads, before the rotation.
        rotations: of queries and of keys; none if there is no rotation.
        rotary: the part of the keys that all heads share, [batch, sequence, elements].
        compressed: [batch, sequence, rank].
        keys: weight [rank, heads * plain].
        values: weight [rank, heads * size], with zeros where values are shorter than keys.
        results: the values of all heads, [batch, sequence, heads, value].
        sizes: heads, elements of the rotary part, of the plain part, of a value, and the rank.
    """

    query: ir.Value
    rotations: tuple[ir.Node, ir.Node] | None
    rotary: ir.Value
    compressed: ir.Value
    keys: ir.TensorProtocol
    values: ir.TensorProtocol
    results: ir.Value
    sizes: tuple[int, int, int, int, int]


class LatentCachePass(GraphPass):
    """Rewrite every attention of a graph whose attention is latent; runs before the lowering to blocks.

    Raises:
        UsageError: an attention is not latent, or its compressed head is too large for the kernel.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite ``model``, and note it in the metadata."""
        result = super().call(model)
        model.metadata_props[COMPRESSED] = "1"
        RemoveUnusedNodesPass()(model)
        return result

    def rewrite(self, graph: ir.Graph) -> None:
        """Rewrite the nodes, their caches and their weights."""
        for node in nodes_of(graph, "Attention"):
            latent = _latent(node)
            if latent is None:
                raise UsageError(
                    f"latent_kv=compressed needs latent attention, which {node.name} is not; leave it out"
                )
            size = latent.sizes[1] + latent.sizes[4]
            if size > LARGEST_HEAD:
                raise UsageError(
                    f"latent_kv=compressed: {node.name} has compressed heads of {size} elements; "
                    f"carryall's kernel has up to {LARGEST_HEAD}"
                )
            _absorb(graph, node, latent)
            self.fired += 1


def _absorb(graph: ir.Graph, node: ir.Node, latent: _Latent) -> None:
    heads, rotary, plain, value, rank = latent.sizes
    size = rotary + rank
    writer = _Writer(graph, node)
    by_head = writer.reshaped(latent.query, heads, rotary + plain)
    turning, still = writer.split(by_head, rotary, plain)
    tiles = _tiles(latent.keys, heads, lambda each: each.reshape(rank, heads, plain).transpose(1, 0, 2))
    reads = writer.products(writer.reshaped(still, heads * plain), tiles, (heads, plain, rank), "keys")
    query = writer.joined(turning, writer.reshaped(reads, heads, rank), axis=3)
    query = writer.reshaped(query, heads * size)
    shared = writer.joined(latent.rotary, latent.compressed, axis=2)
    key = shared
    if latent.rotations is not None:
        query, key = (
            writer.rotated(x, rotation, count)
            for x, rotation, count in zip((query, key), latent.rotations, (heads, 1), strict=True)
        )
    attributes = {name: each for name, each in node.attributes.items() if name != "kv_num_heads"}
    attended = insert(
        node, "Attention", [query, key, shared, *node.inputs[3:]], {"kv_num_heads": 1}, num_outputs=3
    )
    attended.attributes.update(attributes)
    for place, cache in enumerate(node.inputs[4:6]):
        for each in (cache, node.outputs[1 + place]):
            if each is not None and each.shape is not None:
                each.shape = ir.Shape([each.shape[0], 1, each.shape[2], size])
        replace(node.outputs[1 + place], attended.outputs[1 + place])
    _, found = writer.split(writer.reshaped(attended.outputs[0], heads, size), rotary, rank)
    by_value = _tiles(
        latent.values, heads, lambda each: each.reshape(rank, heads, -1)[:, :, :value].transpose(1, 2, 0)
    )
    found = writer.products(writer.reshaped(found, heads * rank), by_value, (heads, rank, value), "values")
    replace(latent.results, writer.reshaped(found, heads, value))


class _Writer:
    """Writes nodes in front of another."""

    def __init__(self, graph: ir.Graph, node: ir.Node) -> None:
        self._graph, self._node = graph, node

    def ints(self, *values: int) -> ir.Value:
        name = f"latent.{'_'.join(map(str, values))}"
        known = self._graph.initializers.get(name)
        return known if known is not None else add_initializer(self._graph, name, np.array(values, np.int64))

    def reshaped(self, x: ir.Value, *sizes: int) -> ir.Value:
        return insert(self._node, "Reshape", [x, self.ints(0, 0, *sizes)]).outputs[0]

    def split(self, x: ir.Value, *sizes: int) -> tuple[ir.Value, ...]:
        operands = [x, self.ints(*sizes)]
        return tuple(insert(self._node, "Split", operands, {"axis": 3}, num_outputs=len(sizes)).outputs)

    def joined(self, *parts: ir.Value, axis: int) -> ir.Value:
        return insert(self._node, "Concat", list(parts), {"axis": axis}).outputs[0]

    def rotated(self, x: ir.Value, rotation: ir.Node, heads: int) -> ir.Value:
        written = insert(self._node, "RotaryEmbedding", [x, *rotation.inputs[1:]])
        written.attributes.update(rotation.attributes)
        written.attributes["num_heads"] = ir.AttrInt64("num_heads", heads)
        return written.outputs[0]

    def products(
        self, x: ir.Value, tiles: tuple[ir.LazyTensor, int, int], sizes: tuple[int, int, int], name: str
    ) -> ir.Value:
        tensor, bits, offsets = tiles
        packed = add_initializer(self._graph, f"{self._node.name}.{name}.tiles", tensor)
        heads, inputs, outputs = sizes
        attributes = {"layout": LAYOUT, "heads": heads, "inputs": inputs, "outputs": outputs}
        attributes |= {"bits": bits, "offsets": offsets}
        node = insert(self._node, "HeadProducts", [x, packed], attributes, domain=DOMAIN)
        node.name = f"{self._node.name}.{name}"
        return node.outputs[0]


def _tiles(
    tensor: ir.TensorProtocol, heads: int, by_head: Callable[[Array], Array]
) -> tuple[ir.LazyTensor, int, int]:
    """Return a weight's tiles, its bits and the attribute ``offsets``.

    Args:
        tensor: the weight.
        heads: number of heads.
        by_head: returns [heads, outputs, inputs] of the weight's values; each head begins with a tile.
    """
    halves = halves_of(tensor)
    kind, read = (ir.DataType.FLOAT, tensor.numpy) if halves is None else (halves.kind, halves.read)

    def padded() -> Array:
        rows = by_head(read())
        rows = np.pad(rows, ((0, 0), (0, -rows.shape[1] % COLUMNS), (0, 0)))
        return np.ascontiguousarray(rows.reshape(-1, rows.shape[2]))

    _, outputs, inputs = by_head(np.empty(shape_of(tensor), np.bool_)).shape
    bits, whole = 32 if halves is None else 16, heads * (outputs + -outputs % COLUMNS)
    return float_tiles(padded, bits, inputs, whole, by_output=True), bits, OFFSETS[kind]


def _latent(node: ir.Node) -> _Latent | None:
    """Return the parts of a latent attention; None if it is none of the exporter's form."""
    query, key, value, _, *caches = node.inputs[:6]
    heads = int_attribute(node, "q_num_heads", 0)
    size = static_size(caches[0], 3) if len(caches) == 2 else None
    if query is None or key is None or size is None or int_attribute(node, "kv_num_heads", 0) != heads:
        return None
    rotations = tuple(
        producer
        for each in (query, key)
        if (producer := each.producer()) is not None and producer.op_type == "RotaryEmbedding"
    )
    if len(rotations) == 1:
        return None
    if len(rotations) == 2:
        query, key = (rotation.inputs[0] for rotation in rotations)
    joined = _through(key, "Reshape", "Concat")
    results = _results(node)
    if joined is None or results is None or len(joined.inputs) != 2 or query is None:
        return None
    shared, plain = joined.inputs
    expanded = _through(shared, "Expand", "Unsqueeze")
    keys, values = _product(_through(plain, "Reshape")), _product(None if value is None else value.producer())
    if expanded is None or keys is None or values is None or keys[0] is not values[0]:
        return None
    rotary, sliced = expanded.inputs[0], results.producer()
    rank, width = shape_of(keys[1])
    length = None if sliced is None else constant(sliced.inputs[2])
    if rotary is None or length is None or width % heads or shape_of(values[1]) != (rank, heads * size):
        return None
    turning = size - width // heads
    sizes = heads, turning, width // heads, int(length.reshape(-1)[0]), rank
    turns = (rotations[0], rotations[1]) if rotations else None
    return _Latent(query, turns, rotary, keys[0], keys[1], values[1], results, sizes)


def _through(value: ir.Value | None, *types: str) -> ir.Node | None:
    """Return the last of a chain of producers of these types, from the value back; None if it differs."""
    node = None
    for op_type in types:
        node = None if value is None else value.producer()
        if node is None or node.op_type != op_type:
            return None
        value = node.inputs[0]
    return node


def _product(node: ir.Node | None) -> tuple[ir.Value, ir.TensorProtocol] | None:
    """Return the rows and the weight [inputs, outputs] of a product; of a Reshape that of its input."""
    if node is not None and node.op_type == "Reshape" and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    if node is None or node.op_type != "MatMul" or node.inputs[0] is None:
        return None
    tensor, source = weight(node.inputs[1]), node.inputs[1].producer() if node.inputs[1] is not None else None
    if tensor is None and source is not None and source.op_type == "DequantizeLinear":
        parts = [weight(each) for each in source.inputs if each is not None]
        known = [each for each in parts if each is not None]
        tensor = dequantized(source, known) if len(known) == len(parts) else None
    return None if tensor is None or len(tensor.shape) != 2 else (node.inputs[0], tensor)


def _results(node: ir.Node) -> ir.Value | None:
    """Return the results of an attention by head, without the padding of values."""
    uses = [use.node for use in node.outputs[0].uses()]
    if len(uses) != 1 or uses[0].op_type != "Reshape":
        return None
    readers = [use.node for use in uses[0].outputs[0].uses()]
    return readers[0].outputs[0] if len(readers) == 1 and readers[0].op_type == "Slice" else None

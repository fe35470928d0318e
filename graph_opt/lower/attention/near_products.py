"""Products of queries and keys with embeddings of distances, which an encoder adds to its scores.

Disentangled attention (https://arxiv.org/abs/2006.03654): a product with a table gives the scores of each
token with every row of the table, and GatherElements takes the row of each pair of tokens, which depends on
their distance.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ....contract import INPUT_IDS
from ....records import dataclass
from ...analysis.probe import Probe, inputs_of
from ...graph.edit import constant, float_attribute, int_attribute
from ...graph.lazy import Array

Floats = npt.NDArray[np.float32]
_LONGEST = 4096  # tokens of which all distances are evaluated
_FEW = 6  # tokens of scores whose factors are found by evaluation
_LANES = 16  # distances side by side, as the kernel reads them


@dataclass(frozen=True, slots=True)
class NearProducts:
    """What is added to a score, scaled as the product of query and key: query * keys[d] + key * queries[d].

    Args:
        keys: float32 [heads, 2 * reach + 1, size], by the distance d of key and query from -reach to reach;
            larger distances count as reach.
        queries: the same.
    """

    keys: Floats
    queries: Floats


def in_lanes(table: Floats) -> Floats:
    """Return a table by distance as the kernel reads it, [heads, groups, size, 16].

    Its ends are repeated, so that it has one distance less than groups of 16 hold.
    """
    heads, distances, size = table.shape
    groups = -(-(distances + 1) // _LANES)
    more = (_LANES * groups - 1 - distances) // 2
    table = np.pad(table, ((0, 0), (more, more + 1), (0, 0)), mode="edge")
    return np.ascontiguousarray(table.reshape(heads, groups, _LANES, size).transpose(0, 1, 3, 2))


def gathered_products(mask: ir.Value) -> list[ir.Node]:
    """Return the nodes upstream of a mask that take the row of each pair of tokens from products."""
    nodes = (node for node in upstream(mask, through=frozenset({"Add", "Expand", "Mul", "Div", "Where"})))
    return [node for node in nodes if node.op_type == "GatherElements"]


def near_products(
    graph: ir.Graph, attention: ir.Node, gathered: Sequence[ir.Node], context_length: int
) -> NearProducts:
    """Return the products that the mask of an attention adds, with the tables evaluated for each distance.

    Args:
        graph: the graph.
        attention: the attention.
        gathered: see ``gathered_products``.
        context_length: tokens of the longest text.

    Raises:
        ValueError: they are something else; the message goes on behind "its mask".
        GraphError: they cannot be evaluated.
    """
    if not 1 < context_length <= _LONGEST:
        raise ValueError(
            f"adds products by distance, for texts of {context_length} tokens, not of 2 to {_LONGEST}"
        )
    if float_attribute(attention, "softcap", 0.0) or len(gathered) > 2:
        raise ValueError("adds products by distance to scores with a cap, or more than two")
    heads = int_attribute(attention, "q_num_heads", 0)
    scale = float_attribute(attention, "scale", 0.0)
    factors = _factors(graph, attention.inputs[3], [node.outputs[0] for node in gathered], heads)
    tables: dict[int, Floats] = {}
    for node, factor in zip(gathered, factors, strict=True):
        operand, table = _operand(graph, attention, node, heads)
        if operand in tables:
            raise ValueError("adds two products of the same operand by distance")
        rows = _rows(graph, node, context_length)
        # The kernel scales queries before their products, but not keys.
        tables[operand] = table[:, rows] * np.float32(factor / scale if operand == 0 else factor)
    shape = next(iter(tables.values())).shape
    keys, queries = (tables.get(operand, np.zeros(shape, np.float32)) for operand in (0, 1))
    while keys.shape[1] > 3 and all(
        (table[:, end] == table[:, inner]).all()
        for table in (keys, queries)
        for end, inner in ((0, 1), (-1, -2))
    ):
        keys, queries = keys[:, 1:-1], queries[:, 1:-1]
    return NearProducts(keys, queries)


def _factors(graph: ir.Graph, mask: ir.Value | None, parts: Sequence[ir.Value], heads: int) -> list[float]:
    """Return the factors of ``parts`` in a mask, which must be their sum and what it is without them."""
    if mask is None:
        raise ValueError("is missing")
    probe, shape = Probe(graph, mask, parts), (1, heads, _FEW, _FEW)
    rng = np.random.default_rng(0)
    tokens = {str(value.name): np.ones((1, _FEW), np.int64) for value in probe.inputs if value not in parts}

    def with_parts(arrays: Sequence[Array]) -> Array:
        named = {str(part.name): array.astype(np.float32) for part, array in zip(parts, arrays, strict=True)}
        return np.asarray(np.broadcast_to(probe({**tokens, **named}), shape), np.float64)

    without = with_parts([np.zeros(shape)] * len(parts))
    units = [with_parts([np.full(shape, float(part is each)) for part in parts]) - without for each in parts]
    arrays = [rng.standard_normal(shape) for _ in parts]
    factors = [float(unit.flat[0]) for unit in units]
    expected = sum((factor * array for factor, array in zip(factors, arrays, strict=True)), without)
    if any((unit != unit.flat[0]).any() for unit in units) or not np.allclose(
        with_parts(arrays), expected, atol=1e-5
    ):
        raise ValueError("is no sum of products by distance")
    return factors


def _operand(graph: ir.Graph, attention: ir.Node, node: ir.Node, heads: int) -> tuple[int, Floats]:
    """Return which operand of an attention is multiplied, 0 (queries) or 1 (keys), and the table.

    The table has the shape [heads, rows, size].
    """
    product = None if node.inputs[0] is None else node.inputs[0].producer()
    operands = [] if product is None or product.op_type != "MatMul" else list(given(product))
    if len(operands) != 2:
        raise ValueError("gathers what is no product")
    left, right = operands
    axis = int_attribute(node, "axis", 0) % 4
    if axis == 3 and not inputs_of(right) and _is_heads(left, attention.inputs[0], [0, 2, 1, 3], heads):
        operand, table = 0, Probe(graph, right)({}).swapaxes(-1, -2)
    elif axis == 2 and not inputs_of(left) and _is_heads(right, attention.inputs[1], [0, 2, 3, 1], heads):
        operand, table = 1, Probe(graph, left)({})
    else:
        raise ValueError("gathers products of something else than queries or keys with a table")
    if table.ndim != 4 or table.shape[:2] != (1, heads):
        raise ValueError("gathers products with tables of another number of heads")
    return operand, table[0].astype(np.float32)


def _is_heads(value: ir.Value, source: ir.Value | None, order: list[int], heads: int) -> bool:
    """Return whether a value is ``source`` with its heads apart and the axes in this order."""
    node, found = value.producer(), list(range(len(order)))
    while node is not None and node.op_type == "Transpose" and node.inputs[0] is not None:
        inner = list(node.attributes["perm"].as_ints())
        found, node = [inner[axis] for axis in found], node.inputs[0].producer()
    if node is None or node.op_type != "Reshape" or node.inputs[0] is not source or found != order:
        return False
    shape = constant(node.inputs[1])
    return shape is not None and shape.tolist()[:3] == [0, 0, heads]


def _rows(graph: ir.Graph, node: ir.Node, length: int) -> npt.NDArray[np.int64]:
    """Return the row that is gathered for each distance of key and query from 1 - length to length - 1."""
    places = node.inputs[1]
    while places is not None and (by := places.producer()) is not None and by.op_type == "Expand":
        places = by.inputs[0]
    if places is None or {value.name for value in inputs_of(places)} != {INPUT_IDS}:
        raise ValueError("gathers rows that depend on more than distance")
    probe, ids = Probe(graph, places), np.arange(length)[None]
    found, other = (probe({INPUT_IDS: array}) for array in (ids, ids[:, ::-1]))
    if found.size != length * length or (found != other).any():
        raise ValueError("gathers rows that depend on more than distance")
    found = found.reshape(length, length)
    rows: npt.NDArray[np.int64] = np.concatenate([found[-1], found[0, 1:]])
    if (found != rows[np.arange(length) - np.arange(length)[:, None] + length - 1]).any():
        raise ValueError("gathers rows that do not depend on the distance alone")
    return rows


def upstream(
    value: ir.Value, through: frozenset[str] | None = None, known: Collection[ir.Value] = ()
) -> Iterator[ir.Node]:
    """Yield the nodes that a value is computed by, each once.

    Args:
        value: the value.
        through: operators whose inputs are followed; None follows those of all.
        known: values that are not followed.
    """
    waiting, seen = [value], set[ir.Node]()
    while waiting:
        current = waiting.pop()
        node = current.producer()
        if node is None or node in seen or current in known:
            continue
        seen.add(node)
        yield node
        if through is None or node.op_type in through:
            waiting += given(node)


def given(node: ir.Node) -> Iterator[ir.Value]:
    """Yield the inputs of a node that are not left out."""
    return (value for value in node.inputs if value is not None)

"""The passes that lower a portable decoder graph to a paged KV cache: one flat batch of tokens, block tables.

Each attention becomes one ``PagedAttention`` node (https://arxiv.org/abs/2309.06180), either of the domain
``carryall``, which the provider converts to its kernel, or in the form of another domain. The meaning of
masks and the content of rope tables are found by evaluation (``probe.py``).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from ....contract import (
    ATTENTION_MASK,
    CONTEXT_LENGTH,
    EXPLICIT_KV,
    HIDDEN_STATES,
    IMAGE_AHEAD,
    IMAGE_ROWS,
    INPUT_IDS,
    LOGITS,
    LOGITS_POSITIONS,
    POSITION_IDS,
    ROPE_POSITIONS,
)
from ....errors import UnsupportedAttentionError
from ...analysis import probe
from ...analysis.decoder_inputs import encoder_caches, find_input
from ...graph.edit import (
    add_initializer,
    float_attribute,
    insert,
    int_attribute,
    nodes_of,
    remove_unused,
    replace,
    shared_constant,
    static_size,
)
from ...passes.base import GraphPass
from ...passes.fuse.sink_attention import SinkAttentionPass, has_sinks, sinks_of
from ...passes.normalize.float_compute import FloatComputePass
from ...passes.remove_unused import RemoveUnusedNodesPass
from ...passes.shape_inference import ShapeInferencePass
from ..attention.attention import rope_misfit
from ..attention.kv_int8 import CacheScales, TakeCacheScalesPass
from ..attention.recurrent_states import RefuseStatesPass
from ..attention.rope_tables import RopeTablesPass
from ..attention.shared_cache import SharedCachePass
from ..outputs.logits import SelectLogitsPass
from ..outputs.wanted_rows import WantedRowsPass
from ..products.arithmetic_dequantize import ArithmeticDequantizePass
from ..products.block_minima import SplitMinimaPass
from ..products.float8_weights import Float8WeightsPass
from ..products.weight_only_products import WeightOnlyProductsPass
from ..require_dynamic_sequence import RequireDynamicSequencePass
from ..token_range import TokenRangePass
from .paged_form import OPERATOR, PLAIN, PagedForm
from .standard import DecomposeAttentionPass


class CappedAttentionPass(DecomposeAttentionPass):
    """Decompose all attentions of a graph if any has a softcap: all must use the same form of cache."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite ``model``; store the reason of its explicit KV in its metadata."""
        result = super().call(model)
        if result.modified:
            model.metadata_props[EXPLICIT_KV] = "attention has a softcap, which the target's kernel lacks"
        return result

    def rewrite(self, graph: ir.Graph) -> None:
        """Rewrite every attention, or none."""
        if any(float_attribute(node, "softcap", 0.0) for node in nodes_of(graph, "Attention")):
            super().rewrite(graph)


_LARGE_TABLE = 4 << 20  # bytes of a rope table; a smaller one is read faster than it is computed
_FLOAT_BYTES = 4
_LANES = 16  # floats of a vector: a row alone and one among others are computed by the same instructions

# Metadata key: "1" if the model was calibrated for an int8 KV cache. Its scales are dropped, because paged
# kernels with an int8 cache compute their own.
INT8_CACHE = "int8_kv_cache"


class PagedAttentionPass(GraphPass):
    """Lower every ``Attention`` with a KV cache to ``PagedAttention``.

    Args:
        context_length: maximum tokens of a sequence; the length of the rope tables.
        scales: scales of the caches, filled by an earlier pass; the metadata states whether there are any.
        form: the form of the target's operator.

    Raises:
        GraphError: the operator cannot express an attention.
    """

    def __init__(
        self, context_length: int, scales: CacheScales | None = None, form: PagedForm = PLAIN
    ) -> None:
        super().__init__()
        self.context_length = context_length
        self.scales = scales or CacheScales()
        self.form = form
        self._meanings: dict[ir.Value | None, probe.MaskMeaning] = {}
        self._slopes: dict[tuple[float, ...], ir.Value] = {}
        self._angles: dict[ir.Value, ir.Value] = {}

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite ``model``; store the context length, and whether KV may be int8, in its metadata."""
        result = super().call(model)
        model.metadata_props[CONTEXT_LENGTH] = str(self.context_length)
        model.metadata_props[INT8_CACHE] = str(int(bool(self.scales.by_cache)))
        return result

    def rewrite(self, graph: ir.Graph) -> None:
        """Rewrite every attention."""
        self._meanings, self._slopes, self._angles = {}, {}, {}
        tables = [ir.val(name, ir.DataType.INT32, shape) for name, shape in self.form.tables.items()]
        first = None
        for node in nodes_of(graph, "Attention"):
            if self.form.cross and encoder_caches(node) is not None:
                continue
            _check(node, self.form)
            first = first or node
            heads, other = (int_attribute(each, "kv_num_heads", 0) for each in (node, first))
            if self.form.equal_heads and heads != other:
                raise _unsupported(node, f"has {heads} KV heads, {first.name} has {other}; blocks need equal")
            self._lower(graph, node, tables)
            self.fired += 1
        if self.fired:
            graph.inputs.extend(tables)

    def _lower(self, graph: ir.Graph, node: ir.Node, tables: list[ir.Value]) -> None:
        query, key, value, _, *caches = node.inputs[:6]
        meaning = self._meaning(graph, node)
        attributes = _attributes(node, caches, meaning)
        # The operators have optional inputs between the caches and the tables: those of the rotation come
        # first. What a form does not take stays None, so the places behind it keep their index.
        rest: list[ir.Value | None] = [None] * self.form.gap
        ropes = self._ropes(node)
        if ropes is not None:
            query, key = (rope.inputs[0] for rope in ropes)
            angles = [angle for angle in ropes[0].inputs[1:3] if angle is not None]
            rest[:2] = [self._angles_of(graph, angle, node) for angle in angles]
            attributes |= {"do_rotary": 1, "rotary_interleaved": int_attribute(ropes[0], "interleaved", 0)}
        parts = [query, key, value]
        if self.form.flat:
            axis = shared_constant(graph, "paged.sequence_axis", np.array([1], np.int64))
            parts = [insert(node, "Squeeze", [part, axis]).outputs[0] for part in parts]
        operands = [*parts, *caches, *tables[:-1], *rest, tables[-1]]
        sinks = sinks_of(graph, node, None if caches[0] is None else caches[0].dtype)
        slopes = self._slopes_of(graph, meaning)
        ahead = find_input(graph, IMAGE_AHEAD) if meaning.ahead else None
        for index, operand in (
            (self.form.sinks, sinks),
            (self.form.slopes, slopes),
            (self.form.ahead, ahead),
        ):
            if operand is not None:
                operands += [None] * (index + 1 - len(operands))
                operands[index] = operand
        outputs = 3 if self.form.outputs else 1
        lowered = insert(node, OPERATOR, operands, attributes, domain=self.form.domain, num_outputs=outputs)
        lowered.name = node.name
        attended = lowered.outputs[0]
        if self.form.flat:
            attended = insert(node, "Unsqueeze", [attended, axis]).outputs[0]
        replace(node.outputs[0], attended)
        lowered.meta.update(node.meta)
        if self.form.outputs:
            for old, new in zip(node.outputs[1:3], lowered.outputs[1:], strict=True):
                replace(old, new)
        # Blocks are written in place, so the graph returns no caches. Only then is the old node without
        # readers.
        for present in node.outputs[1:3]:
            if present.is_graph_output():
                graph.outputs.remove(present)
        remove_unused(graph, node)

    def _ropes(self, node: ir.Node) -> list[ir.Node] | None:
        """Return the RotaryEmbedding nodes of q and k if the kernel can rotate instead, else None."""
        pair = [value.producer() if value is not None else None for value in node.inputs[:2]]
        ropes = [rope for rope in pair if rope is not None and rope.op_type == "RotaryEmbedding"]
        if not self.form.rotary or len(ropes) < 2 or rope_misfit(node, *ropes) is not None:
            return None
        angles = ropes[0].inputs[1:3]
        takes_all = not probe.turns_with_axes(angles[0]) or all(map(self._takes_own, angles))
        return ropes if takes_all else None

    def _angles_of(self, graph: ir.Graph, angle: ir.Value, node: ir.Node) -> ir.Value:
        """Return a table [positions, rotary_dim / 2], or [tokens, rotary_dim / 2] of the step's tokens.

        Those of positions with several axes have no table. The table of a long context takes longer to make
        and to write than the weights of a small model.
        """
        if angle not in self._angles:
            is_own = probe.turns_with_axes(angle) or (
                self._is_large(angle) and probe.turns_alone(graph, angle, self.context_length)
            )
            self._angles[angle] = self._rows(graph, angle, node) if is_own else self._table(graph, angle)
        return self._angles[angle]

    def _takes_own(self, angle: ir.Value | None) -> bool:
        """Whether the operator takes an angle of the step's tokens."""
        width = static_size(angle, 2)
        is_float = angle is not None and angle.dtype == ir.DataType.FLOAT
        return self.form.own_angles and is_float and width is not None and not width % _LANES

    def _is_large(self, angle: ir.Value) -> bool:
        width = static_size(angle, 2) or 0
        return self._takes_own(angle) and self.context_length * width * _FLOAT_BYTES > _LARGE_TABLE

    def _rows(self, graph: ir.Graph, angle: ir.Value, node: ir.Node) -> ir.Value:
        width = static_size(angle, 2)
        shape = shared_constant(graph, f"paged.angles_{width}", np.array([-1, width], np.int64))
        rows = insert(node, "Reshape", [angle, shape]).outputs[0]
        rows.type, rows.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape(["tokens", width])
        return rows

    def _table(self, graph: ir.Graph, angle: ir.Value) -> ir.Value:
        content = probe.rope_table(graph, angle, self.context_length)
        table = ir.tensor(content.astype((angle.dtype or ir.DataType.FLOAT).numpy()))
        return add_initializer(graph, f"{angle.name}_paged_table", table)

    def _meaning(self, graph: ir.Graph, node: ir.Node) -> probe.MaskMeaning:
        mask = node.inputs[3]
        if mask is None:
            if not int_attribute(node, "is_causal", 0):
                raise _unsupported(node, "has no mask, so it is not causal")
            return probe.MaskMeaning()
        if mask not in self._meanings:
            heads = int_attribute(node, "q_num_heads", 1) if self.form.slopes else 1
            meaning = probe.mask_meaning(
                graph, mask, self.context_length, heads=heads, ahead=bool(self.form.ahead)
            )
            if isinstance(meaning, str):
                raise _unsupported(node, f"cannot be paged: {meaning}")
            self._meanings[mask] = meaning
        return self._meanings[mask]

    def _slopes_of(self, graph: ir.Graph, meaning: probe.MaskMeaning) -> ir.Value | None:
        if not meaning.slopes:
            return None
        if meaning.slopes not in self._slopes:
            vector = ir.tensor(np.array(meaning.slopes, np.float32))
            self._slopes[meaning.slopes] = add_initializer(graph, "alibi_slopes", vector)
        return self._slopes[meaning.slopes]


class PagedInputsPass(GraphPass):
    """Give the graph the inputs of the paged contract: one flat batch, caches in blocks.

    Args:
        form: the form of the target's operator.

    Raises:
        UnsupportedAttentionError: a node other than an attention reads ``attention_mask``.
    """

    def __init__(self, form: PagedForm = PLAIN) -> None:
        super().__init__()
        self.form = form

    def rewrite(self, graph: ir.Graph) -> None:
        """Change inputs and their shapes."""
        nodes = self.form.nodes(graph)
        if not nodes:
            return
        caches = {value for node in nodes for value in [*node.inputs[3:5], *node.outputs[1:]]}
        for value in [*graph.inputs, *graph.outputs]:
            if value in caches and value.shape is not None:
                value.shape = self.form.cache_shape(value.shape[1], value.shape[3])
            elif value.name in (INPUT_IDS, POSITION_IDS, IMAGE_ROWS, IMAGE_AHEAD):
                value.shape = ir.Shape(["tokens", 1])
            elif value.name == ROPE_POSITIONS and value.shape is not None:
                value.shape = ir.Shape([value.shape[0], "tokens", 1])
            elif value.name == HIDDEN_STATES and value.shape is not None:
                value.shape = ir.Shape(["tokens", 1, value.shape[-1]])
            elif value.name == ATTENTION_MASK:
                _drop(graph, value)
        self.fired += 1


class FlatLogitsPass(GraphPass):
    """Select logits by one Gather over the flat batch, and make the head's shape independent of activations.

    A compiler that computes the last operators in fp32 and all others in a 16-bit type traces the shape of
    the output back to activations, and then computes the whole residual stream in fp32.

    Args:
        form: the form of the target's operator.
    """

    def __init__(self, form: PagedForm = PLAIN) -> None:
        super().__init__()
        self.form = form

    def rewrite(self, graph: ir.Graph) -> None:
        """Rewrite the nodes that ``SelectLogitsPass`` has written."""
        if not self.form.nodes(graph):
            return
        wanted = next(value for value in graph.inputs if value.name == LOGITS_POSITIONS)
        wanted.shape = ir.Shape(["wanted"])
        indices = {use.node.outputs[0] for use in wanted.uses()}
        for gather in nodes_of(graph, "GatherND"):
            if gather.inputs[1] not in indices:  # traces gather the weights of experts
                continue
            rows = insert(gather, "Gather", [gather.inputs[0], wanted], {"axis": 0}).outputs[0]
            replace(gather.outputs[0], rows)
            remove_unused(graph, gather)
            self.fired += 1
        logits = next(value for value in graph.outputs if value.name == LOGITS)
        vocab_size = static_size(logits, -1)
        for node in nodes_of(graph, "Reshape"):
            if vocab_size is not None and _is_shaped_by(node, wanted):
                shape = shared_constant(graph, "paged.logits_shape", np.array([-1, 1, vocab_size], np.int64))
                unused = node.inputs[1].producer() if node.inputs[1] is not None else None
                node.replace_input_with(1, shape)
                remove_unused(graph, unused)


def paged_passes(context_length: int, *, explicit: bool = False) -> list[ir.passes.PassBase]:
    """Return the passes in order. See "The paged graph" in ``docs/openvino.md``.

    Graphs with softcapped attention keep explicit KV instead.

    Args:
        context_length: maximum tokens of a sequence; the length of the rope tables.
        explicit: decompose all attention and keep explicit KV.
    """
    scales = CacheScales()
    return [
        RequireDynamicSequencePass(),
        *([] if explicit else [RefuseStatesPass()]),
        Float8WeightsPass(),
        WeightOnlyProductsPass(),
        SplitMinimaPass(),
        TakeCacheScalesPass(scales, required=False),
        FloatComputePass(),
        ShapeInferencePass(),
        TokenRangePass(),
        SharedCachePass(),
        *([DecomposeAttentionPass()] if explicit else [CappedAttentionPass(), SinkAttentionPass()]),
        # Attention to an encoder's rows stays the standard's operator where KV is explicit.
        PagedAttentionPass(context_length, scales, dataclasses.replace(PLAIN, cross=explicit)),
        RopeTablesPass(context_length),
        RemoveUnusedNodesPass(),
        PagedInputsPass(),
        SelectLogitsPass(),
        FlatLogitsPass(),
        WantedRowsPass(),
        ArithmeticDequantizePass(),
        RemoveUnusedNodesPass(),
    ]


def _is_shaped_by(node: ir.Node, value: ir.Value) -> bool:
    """Return whether the shape input of a Reshape is computed from a node that reads ``value``."""
    stack, seen = [node.inputs[1]], set[ir.Node]()
    while stack:
        producer = stack.pop()
        source = producer.producer() if producer is not None else None
        if source is not None and source not in seen:
            seen.add(source)
            if value in source.inputs:
                return True
            stack.extend(source.inputs)
    return False


def _attributes(
    node: ir.Node, caches: Sequence[ir.Value | None], meaning: probe.MaskMeaning
) -> dict[str, Any]:
    head_size = static_size(caches[0], 3) or 0
    cap = float_attribute(node, "softcap", 0.0)
    return {
        "num_heads": int_attribute(node, "q_num_heads", 0),
        "kv_num_heads": int_attribute(node, "kv_num_heads", 0),
        "scale": float_attribute(node, "scale", 1 / math.sqrt(head_size)),
        "local_window_size": meaning.window or -1,
        **({"softcap": cap} if cap else {}),
    }


def _check(node: ir.Node, form: PagedForm) -> None:
    """Raise GraphError for an attention that the operator cannot express."""
    inputs = [*node.inputs, *[None] * (7 - len(node.inputs))]
    if inputs[4] is None or inputs[5] is None:
        raise _unsupported(node, "has no KV cache")
    if inputs[6] is not None or len(node.outputs) > 3:
        raise _unsupported(node, "uses nonpad_kv_seqlen or qk_matmul_output, which PagedAttention lacks")
    if not int_attribute(node, "q_num_heads", 0) or not int_attribute(node, "kv_num_heads", 0):
        raise _unsupported(node, "has q, k and v that are not [batch, sequence, heads * head_dim]")
    size, value_size = (static_size(value, 3) for value in inputs[4:6])
    if size is None or size != value_size:
        raise _unsupported(
            node, f"needs equal, known head sizes of key and value, found {size} and {value_size}"
        )
    if form.largest_head and (size > form.largest_head or size % 8):
        raise _unsupported(
            node, f"has heads of {size}; PagedAttention has sizes divisible by 8, up to {form.largest_head}"
        )
    if float_attribute(node, "softcap", 0.0) and not form.softcap:
        raise _unsupported(node, "has a softcap, which PagedAttention lacks")
    if has_sinks(node) and not form.sinks:
        raise _unsupported(node, "has sinks, which PagedAttention lacks")


def _unsupported(node: ir.Node, why: str) -> UnsupportedAttentionError:
    return UnsupportedAttentionError(f"attention {node.name} {why}")


def _drop(graph: ir.Graph, value: ir.Value) -> None:
    if value.uses():
        reader = next(iter(value.uses())).node
        raise UnsupportedAttentionError(
            f"{reader.op_type} {reader.name} reads {value.name}, which the paged contract does not have"
        )
    graph.inputs.remove(value)

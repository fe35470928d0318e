"""DeBERTa v2 and v3 (https://arxiv.org/abs/2006.03654, 2111.09543): disentangled attention."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ....errors import CheckpointError, UnsupportedModelError
from ....records import dataclass
from ...config import RawConfig, integer
from ..encoder import EncoderConfig, EncoderWriter
from ..encoder import classify_tokens as classify_tokens
from ..post_norm import Bias, LayerNames, bert_config, embeddings, post_norm_layer

BASE = "deberta"
UNUSED = (
    "lm_predictions.",
    "cls.",
    "mask_predictions.",
    "position_ids",
    "embeddings.position_embeddings.",
    "encoder.LayerNorm.",
)
_NAMES = LayerNames(
    query="attention.self.query_proj", key="attention.self.key_proj", value="attention.self.value_proj"
)


@dataclass(frozen=True, slots=True)
class _Relative:
    """Relative positions: the kinds of scores that they add, and the indices of their embeddings."""

    kinds: tuple[str, ...]
    span: int
    buckets: int
    farthest: int
    shared: bool


def config(raw: RawConfig, labels: int) -> EncoderConfig:
    """Normalise config.json.

    Raises:
        UnsupportedModelError: an option changes the graph.
        CheckpointError: a value is out of range.
    """
    raw = {"type_vocab_size": 0, "layer_norm_eps": 1e-7, **raw}
    if integer(raw, "embedding_size", integer(raw, "hidden_size")) != integer(raw, "hidden_size"):
        raise UnsupportedModelError(
            "deberta-v2 with an embedding_size that is not hidden_size is not supported"
        )
    if "attention_head_size" in raw:
        raise UnsupportedModelError(
            "deberta-v2 with attention_head_size is not supported; supported: without"
        )
    if integer(raw, "conv_kernel_size", 0) and integer(raw, "conv_kernel_size") % 2 == 0:
        raise UnsupportedModelError("deberta-v2 with an even conv_kernel_size is not supported")
    if integer(raw, "pooler_hidden_size", integer(raw, "hidden_size")) != integer(raw, "hidden_size"):
        raise UnsupportedModelError(
            "deberta-v2 with a pooler_hidden_size that is not hidden_size is not supported"
        )
    c = bert_config(raw, labels=labels)
    relative = _relative(raw)
    kinds = len(relative.kinds) if relative else len(_kinds(raw))
    return replace(c, scale=(c.head_dim * (1 + kinds)) ** -0.5)


def build(net: EncoderWriter, raw: RawConfig) -> ir.Value:
    """Write the encoder and return the states of its last layer."""
    c = net.config
    x = embeddings(net, absolute=bool(raw.get("position_biased_input", True)))
    x = embedded = net.op("Mul", x, net.real_tokens())
    relative = _relative(raw)
    with net.scope("encoder"):
        table = None
        if relative is not None:
            table = net.table("rel_embeddings", 2 * relative.span)
            if "layer_norm" in str(raw.get("norm_rel_ebd", "none")).lower():
                table = net.layer_norm("LayerNorm", table)
        for layer in range(c.num_layers):
            with net.scope(f"layer.{layer}"):
                bias = _bias(net, relative, table) if relative and relative.kinds and table else None
                x = post_norm_layer(net, layer, x, _NAMES, bias)
            if layer == 0 and integer(raw, "conv_kernel_size", 0):
                x = _convolution(net, raw, embedded, x)
    return x


def classify(net: EncoderWriter, raw: RawConfig, states: ir.Value, base: str) -> ir.Value:
    """Write the head of ``DebertaV2ForSequenceClassification`` and return the logits."""
    size = net.config.hidden_size
    x = net.linear("pooler.dense", net.first_token(states), size, size)
    x = net.activation(x, raw.get("pooler_hidden_act", "gelu"))
    return net.linear("classifier", x, size, net.config.labels)


def _kinds(raw: RawConfig) -> tuple[str, ...]:
    stated = raw.get("pos_att_type") or []
    names = stated.lower().split("|") if isinstance(stated, str) else stated
    kinds = {str(name).strip() for name in names} - {""}
    if unknown := kinds - {"c2p", "p2c"}:
        raise UnsupportedModelError(
            f"pos_att_type '{sorted(unknown)[0]}' is not supported; supported: c2p, p2c"
        )
    return tuple(sorted(kinds))


def _relative(raw: RawConfig) -> _Relative | None:
    if not raw.get("relative_attention", False):
        return None
    stated = {key: max(raw.get(key, -1), 0) for key in ("max_relative_positions", "position_buckets")}
    farthest = integer(stated, "max_relative_positions") or integer(raw, "max_position_embeddings", 512)
    buckets = integer(stated, "position_buckets")
    span = buckets or farthest
    if not 1 <= span <= 2**20 or not 1 <= farthest <= 2**20 or (buckets > 0 and farthest <= buckets // 2 + 1):
        raise CheckpointError(
            f"config.json: {buckets} buckets for distances up to {farthest} are out of range"
        )
    return _Relative(_kinds(raw), span, buckets, farthest, bool(raw.get("share_att_key", False)))


def _rows(relative: _Relative, most: int) -> npt.NDArray[np.int64]:
    """Return the row of the table of each distance -most, ..., most of a key from its query.

    Distances of at most half of the buckets have a row each; the others share rows by their logarithm
    (https://arxiv.org/abs/2111.09543, appendix). The sign is that of the query's position minus the key's.
    """
    distance = -np.arange(-most, most + 1)
    if relative.buckets > 0:
        middle = relative.buckets // 2
        far = np.maximum(np.abs(distance), max(middle - 1, 1)).astype(np.float32)
        whole = np.log(np.float32((relative.farthest - 1) / middle))
        steps = np.ceil(np.log(far / np.float32(middle)) / whole * np.float32(middle - 1)) + middle
        distance = np.where(far <= middle, distance, (steps * np.sign(distance)).astype(np.int64))
    return np.clip(distance + relative.span, 0, 2 * relative.span - 1)


def _bias(net: EncoderWriter, relative: _Relative, table: ir.Value) -> Bias:
    """Return what a layer adds to its scores: those of content to position, and of position to content."""
    c = net.config
    most = c.max_tokens - 1
    with net.unscoped("relative_rows"):
        by_distance = net.constant(_rows(relative, most), np.int64, "rows")
        rows = net.op("Gather", by_distance, net.distances(most))
        rows = net.op("Unsqueeze", rows, net.ints(0, 1))

    def heads(x: ir.Value, order: tuple[int, ...]) -> ir.Value:
        return net.op("Transpose", net.split_heads(x, c.num_heads), perm=order)

    def positions(own: str, shared: str, order: tuple[int, ...]) -> ir.Value:
        name = shared if relative.shared else own
        projected = net.linear(f"attention.self.{name}", table, c.hidden_size, c.hidden_size)
        return heads(net.op("Unsqueeze", projected, net.ints(0)), order)

    def scores(q: ir.Value, k: ir.Value) -> ir.Value:
        total: ir.Value | None = None
        # A product with the table gives the scores of each position with every bucket of distances;
        # GatherElements picks the bucket of each pair. For content to position the pair's key is on the last
        # axis, for position to content its query is on the one before, so the same rows serve both.
        shape = net.op(
            "Concat",
            net.op("Shape", net.input_ids, start=0, end=1),
            net.ints(c.num_heads),
            net.op("Shape", net.input_ids, start=1, end=2),
            net.op("Shape", net.input_ids, start=1, end=2),
            axis=0,
        )
        places = net.op("Expand", rows, shape)
        for kind in relative.kinds:
            if kind == "c2p":
                keys = positions("pos_key_proj", "key_proj", (0, 2, 3, 1))
                part = net.op("MatMul", heads(q, (0, 2, 1, 3)), keys)
                part = net.op("GatherElements", part, places, axis=3)
            else:
                queries = positions("pos_query_proj", "query_proj", (0, 2, 1, 3))
                part = net.op("MatMul", queries, heads(k, (0, 2, 3, 1)))
                part = net.op("GatherElements", part, places, axis=2)
            total = part if total is None else net.op("Add", total, part)
        return net.op("Mul", total, net.constant(c.scale or 1.0, np.float32, "scale"))

    return scores


def _convolution(net: EncoderWriter, raw: RawConfig, embedded: ir.Value, x: ir.Value) -> ir.Value:
    """Return norm(x + act(conv(embedded))), 0 for padding."""
    size, kernel = net.config.hidden_size, integer(raw, "conv_kernel_size")
    groups = integer(raw, "conv_groups", 1)
    with net.scope("conv"):
        with net.scope("conv"):
            weight, bias = net.weight("weight", size, size // groups, kernel), net.weight("bias", size)
            across = net.op("Transpose", embedded, perm=(0, 2, 1))
            sides = (kernel // 2, kernel // 2)
            out = net.op("Conv", across, weight, bias, pads=sides, group=groups, kernel_shape=(kernel,))
            out = net.op("Mul", net.op("Transpose", out, perm=(0, 2, 1)), net.real_tokens())
        out = net.activation(out, raw.get("conv_act", "tanh"))
        return net.op("Mul", net.layer_norm("LayerNorm", net.op("Add", x, out)), net.real_tokens())

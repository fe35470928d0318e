"""The encoder of BERT (https://arxiv.org/abs/1810.04805): learned positions, norms behind each part."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ...errors import CheckpointError, UnsupportedModelError
from ...records import dataclass
from ..config import RawConfig, integer, number
from .encoder import EncoderConfig, EncoderWriter


@dataclass(frozen=True, slots=True)
class LayerNames:
    """Names of a layer's modules in the checkpoint."""

    query: str = "attention.self.query"
    key: str = "attention.self.key"
    value: str = "attention.self.value"
    output: str = "attention.output.dense"
    attention_norm: str = "attention.output.LayerNorm"
    up: str = "intermediate.dense"
    down: str = "output.dense"
    norm: str = "output.LayerNorm"
    gate: str = ""  # of a feed-forward layer down(act(gate(x)) * up(x))
    fused: bool = False  # whether ``query`` holds the rows of queries, keys and values
    fused_gate: bool = False  # whether ``up`` holds the rows of up, then those of the gate


BERT = LayerNames()
# Names that several encoders of transformers share.
MODULES = LayerNames(
    query="self_attn.q_proj",
    key="self_attn.k_proj",
    value="self_attn.v_proj",
    output="self_attn.o_proj",
    attention_norm="post_attention_layernorm",
    up="mlp.up_proj",
    gate="mlp.gate_proj",
    down="mlp.down_proj",
    norm="post_mlp_layernorm",
)
Bias = Callable[[ir.Value, ir.Value], ir.Value]  # of queries and keys


def bert_config(raw: RawConfig, *, labels: int, padding: int | None = None) -> EncoderConfig:
    """Convert the config.json of a model with the layers of BERT.

    Args:
        raw: the content of config.json.
        labels: see ``EncoderConfig``.
        padding: the id of the padding token, if positions are counted from the number behind it.

    Raises:
        CheckpointError: a key is missing or of the wrong type.
        UnsupportedModelError: the model is a decoder, or has other positions.
    """
    if raw.get("is_decoder") or raw.get("add_cross_attention"):
        raise UnsupportedModelError(f"a decoder with model_type '{raw['model_type']}' is not supported")
    if raw.get("position_embedding_type", "absolute") != "absolute":
        kind = raw["position_embedding_type"]
        raise UnsupportedModelError(f"position_embedding_type '{kind}' is not supported; supported: absolute")
    positions = integer(raw, "max_position_embeddings", 512)
    return EncoderConfig(
        model_type=raw["model_type"],
        vocab_size=integer(raw, "vocab_size"),
        hidden_size=integer(raw, "hidden_size"),
        intermediate_size=integer(raw, "intermediate_size"),
        num_layers=integer(raw, "num_hidden_layers"),
        num_heads=integer(raw, "num_attention_heads"),
        max_tokens=positions if padding is None else positions - padding - 1,
        hidden_act=raw.get("hidden_act", "gelu"),
        norm_eps=number(raw, "layer_norm_eps", 1e-12),
        token_types=integer(raw, "type_vocab_size", 2),
        labels=labels,
    )


def embeddings(
    net: EncoderWriter,
    positions: ir.Value | None = None,
    *,
    skipped: int = 0,
    absolute: bool = True,
    size: int | None = None,
    norm: str = "embeddings.LayerNorm",
) -> ir.Value:
    """Return the normalized sum of the embeddings of tokens, positions and token types.

    Args:
        net: the graph to write into.
        positions: rows [batch, sequence] of the table of positions; None for 0, 1, ...
        skipped: rows of this table that belong to no position of a text.
        absolute: whether there is a table of positions.
        size: the width of the tables; None for that of the hidden states.
        norm: the name of the norm.
    """
    c = net.config
    with net.scope("embeddings"):
        x = net.op("Gather", net.table("word_embeddings", c.vocab_size, size), net.input_ids)
        if c.token_types:
            types = net.table("token_type_embeddings", c.token_types, size)
            kinds = net.token_type_ids
            kinds = net.constant(0, np.int64, "first") if kinds is None else kinds
            x = net.op("Add", x, net.op("Gather", types, kinds))
        if absolute:
            table = net.table("position_embeddings", c.max_tokens + skipped, size)
            rows = net.positions() if positions is None else positions
            x = net.op("Add", x, net.op("Gather", table, rows))
    return net.layer_norm(norm, x, size)


def positions_of_tokens(net: EncoderWriter, padding: int) -> ir.Value:
    """Return positions [batch, sequence] as in RoBERTa: padding + 1, ... of tokens, else ``padding``."""
    with net.unscoped("positions"):
        token = net.op("Not", net.op("Equal", net.input_ids, net.constant(padding, np.int64, "padding")))
        token = net.op("Cast", token, to=ir.DataType.INT64)
        count = net.op("CumSum", token, net.constant(1, np.int64, "axis"))
        return net.op("Add", net.op("Mul", count, token), net.constant(padding, np.int64, "padding"))


def layers(
    net: EncoderWriter,
    x: ir.Value,
    names: LayerNames = BERT,
    *,
    scope: str = "encoder.layer",
    bias: Bias | None = None,
) -> ir.Value:
    """Write the layers of the encoder; see ``post_norm_layer``.

    Args:
        net: the graph to write into.
        x: the embeddings [batch, sequence, hidden].
        names: of a layer's modules.
        scope: of the layers in the checkpoint.
        bias: returns what a layer adds to the scores of its queries and keys.
    """
    for layer in range(net.config.num_layers):
        with net.scope(f"{scope}.{layer}"):
            x = post_norm_layer(net, layer, x, names, bias)
    return x


def post_norm_layer(
    net: EncoderWriter, layer: int, x: ir.Value, names: LayerNames, bias: Bias | None = None
) -> ir.Value:
    """Write x = norm(x + attention(x)); x = norm(x + mlp(x))."""
    c = net.config
    hidden, inner = c.hidden_size, c.intermediate_size
    if names.fused:
        parts = ("q", "k", "v")
        q, k, v = net.split_linear(names.query, parts, x, hidden, hidden, bias=c.attention_bias)
    else:
        q, k, v = (
            net.linear(n, x, hidden, hidden, bias=c.attention_bias)
            for n in (names.query, names.key, names.value)
        )
    attended = net.attention(layer, q, k, v, bias(q, k) if bias else None)
    attended = net.linear(names.output, attended, hidden, hidden, bias=c.attention_bias)
    x = net.layer_norm(names.attention_norm, net.op("Add", attended, x))
    if names.fused_gate:
        up, gate = net.split_linear(names.up, ("up", "gate"), x, hidden, inner, bias=c.mlp_bias)
        inside = net.op("Mul", net.activation(gate), up)
    else:
        inside = net.activation(net.linear(names.gate or names.up, x, hidden, inner, bias=c.mlp_bias))
        if names.gate:
            inside = net.op("Mul", inside, net.linear(names.up, x, hidden, inner, bias=c.mlp_bias))
    down_bias = c.mlp_bias if c.down_bias is None else c.down_bias
    down = net.linear(names.down, inside, inner, hidden, bias=down_bias)
    return net.layer_norm(names.norm, net.op("Add", down, x))


def tied_vocabulary(
    net: EncoderWriter,
    x: ir.Value,
    names: tuple[str, str | None],
    base: str,
    table: str = "embeddings.word_embeddings",
) -> ir.Value:
    """Return logits [batch, sequence, vocabulary] by a weight that may be that of the embedding.

    Args:
        net: the graph to write into.
        x: states [batch, sequence, size].
        names: the module, and its bias; None for none. The bias may be stored as the module's own.
        base: prefixes the encoder's tensors.
        table: the embedding, in the encoder.
    """
    c = net.config
    module, bias = names
    own, tied = f"{module}.weight", f"{base}.{table}.weight" if base else f"{table}.weight"
    stored = net.checkpoint.tensor(
        own if own in net.checkpoint else tied,
        (c.vocab_size, c.hidden_size),
        view=lambda array: array.T,
        new_name=f"{module}.transposed",
    )
    with net.scope(module):
        x = net.op("MatMul", x, net.initializer(stored))
        if bias is None:
            return x
        added = bias if bias in net.checkpoint else f"{module}.bias"
        return net.op("Add", x, net.initializer(net.checkpoint.tensor(added, (c.vocab_size,))))


def relative_buckets(count: int, most: int) -> npt.NDArray[np.int64]:
    """Return the bucket [2 most + 1] of each distance -most, ..., most of a key from its query.

    As in T5 (https://arxiv.org/abs/1910.10683, section 2.1): half of ``count`` buckets are for keys behind
    the query; of each half, one half is for single distances, the other for ranges that grow by a factor.
    """
    distance = np.arange(-most, most + 1)
    half = count // 2
    exact = half // 2
    far = np.abs(distance).astype(np.float32)
    with np.errstate(divide="ignore"):
        place = (
            np.log(far / np.float32(exact)) / np.float32(math.log(most / exact)) * np.float32(half - exact)
        )
    place = np.where(np.isfinite(place), place, 0)
    ranges = np.minimum(exact + place.astype(np.int64), half - 1)
    buckets = np.where(np.abs(distance) < exact, np.abs(distance), ranges)
    return np.asarray(np.where(distance > 0, buckets + half, buckets), np.int64)


def relative_bias(net: EncoderWriter, name: str, count: int, most: int) -> ir.Value:
    """Return the learned bias [1, heads, sequence, sequence] by bucket of distance; see ``relative_buckets``.

    Raises:
        CheckpointError: the numbers describe no buckets.
    """
    if not 4 <= count <= 2**16 or not count // 4 < most <= 2**20:
        raise CheckpointError(f"config.json: {count} buckets for distances up to {most} are out of range")
    buckets = relative_buckets(count, most)
    stored = net.checkpoint.tensor(
        net.qualified(f"{name}.weight"),
        (count, net.config.num_heads),
        view=lambda array: array[buckets].T,
        new_name=net.qualified(f"{name}.by_distance"),
    )
    return net.by_distance(net.initializer(stored), most)

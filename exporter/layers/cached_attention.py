"""Attention that rotates queries and keys and appends to the KV cache."""

from __future__ import annotations

import onnx_ir as ir

from ..decoder import Decoder
from .elementwise import scaled


def attention(
    net: Decoder, layer: int, q: ir.Value, k: ir.Value, v: ir.Value, *, rotate: bool = True
) -> ir.Value:
    """Apply rotary embeddings to q and k if ``layer`` has them, append k and v to the cache, and attend.

    With ``rotate=False`` they are rotated already.

    q is [batch, sequence, num_heads * head_dim]; k and v are [batch, sequence, num_kv_heads * head_dim]. The
    result has the shape of q.
    """
    c, kv_heads = net.config, net.config.key_value(layer).heads
    if rotate:
        q, k = rotated(net, layer, q, c.num_heads), rotated(net, layer, k, kv_heads)
    out, key, value = net.ops(
        "Attention",
        *(q, k, v, net.mask(layer), *net.past[layer]),
        num_outputs=3,
        q_num_heads=c.num_heads,
        kv_num_heads=kv_heads,
        **_scores(net),
    )
    net.set_present(layer, key, value)
    return out


def attention_to_owner(net: Decoder, layer: int, q: ir.Value) -> ir.Value:
    """Rotate q as ``attention`` does, and attend to the keys and values of the layer's owner."""
    heads, size = net.config.num_heads, net.config.key_value(layer).size
    q = net.op("Reshape", rotated(net, layer, q, heads), net.ints(0, 0, heads, size))
    q = net.op("Transpose", q, perm=[0, 2, 1, 3])
    out = net.op("Attention", q, *net.present_of_owner(layer), net.mask(layer), **_scores(net))
    return net.op("Reshape", net.op("Transpose", out, perm=[0, 2, 1, 3]), net.ints(0, 0, heads * size))


def attention_with_sinks(
    net: Decoder, layer: int, q: ir.Value, k: ir.Value, v: ir.Value, sinks: ir.Value
) -> ir.Value:
    """Like ``attention``, with a sink per query head: a score whose key has no value.

    ``Attention`` of opset 23 has no sinks, so this is its decomposition. ``sinks`` is [num_heads].
    """
    c = net.config
    groups, queries = c.num_kv_heads, c.num_heads // c.num_kv_heads
    q = _by_group(net, rotated(net, layer, q, c.num_heads), queries)
    parts = (rotated(net, layer, k, groups), v)
    past = net.past[layer]
    key, value = (
        net.op("Concat", old, net.op("Squeeze", _by_group(net, new, 1), net.ints(2)), axis=2)
        for old, new in zip(past, parts, strict=True)
    )
    net.set_present(layer, key, value)
    keys = net.op("Transpose", net.op("Unsqueeze", key, net.ints(2)), perm=[0, 1, 2, 4, 3])
    scores = net.op("MatMul", scaled(net, q, c.attention_scale), keys)
    scores = net.op("Add", scores, net.op("Unsqueeze", net.mask(layer), net.ints(1)))
    sink = net.op("Reshape", sinks, net.ints(1, groups, queries, 1, 1))
    # The sink takes part in the largest score and in the sum of the softmax, and has no value: the weights
    # of a row add up to less than 1.
    largest = net.op("Max", net.op("ReduceMax", scores, net.ints(-1), keepdims=1), sink)
    powers = net.op("Exp", net.op("Sub", scores, largest))
    total = net.op("ReduceSum", powers, net.ints(-1), keepdims=1)
    total = net.op("Add", total, net.op("Exp", net.op("Sub", sink, largest)))
    out = net.op("MatMul", net.op("Div", powers, total), net.op("Unsqueeze", value, net.ints(2)))
    return net.op("Reshape", net.op("Transpose", out, perm=[0, 3, 1, 2, 4]), net.ints(0, 0, c.q_size))


def _scores(net: Decoder) -> dict[str, float]:
    """Return the attributes of ``Attention`` that change its scores."""
    cap = net.config.attention_softcap
    return {"scale": net.config.attention_scale, **({} if cap is None else {"softcap": cap})}


def rotated(net: Decoder, layer: int, x: ir.Value, num_heads: int) -> ir.Value:
    """Apply the rotary embedding of ``layer``, if it has one, to x [batch, sequence, num_heads * size]."""
    config = net.config.ropes[layer]
    if config is None:
        return x
    whole = config.rotary_dim == net.config.key_value(layer).size
    options = {} if whole else {"rotary_embedding_dim": config.rotary_dim}
    if config.interleaved:
        options["interleaved"] = 1
    return net.op("RotaryEmbedding", x, *net.rope(config), num_heads=num_heads, **options)


def _by_group(net: Decoder, x: ir.Value, queries: int) -> ir.Value:
    """Return x [batch, sequence, heads * size] as [batch, kv_heads, queries, sequence, size]."""
    heads = net.op("Reshape", x, net.ints(0, 0, net.config.num_kv_heads, queries, net.config.head_dim))
    return net.op("Transpose", heads, perm=[0, 2, 3, 1, 4])


def cross_attention(net: Decoder, layer: int, q: ir.Value, k: ir.Value, v: ir.Value) -> ir.Value:
    """Append the keys and values of the encoder's new rows to their cache, and attend to all of them.

    q is [batch, sequence, num_heads * head_dim]; k and v are [batch, new rows, num_heads * head_dim]. The
    result has the shape of q.
    """
    heads, size = net.config.num_heads, net.config.head_dim
    split = [
        net.op("Transpose", net.op("Reshape", x, net.ints(0, 0, heads, size)), perm=[0, 2, 1, 3])
        for x in (q, k, v)
    ]
    key, value = net.with_encoder_rows(layer, *split[1:])
    out = net.op("Attention", split[0], key, value, net.encoder_mask(), scale=net.config.attention_scale)
    return net.op("Reshape", net.op("Transpose", out, perm=[0, 2, 1, 3]), net.ints(0, 0, heads * size))

"""The layers of decoder families, in the canonical forms of docs/contract.md.

Weight names are those of the checkpoint, relative to the current scope.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import onnx_ir as ir

from ..errors import UnsupportedModelError
from .decoder import Decoder
from .weights import Array

View = Callable[[Array], Array]


def pre_norm_decoder(
    net: Decoder,
    *,
    attention: Callable[[Decoder, int, ir.Value], ir.Value],
    mlp: Callable[[Decoder, int, ir.Value], ir.Value],
) -> ir.Value:
    """Write a pre-norm decoder, as in Llama: per layer, x += attention(norm(x)); x += mlp(norm(x)).

    Returns:
        Logits [batch, sequence, vocab].
    """
    net.checkpoint.ignore("rotary_emb.inv_freq")  # stored by old versions of transformers
    x = embedding(net, "model.embed_tokens")
    for layer in range(net.config.num_layers):
        with net.scope(f"model.layers.{layer}"):
            x = net.op("Add", x, attention(net, layer, rms_norm(net, "input_layernorm", x)))
            x = net.op("Add", x, mlp(net, layer, rms_norm(net, "post_attention_layernorm", x)))
    x = rms_norm(net, "model.norm", x)
    return lm_head(net, x, embedding_name="model.embed_tokens")


def post_norm_decoder(
    net: Decoder,
    *,
    attention: Callable[[Decoder, int, ir.Value], ir.Value],
    mlp: Callable[[Decoder, int, ir.Value], ir.Value],
) -> ir.Value:
    """Write a decoder with norms behind its parts, as in OLMo 2: x += norm(attention(x)); x += norm(mlp(x)).

    Returns:
        Logits [batch, sequence, vocab].
    """
    x = embedding(net, "model.embed_tokens")
    for layer in range(net.config.num_layers):
        with net.scope(f"model.layers.{layer}"):
            x = net.op("Add", x, rms_norm(net, "post_attention_layernorm", attention(net, layer, x)))
            x = net.op("Add", x, rms_norm(net, "post_feedforward_layernorm", mlp(net, layer, x)))
    x = rms_norm(net, "model.norm", x)
    return lm_head(net, x, embedding_name="model.embed_tokens")


def embedding(net: Decoder, name: str, width: int | None = None) -> ir.Value:
    """Look up token embeddings [batch, sequence, width]; the width is by default the hidden size."""
    with net.scope(name):
        weight = net.weight("weight", net.config.vocab_size, width or net.config.hidden_size)
        return net.op("Gather", weight, net.input_ids)


def lm_head(
    net: Decoder,
    x: ir.Value,
    *,
    embedding_name: str,
    head_name: str = "lm_head",
    width: int | None = None,
) -> ir.Value:
    """Compute logits [batch, sequence, vocab] of x [batch, sequence, width], by default the hidden size.

    A tied head uses the embedding's initializer, stored once.
    """
    c = net.config
    width = width or c.hidden_size
    if not c.tie_word_embeddings:
        return softcap(net, linear(net, head_name, x, width, c.vocab_size), c.final_softcap)
    net.checkpoint.ignore(f"{head_name}.weight")  # some checkpoints hold it twice
    with net.scope(embedding_name):
        weight = net.weight("weight", c.vocab_size, width)
    with net.scope(head_name):
        rows = net.op("Reshape", x, net.ints(-1, width))
        logits = net.op("Gemm", rows, weight, transB=1)
        shape = net.op("Concat", net.op("Shape", net.input_ids), net.ints(c.vocab_size), axis=0)
        return softcap(net, net.op("Reshape", logits, shape), c.final_softcap)


def softcap(net: Decoder, x: ir.Value, cap: float | None) -> ir.Value:
    """Return cap * tanh(x / cap), or x if ``cap`` is None."""
    if cap is None:
        return x
    limit = net.constant(cap, np.float32, "softcap")
    return net.op("Mul", net.op("Tanh", net.op("Div", x, limit)), limit)


def linear(
    net: Decoder,
    name: str,
    x: ir.Value,
    in_features: int,
    out_features: int,
    *,
    bias: bool = False,
    stored_in_out: bool = False,
) -> ir.Value:
    """Return x @ W (+ b). The checkpoint stores W as [out, in] (torch.nn.Linear), or as [in, out]."""
    parts = {name: out_features}
    return split_linear(net, name, parts, x, in_features, bias=bias, stored_in_out=stored_in_out)[0]


def split_linear(
    net: Decoder,
    fused: str,
    parts: Mapping[str, int],
    x: ir.Value,
    in_features: int,
    *,
    bias: bool = False,
    stored_in_out: bool = False,
) -> list[ir.Value]:
    """Write several linear layers whose weights the checkpoint stores as one tensor.

    Args:
        net: the graph to write into.
        fused: name of the checkpoint's module.
        parts: out_features of each layer, by name, in the order of the fused tensor.
        x: the input, [..., in_features].
        in_features: width of ``x``.
        bias: whether the module has a bias.
        stored_in_out: whether the checkpoint stores the weight as [in, out] instead of [out, in].

    Returns:
        The output of each part, [..., out_features].
    """
    total = sum(parts.values())
    shape = (in_features, total) if stored_in_out else (total, in_features)
    x = net.ordered(f"{fused}.weight", shape, x)
    results, start = [], 0
    for name, size in parts.items():
        part = slice(start, start + size)
        start += size
        view = _columns(part) if stored_in_out else _rows_transposed(part)
        weight = net.weight(f"{fused}.weight", *shape, view=view, new_name=f"{name}.weight")
        with net.scope(name):
            y = net.op("MatMul", x, weight)
        if bias:
            values = net.weight(f"{fused}.bias", total, view=_elements(part), new_name=f"{name}.bias")
            with net.scope(name):
                y = net.op("Add", y, values)
        results.append(y)
    return results


def rms_norm(
    net: Decoder,
    name: str,
    x: ir.Value,
    size: int | None = None,
    *,
    view: View | None = None,
    epsilon: float | None = None,
) -> ir.Value:
    """Write RMSNormalization (https://arxiv.org/abs/1910.07467) over the last axis."""
    epsilon = net.config.norm_eps if epsilon is None else epsilon
    with net.scope(name):
        weight = net.weight("weight", size or net.config.hidden_size, view=view)
        return net.op("RMSNormalization", x, weight, axis=-1, epsilon=epsilon)


def plain_rms_norm(net: Decoder, x: ir.Value, size: int) -> ir.Value:
    """Write RMSNormalization without a weight over the last axis, of ``size`` elements."""
    ones = net.constant(np.ones(size), np.float32, f"ones_{size}")
    return net.op("RMSNormalization", x, ones, axis=-1, epsilon=net.config.norm_eps)


def layer_norm(net: Decoder, name: str, x: ir.Value, *, bias: bool = True) -> ir.Value:
    """Write LayerNormalization (https://arxiv.org/abs/1607.06450) over the last axis."""
    size = net.config.hidden_size
    with net.scope(name):
        operands = [net.weight("weight", size), *([net.weight("bias", size)] if bias else [])]
        return net.op("LayerNormalization", x, *operands, axis=-1, epsilon=net.config.norm_eps)


def scaled(net: Decoder, x: ir.Value, factor: float) -> ir.Value:
    """Return x * factor; x itself for a factor of 1."""
    return x if factor == 1 else net.op("Mul", x, net.constant(factor, np.float32, "scale"))


def plain_mlp(net: Decoder, names: tuple[str, str], x: ir.Value, *, bias: bool = True) -> ir.Value:
    """Write the feed-forward layer down(act(up(x))); ``names`` are those of up and down."""
    hidden, inner = net.config.hidden_size, net.config.intermediate_size
    with net.scope("mlp"):
        x = activation(net, linear(net, names[0], x, hidden, inner, bias=bias))
        return linear(net, names[1], x, inner, hidden, bias=bias)


def head_norm(
    net: Decoder, name: str, x: ir.Value, num_heads: int, *, view: View | None = None, size: int | None = None
) -> ir.Value:
    """Apply ``rms_norm`` to each head of x [batch, sequence, heads * size], by default head_dim."""
    size = size or net.config.head_dim
    with net.scope(name):
        heads = net.op("Reshape", x, net.ints(0, 0, num_heads, size))
    normed = rms_norm(net, name, heads, size, view=view)
    with net.scope(name):
        return net.op("Reshape", normed, net.ints(0, 0, num_heads * size))


def qkv(net: Decoder, x: ir.Value, *, bias: bool) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Compute queries, keys and values of x by three linear layers."""
    hidden, q_size, kv_size = net.config.hidden_size, net.config.q_size, net.config.kv_size
    return (
        linear(net, "q_proj", x, hidden, q_size, bias=bias),
        linear(net, "k_proj", x, hidden, kv_size, bias=bias),
        linear(net, "v_proj", x, hidden, kv_size, bias=bias),
    )


def selected_linear(
    net: Decoder,
    stored: str,
    name: str,
    x: ir.Value,
    shape: tuple[int, int],
    rows: View,
    *,
    bias: bool = False,
) -> ir.Value:
    """Write a linear layer whose outputs are a selection of those of a stored module.

    Args:
        net: the graph to write into.
        stored: name of the checkpoint's module.
        name: name of the layer.
        x: the input, [..., in].
        shape: shape of the stored weight, [out, in].
        rows: selects or reorders outputs of the stored weight and bias.
        bias: whether the module has a bias.
    """
    x = net.ordered(f"{stored}.weight", shape, x)
    weight = net.weight(f"{stored}.weight", *shape, view=_transposed(rows), new_name=f"{name}.weight")
    with net.scope(name):
        y = net.op("MatMul", x, weight)
    if not bias:
        return y
    values = net.weight(f"{stored}.bias", shape[0], view=rows, new_name=f"{name}.bias")
    with net.scope(name):
        return net.op("Add", y, values)


def grouped_qkv(net: Decoder, fused: str, x: ir.Value, *, bias: bool) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Compute queries, keys and values of x by a module that stores them by group of heads.

    Its outputs are [num_kv_heads, num_heads / num_kv_heads + 2, head_dim]: queries, a key and a value.
    """
    c = net.config
    queries = c.num_heads // c.num_kv_heads
    shape = (c.q_size + 2 * c.kv_size, c.hidden_size)
    parts = {"q_proj": slice(queries), "k_proj": slice(-2, -1), "v_proj": slice(-1, None)}
    results = []
    for name, part in parts.items():
        rows = _heads_of_groups(c.num_kv_heads, queries + 2, part)
        results.append(selected_linear(net, fused, name, x, shape, rows, bias=bias))
    return results[0], results[1], results[2]


def attention(net: Decoder, layer: int, q: ir.Value, k: ir.Value, v: ir.Value) -> ir.Value:
    """Apply rotary embeddings to q and k if ``layer`` has them, append k and v to the cache, and attend.

    q is [batch, sequence, num_heads * head_dim]; k and v are [batch, sequence, num_kv_heads * head_dim]. The
    result has the shape of q.
    """
    c, kv_heads = net.config, net.config.key_value(layer).heads
    q, k = _rotate(net, layer, q, c.num_heads), _rotate(net, layer, k, kv_heads)
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
    q = net.op("Reshape", _rotate(net, layer, q, heads), net.ints(0, 0, heads, size))
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
    q = _by_group(net, _rotate(net, layer, q, c.num_heads), queries)
    parts = (_rotate(net, layer, k, groups), v)
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
    largest = net.op("Max", net.op("ReduceMax", scores, net.ints(-1), keepdims=1), sink)
    powers = net.op("Exp", net.op("Sub", scores, largest))
    total = net.op("ReduceSum", powers, net.ints(-1), keepdims=1)
    total = net.op("Add", total, net.op("Exp", net.op("Sub", sink, largest)))
    out = net.op("MatMul", net.op("Div", powers, total), net.op("Unsqueeze", value, net.ints(2)))
    return net.op("Reshape", net.op("Transpose", out, perm=[0, 3, 1, 2, 4]), net.ints(0, 0, c.q_size))


def gated_mlp(net: Decoder, layer: int, x: ir.Value) -> ir.Value:
    """Write the gated feed-forward layer down(act(gate(x)) * up(x)), https://arxiv.org/abs/2002.05202."""
    c, width = net.config, net.config.mlp_width(layer)
    with net.scope("mlp"):
        gate = linear(net, "gate_proj", x, c.hidden_size, width, bias=c.mlp_bias)
        up = linear(net, "up_proj", x, c.hidden_size, width, bias=c.mlp_bias)
        product = net.op("Mul", activation(net, gate), up)
        return linear(net, "down_proj", product, width, c.hidden_size, bias=c.mlp_bias)


def activation(net: Decoder, x: ir.Value) -> ir.Value:
    """Apply the activation function ``hidden_act`` of the configuration.

    Raises:
        UnsupportedModelError: the function is not supported.
    """
    match net.config.hidden_act:
        case "silu" | "swish":
            return net.op("Mul", x, net.op("Sigmoid", x))
        case "gelu":
            return net.op("Gelu", x)
        case "gelu_new" | "gelu_fast" | "gelu_pytorch_tanh":
            return net.op("Gelu", x, approximate="tanh")
        case "relu":
            return net.op("Relu", x)
        case name:
            known = "silu, swish, gelu, gelu_new, gelu_fast, gelu_pytorch_tanh, relu"
            raise UnsupportedModelError(f"activation '{name}' is not supported; supported: {known}")


def _scores(net: Decoder) -> dict[str, float]:
    """Return the attributes of ``Attention`` that change its scores."""
    cap = net.config.attention_softcap
    return {"scale": net.config.attention_scale, **({} if cap is None else {"softcap": cap})}


def _rotate(net: Decoder, layer: int, x: ir.Value, num_heads: int) -> ir.Value:
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


def _heads_of_groups(groups: int, size: int, part: slice) -> View:
    def view(array: Array) -> Array:
        by_group = array.reshape(groups, size, -1, *array.shape[1:])
        return by_group[:, part].reshape(-1, *array.shape[1:])

    return view


def _transposed(view: View) -> View:
    return lambda array: view(array).T


def _rows_transposed(part: slice) -> View:
    return lambda array: array[part].T


def _columns(part: slice) -> View:
    return lambda array: array[:, part]


def _elements(part: slice) -> View:
    return lambda array: array[part]

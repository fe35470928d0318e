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


def embedding(net: Decoder, name: str) -> ir.Value:
    """Look up token embeddings [batch, sequence, hidden]."""
    with net.scope(name):
        weight = net.weight("weight", net.config.vocab_size, net.config.hidden_size)
        return net.op("Gather", weight, net.input_ids)


def lm_head(net: Decoder, x: ir.Value, *, embedding_name: str, head_name: str = "lm_head") -> ir.Value:
    """Compute logits [batch, sequence, vocab]. A tied head uses the embedding's initializer, stored once."""
    c = net.config
    if not c.tie_word_embeddings:
        return softcap(net, linear(net, head_name, x, c.hidden_size, c.vocab_size), c.final_softcap)
    net.checkpoint.ignore(f"{head_name}.weight")  # some checkpoints hold it twice
    with net.scope(embedding_name):
        weight = net.weight("weight", c.vocab_size, c.hidden_size)
    with net.scope(head_name):
        rows = net.op("Reshape", x, net.ints(-1, c.hidden_size))
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
    net: Decoder, name: str, x: ir.Value, size: int | None = None, *, view: View | None = None
) -> ir.Value:
    """Write RMSNormalization (https://arxiv.org/abs/1910.07467) over the last axis."""
    with net.scope(name):
        weight = net.weight("weight", size or net.config.hidden_size, view=view)
        return net.op("RMSNormalization", x, weight, axis=-1, epsilon=net.config.norm_eps)


def layer_norm(net: Decoder, name: str, x: ir.Value) -> ir.Value:
    """Write LayerNormalization (https://arxiv.org/abs/1607.06450) over the last axis."""
    size = net.config.hidden_size
    with net.scope(name):
        weight, bias = net.weight("weight", size), net.weight("bias", size)
        return net.op("LayerNormalization", x, weight, bias, axis=-1, epsilon=net.config.norm_eps)


def scaled(net: Decoder, x: ir.Value, factor: float) -> ir.Value:
    """Return x * factor; x itself for a factor of 1."""
    return x if factor == 1 else net.op("Mul", x, net.constant(factor, np.float32, "scale"))


def plain_mlp(net: Decoder, names: tuple[str, str], x: ir.Value, *, bias: bool = True) -> ir.Value:
    """Write the feed-forward layer down(act(up(x))); ``names`` are those of up and down."""
    hidden, inner = net.config.hidden_size, net.config.intermediate_size
    with net.scope("mlp"):
        x = activation(net, linear(net, names[0], x, hidden, inner, bias=bias))
        return linear(net, names[1], x, inner, hidden, bias=bias)


def head_norm(net: Decoder, name: str, x: ir.Value, num_heads: int, *, view: View | None = None) -> ir.Value:
    """Apply ``rms_norm`` to each head of x [batch, sequence, heads * head_dim]."""
    size = net.config.head_dim
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


def attention(net: Decoder, layer: int, q: ir.Value, k: ir.Value, v: ir.Value) -> ir.Value:
    """Apply rotary embeddings to q and k if ``layer`` has them, append k and v to the cache, and attend.

    q is [batch, sequence, num_heads * head_dim]; k and v are [batch, sequence, num_kv_heads * head_dim]. The
    result has the shape of q.
    """
    c = net.config
    q, k = _rotate(net, layer, q, c.num_heads), _rotate(net, layer, k, c.num_kv_heads)
    cap = {} if c.attention_softcap is None else {"softcap": c.attention_softcap}
    out, key, value = net.ops(
        "Attention",
        *(q, k, v, net.mask(layer), *net.past[layer]),
        num_outputs=3,
        q_num_heads=c.num_heads,
        kv_num_heads=c.num_kv_heads,
        scale=c.attention_scale,
        **cap,
    )
    net.set_present(layer, key, value)
    return out


def gated_mlp(net: Decoder, layer: int, x: ir.Value) -> ir.Value:
    """Write the gated feed-forward layer down(act(gate(x)) * up(x)), https://arxiv.org/abs/2002.05202."""
    c = net.config
    with net.scope("mlp"):
        gate = linear(net, "gate_proj", x, c.hidden_size, c.intermediate_size, bias=c.mlp_bias)
        up = linear(net, "up_proj", x, c.hidden_size, c.intermediate_size, bias=c.mlp_bias)
        product = net.op("Mul", activation(net, gate), up)
        return linear(net, "down_proj", product, c.intermediate_size, c.hidden_size, bias=c.mlp_bias)


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


def _rotate(net: Decoder, layer: int, x: ir.Value, num_heads: int) -> ir.Value:
    config = net.config.ropes[layer]
    if config is None:
        return x
    partial = {} if config.rotary_dim == net.config.head_dim else {"rotary_embedding_dim": config.rotary_dim}
    return net.op("RotaryEmbedding", x, *net.rope(config), num_heads=num_heads, **partial)


def _rows_transposed(part: slice) -> View:
    return lambda array: array[part].T


def _columns(part: slice) -> View:
    return lambda array: array[:, part]


def _elements(part: slice) -> View:
    return lambda array: array[part]

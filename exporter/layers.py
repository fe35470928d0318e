"""The layers decoder families are made of, in the canonical forms of docs/architecture.md.

Names are relative to the scope they are called in, as in the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from ..runtime.errors import UnsupportedModelError
from .decoder import Decoder
from .weights import Array


def embedding(net: Decoder, name: str) -> ir.Value:
    """Token embeddings [batch, sequence, hidden]."""
    with net.scope(name):
        weight = net.weight("weight", net.config.vocab_size, net.config.hidden_size)
        return net.op("Gather", weight, net.input_ids)


def lm_head(net: Decoder, x: ir.Value, *, embedding_name: str, head_name: str = "lm_head") -> ir.Value:
    """Logits [batch, sequence, vocab]; a tied head reads the embedding's own weight, so that it is stored once."""
    config = net.config
    if not config.tie_word_embeddings:
        return softcap(
            net, linear(net, head_name, x, config.hidden_size, config.vocab_size), config.final_softcap
        )
    with net.scope(embedding_name):
        weight = net.weight("weight", config.vocab_size, config.hidden_size)
    with net.scope(head_name):
        rows = net.op("Reshape", x, net.ints(-1, config.hidden_size))
        logits = net.op("Gemm", rows, weight, transB=1)
        shape = net.op("Concat", net.op("Shape", net.input_ids), net.ints(config.vocab_size), axis=0)
        return softcap(net, net.op("Reshape", logits, shape), config.final_softcap)


def softcap(net: Decoder, x: ir.Value, cap: float | None) -> ir.Value:
    """cap * tanh(x / cap), where there is a cap."""
    if cap is None:
        return x
    limit = net.constant(cap, np.float32, "softcap")
    return net.op("Mul", net.op("Tanh", net.op("Div", x, limit)), limit)


def linear(
    net: Decoder, name: str, x: ir.Value, in_features: int, out_features: int, *, bias: bool = False
) -> ir.Value:
    """x @ W (+ b), W stored [out, in] as by torch.nn.Linear and written [in, out]."""
    with net.scope(name):
        y = net.op("MatMul", x, net.weight("weight", out_features, in_features, view=np.transpose))
        return net.op("Add", y, net.weight("bias", out_features)) if bias else y


def rms_norm(
    net: Decoder, name: str, x: ir.Value, size: int, *, view: Callable[[Array], Array] | None = None
) -> ir.Value:
    """Root mean square normalisation (https://arxiv.org/abs/1910.07467) over the last axis."""
    with net.scope(name):
        return net.op(
            "RMSNormalization", x, net.weight("weight", size, view=view), axis=-1, epsilon=net.config.norm_eps
        )


def head_norm(
    net: Decoder, name: str, x: ir.Value, num_heads: int, *, view: Callable[[Array], Array] | None = None
) -> ir.Value:
    """``rms_norm`` of each head of x [batch, sequence, heads * head_dim]."""
    size = net.config.head_dim
    with net.scope(name):
        heads = net.op("Reshape", x, net.ints(0, 0, num_heads, size))
    normed = rms_norm(net, name, heads, size, view=view)
    with net.scope(name):
        return net.op("Reshape", normed, net.ints(0, 0, num_heads * size))


def attention(net: Decoder, layer: int, q: ir.Value, k: ir.Value, v: ir.Value) -> ir.Value:
    """Rotate q and k where ``layer`` has a rope, append k and v to the cache, attend.

    Args:
        q: [batch, sequence, num_heads * head_dim].
        k: [batch, sequence, num_kv_heads * head_dim], like ``v``.
    """
    config = net.config
    rope = net.rope(layer)
    if rope is not None:
        q, k = (
            _rotate(net, layer, q, config.num_heads, rope),
            _rotate(net, layer, k, config.num_kv_heads, rope),
        )
    attributes = {
        "q_num_heads": config.num_heads,
        "kv_num_heads": config.num_kv_heads,
        "scale": config.attention_scale,
    }
    if config.attention_softcap is not None:
        attributes["softcap"] = config.attention_softcap
    out, key, value = net.ops(
        "Attention", q, k, v, net.mask(layer), *net.past[layer], num_outputs=3, **attributes
    )
    net.set_present(layer, key, value)
    return out


def gated_mlp(net: Decoder, name: str, x: ir.Value) -> ir.Value:
    """down(act(gate(x)) * up(x)), https://arxiv.org/abs/2002.05202."""
    config = net.config
    inner, outer, bias = config.intermediate_size, config.hidden_size, config.mlp_bias
    with net.scope(name):
        gate = activation(net, linear(net, "gate_proj", x, outer, inner, bias=bias))
        up = linear(net, "up_proj", x, outer, inner, bias=bias)
        return linear(net, "down_proj", net.op("Mul", gate, up), inner, outer, bias=bias)


def activation(net: Decoder, x: ir.Value) -> ir.Value:
    """The configuration's activation function.

    Raises:
        UnsupportedModelError: it is not known.
    """
    name = net.config.hidden_act
    if name in ("silu", "swish"):
        return net.op("Mul", x, net.op("Sigmoid", x))
    if name == "gelu":
        return net.op("Gelu", x)
    if name in ("gelu_new", "gelu_pytorch_tanh"):
        return net.op("Gelu", x, approximate="tanh")
    if name == "relu":
        return net.op("Relu", x)
    raise UnsupportedModelError(
        f"activation '{name}' is not supported; these are: silu, gelu, gelu_new, relu"
    )


def _rotate(
    net: Decoder, layer: int, x: ir.Value, num_heads: int, rope: tuple[ir.Value, ir.Value]
) -> ir.Value:
    config = net.config.ropes[layer]
    partial = {}
    if config is not None and config.rotary_dim != net.config.head_dim:
        partial = {"rotary_embedding_dim": config.rotary_dim}
    return net.op("RotaryEmbedding", x, *rope, num_heads=num_heads, **partial)

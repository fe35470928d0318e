"""Embedding, output head, and the two common orders of a decoder's layers."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import onnx_ir as ir

from ...errors import WeightWarning
from ..decoder import Decoder
from .elementwise import softcap
from .norms import rms_norm
from .projections import linear


def pre_norm_decoder(
    net: Decoder,
    *,
    attention: Callable[[Decoder, int, ir.Value], ir.Value],
    mlp: Callable[[Decoder, int, ir.Value], ir.Value],
    prefix: str = "model",
    head_name: str = "lm_head",
) -> ir.Value:
    """Write a pre-norm decoder, as in Llama: per layer, x += attention(norm(x)); x += mlp(norm(x)).

    ``prefix`` and ``head_name`` are the checkpoint's names of the decoder and of its head.

    Returns:
        Logits [batch, sequence, vocab].
    """
    net.checkpoint.ignore("rotary_emb.inv_freq")  # stored by old versions of transformers
    x = embedding(net, f"{prefix}.embed_tokens", head_name=head_name)
    for layer in range(net.config.num_layers):
        with net.scope(f"{prefix}.layers.{layer}"):
            x = pre_norm_layer(net, layer, x, attention=attention, mlp=mlp)
            net.end_layer(layer, x)
    x = rms_norm(net, f"{prefix}.norm", x)
    return lm_head(net, x, embedding_name=f"{prefix}.embed_tokens", head_name=head_name)


def pre_norm_layer(
    net: Decoder,
    layer: int,
    x: ir.Value,
    *,
    attention: Callable[[Decoder, int, ir.Value], ir.Value],
    mlp: Callable[[Decoder, int, ir.Value], ir.Value],
) -> ir.Value:
    """Write a layer of ``pre_norm_decoder`` in the current scope."""
    x = net.op("Add", x, attention(net, layer, rms_norm(net, "input_layernorm", x)))
    return net.op("Add", x, mlp(net, layer, rms_norm(net, "post_attention_layernorm", x)))


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


def embedding(net: Decoder, name: str, width: int | None = None, *, head_name: str = "lm_head") -> ir.Value:
    """Look up token embeddings [batch, sequence, width]; the width is by default the hidden size.

    A checkpoint may hold the matrix that a tied head shares under the name of either.
    """
    if net.config.tie_word_embeddings:
        net.checkpoint.replace_missing(f"{name}.weight", f"{head_name}.weight")
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

    A tied head uses the embedding's initializer, stored once. Where a checkpoint holds a head that differs,
    its configuration is wrong, and the head is its own, as in transformers 5.
    """
    c = net.config
    width = width or c.hidden_size
    matrix, head = f"{embedding_name}.weight", f"{head_name}.weight"
    differs = c.tie_word_embeddings and net.checkpoint.differ(matrix, head)
    if differs:
        warnings.warn(
            f"the configuration ties '{head}' to '{matrix}', but the two differ: both are used",
            WeightWarning,
            2,
        )
    if not c.tie_word_embeddings or differs:
        return softcap(net, linear(net, head_name, x, width, c.vocab_size), c.final_softcap)
    net.checkpoint.ignore(head)  # some checkpoints hold it twice
    with net.scope(embedding_name):
        weight = net.weight("weight", c.vocab_size, width)
    with net.scope(head_name):
        rows = net.op("Reshape", x, net.ints(-1, width))
        logits = net.op("Gemm", rows, weight, transB=1)
        shape = net.op("Concat", net.op("Shape", net.input_ids), net.ints(c.vocab_size), axis=0)
        return softcap(net, net.op("Reshape", logits, shape), c.final_softcap)

"""Heads that predict the token behind the next one from the last hidden state (multi-token prediction).

For position i they read the hidden state of token i and the embedding of token i + 1, and predict token i + 2
(DeepSeek-V3, https://arxiv.org/abs/2412.19437). Embedding and output head are the decoder's.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from ...contract import HIDDEN_STATES
from ...records import dataclass
from ..decoder import Decoder
from .decoders import embedding, lm_head
from .elementwise import softcap
from .projections import linear, selected_linear

FREQUENT_TOKENS = 65_536
_HEAD = "lm_head"


@dataclass(frozen=True, slots=True)
class HeadNames:
    """Names of a head's modules in the checkpoint.

    Args:
        module: the module of all others.
        embedding_norm: of the embedding of the next token.
        hidden_norm: of the hidden state.
        projection: of both, one behind the other.
        layer: the module of a layer, with ``{}`` for its number.
        norm: of the last layer's output.
    """

    module: str = "mtp"
    embedding_norm: str = "pre_fc_norm_embedding"
    hidden_norm: str = "pre_fc_norm_hidden"
    projection: str = "fc"
    layer: str = "layers.{}."
    norm: str = "norm"


MTP = HeadNames()  # Qwen 3 Next and later


def nextn_names(layer: int) -> HeadNames:
    """Return the names of DeepSeek-V3 and GLM 4.5, where the head is a layer behind the decoder's."""
    return HeadNames(f"model.layers.{layer}", "enorm", "hnorm", "eh_proj", "", "shared_head.norm")


def draft_head(
    net: Decoder,
    names: HeadNames,
    *,
    norm: Callable[[Decoder, str, ir.Value], ir.Value],
    layer: Callable[[Decoder, int, ir.Value], ir.Value],
    embedding_name: str = "model.embed_tokens",
) -> ir.Value:
    """Write a head; the graph has the input ``hidden_states`` beside ``input_ids``, the tokens behind them.

    Args:
        net: the graph, whose configuration has the head's layers only.
        names: the head's modules.
        norm: writes a norm.
        layer: writes a layer in the current scope.
        embedding_name: the checkpoint's name of the decoder's embedding.

    Returns:
        Logits [batch, sequence, tokens], see ``drafted_tokens``.
    """
    size = net.config.hidden_size
    states = net.input(HIDDEN_STATES, ir.DataType.FLOAT, ("batch", "sequence", size))
    embedded = embedding(net, embedding_name)
    with net.scope(names.module):
        normed = norm(net, names.embedding_norm, embedded), norm(net, names.hidden_norm, states)
        x = linear(net, names.projection, net.op("Concat", *normed, axis=-1), 2 * size, size)
    for number in range(net.config.num_layers):
        with net.scope(f"{names.module}.{names.layer.format(number)}".removesuffix(".")):
            x = layer(net, number, x)
    with net.scope(names.module):
        x = norm(net, names.norm, x)
    return _frequent_logits(net, x, embedding_name)


def drafted_tokens(vocab_size: int) -> int:
    """Return from how many tokens of a vocabulary, its first ones, a head chooses."""
    return min(vocab_size, FREQUENT_TOKENS)


def _frequent_logits(net: Decoder, x: ir.Value, embedding_name: str) -> ir.Value:
    """Return the logits of the first tokens of a large vocabulary, whose product would cost most of the head.

    Tokenizers number tokens in the order of their merges, so the first ones are the frequent ones (FR-Spec,
    https://arxiv.org/abs/2502.14856, which counts them in a text). Others are never proposed.
    """
    c = net.config
    count = drafted_tokens(c.vocab_size)
    if count == c.vocab_size:
        return lm_head(net, x, embedding_name=embedding_name)
    tied = c.tie_word_embeddings and not net.checkpoint.differ(f"{embedding_name}.weight", f"{_HEAD}.weight")
    stored = embedding_name if tied else _HEAD
    logits = selected_linear(net, stored, _HEAD, x, (c.vocab_size, c.hidden_size), lambda rows: rows[:count])
    return softcap(net, logits, c.final_softcap)

"""Decoders that attend to a picture: TrOCR (https://arxiv.org/abs/2109.10282) and mBART, which Donut has.

Donut: https://arxiv.org/abs/2111.15664. The model type names no architecture; its ``encoder`` and ``decoder``
do. Encoders are in ``vision/``, each under its own model type.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ...errors import CheckpointError, UnsupportedModelError
from ...records import dataclass
from .. import layers
from ..config import DecoderConfig, RawConfig, decoder_config, integer, mapping, with_defaults
from ..decoder import Decoder
from .opt import OFFSET

# The defaults of transformers, by kind.
_DECODERS: Mapping[str, RawConfig] = {
    "trocr": {
        "vocab_size": 50265,
        "d_model": 1024,
        "decoder_layers": 12,
        "decoder_attention_heads": 16,
        "decoder_ffn_dim": 4096,
        "activation_function": "gelu",
        "max_position_embeddings": 512,
        "scale_embedding": False,
        "use_learned_position_embeddings": True,
        "layernorm_embedding": True,
        "pad_token_id": 1,
        "decoder_start_token_id": 2,
        "tie_word_embeddings": True,
    },
    "mbart": {
        "vocab_size": 50265,
        "d_model": 1024,
        "decoder_layers": 12,
        "decoder_attention_heads": 16,
        "decoder_ffn_dim": 4096,
        "activation_function": "gelu",
        "max_position_embeddings": 1024,
        "scale_embedding": False,
        "tie_word_embeddings": True,
    },
}
# What has no option, by kind.
_ALWAYS: Mapping[str, RawConfig] = {
    "trocr": {},
    "mbart": {"use_learned_position_embeddings": True, "layernorm_embedding": True},
}
_HEADS = {"trocr": "decoder.output_projection", "mbart": "decoder.lm_head"}
_NORM_FIRST = ("mbart",)  # in front of each part and behind the last layer, not behind each part
_VIT: RawConfig = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "image_size": 224,
    "patch_size": 16,
    "qkv_bias": True,
}
_ENCODERS: Mapping[str, RawConfig] = {
    "vit": _VIT,
    "deit": _VIT,
    "donut-swin": {
        "embed_dim": 96,
        "depths": [2, 2, 6, 2],
        "num_heads": [3, 6, 12, 24],
        "window_size": 7,
        "mlp_ratio": 4.0,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-5,
        "image_size": 224,
        "patch_size": 4,
        "qkv_bias": True,
    },
}
# The tokens in front of those of the patches: of the class, and in DeiT of distillation.
TOKENS = {"vit": ("cls_token",), "deit": ("cls_token", "distillation_token")}
_PREFIX = "decoder.model.decoder"


@dataclass(frozen=True, slots=True)
class SwinStage:
    """A stage of a Swin Transformer.

    Args:
        height: rows of states.
        width: states of a row.
        hidden: elements of a state.
        heads: of attention.
        depth: number of layers.
    """

    height: int
    width: int
    hidden: int
    heads: int
    depth: int


def bart_config(decoder: RawConfig) -> DecoderConfig:
    """Normalise BART's names of a decoder's sizes, which its relatives have too."""
    width, num_layers = integer(decoder, "d_model"), integer(decoder, "decoder_layers")
    renamed = {
        "hidden_size": width,
        "intermediate_size": decoder["decoder_ffn_dim"],
        "num_hidden_layers": num_layers,
        "num_attention_heads": decoder["decoder_attention_heads"],
        "num_key_value_heads": decoder["decoder_attention_heads"],
        "head_dim": None,
        "hidden_act": decoder["activation_function"],
        "rms_norm_eps": 1e-5,
    }
    return decoder_config({**decoder, **renamed}, ropes=[None] * num_layers)


def config(raw: RawConfig) -> DecoderConfig:
    """Normalise config.json."""
    decoder = decoder_part(raw)
    normalised = bart_config(decoder)
    return dataclasses.replace(
        normalised,
        norm_first=decoder["model_type"] in _NORM_FIRST,
        encoder_width=rows_width(raw),
        encoder_rows=_num_rows(encoder_part(raw)),
        embedding_scale=normalised.hidden_size**0.5 if decoder["scale_embedding"] else 1.0,
        embedding_norm=bool(decoder["layernorm_embedding"]),
        sinusoid_start=None if decoder["use_learned_position_embeddings"] else _first_sinusoid(decoder),
    )


def decoder_part(raw: RawConfig) -> RawConfig:
    """Return the decoder's part of config.json, complete.

    Raises:
        UnsupportedModelError: the kind of decoder is not supported.
    """
    return _part(raw, "decoder", _DECODERS, _ALWAYS)


def encoder_part(raw: RawConfig) -> RawConfig:
    """Return the encoder's part of config.json, complete.

    Raises:
        UnsupportedModelError: the kind of encoder is not supported.
    """
    return _part(raw, "encoder", _ENCODERS, {})


def stages(encoder: RawConfig) -> list[SwinStage]:
    """Return the stages of a Swin Transformer; each joins squares of four states of the one before.

    Raises:
        CheckpointError: a size is missing or wrong.
    """
    sizes, patches = pair(encoder, "image_size"), pair(encoder, "patch_size")
    height, width = (-(-size // max(1, patch)) for size, patch in zip(sizes, patches, strict=True))
    depths, heads = (encoder[name] for name in ("depths", "num_heads"))
    hidden, every = integer(encoder, "embed_dim"), []
    for depth, count in zip(depths, heads, strict=True):
        every.append(SwinStage(height, width, hidden, count, depth))
        height, width, hidden = -(-height // 2), -(-width // 2), 2 * hidden
    if not every or not all(each.heads > 0 and each.hidden % each.heads == 0 for each in every):
        raise CheckpointError("config.json: 'num_heads' of the encoder must divide the width of each stage")
    return every


def pair(encoder: RawConfig, key: str) -> tuple[int, int]:
    """Return a height and a width, which config.json gives as a list, or as a number for both.

    Raises:
        CheckpointError: it is neither.
    """
    value = encoder[key]
    sizes = value if isinstance(value, list) and len(value) == 2 else [value, value]
    height, width = (integer({key: size}, key) for size in sizes)
    return height, width


def rows_width(raw: RawConfig) -> int:
    """Return the width of the rows to which the decoder attends."""
    decoder = decoder_part(raw)
    return integer(decoder, "cross_attention_hidden_size", integer(decoder, "d_model"))


def build(net: Decoder) -> ir.Value:
    """Write the decoder and return its logits."""
    net.checkpoint.ignore("encoder.", "enc_to_dec_proj.", "embed_positions._float_tensor")
    return cross_decoder(net, _PREFIX, f"{_PREFIX}.embed_tokens", _HEADS[net.config.model_type])


def cross_decoder(net: Decoder, prefix: str, embedding: str, head: str) -> ir.Value:
    """Write a decoder of BART's descendants and return its logits.

    Args:
        net: the graph to write into.
        prefix: the name of the decoder in the checkpoint.
        embedding: that of the embedding.
        head: that of the head.
    """
    c = net.config
    x = layers.scaled(net, layers.embedding(net, embedding), c.embedding_scale)
    with net.scope(f"{prefix}.embed_positions"):
        x = net.op("Add", x, _positions(net))
    if c.embedding_norm:
        x = layers.layer_norm(net, f"{prefix}.layernorm_embedding", x)
    for layer in range(c.num_layers):
        with net.scope(f"{prefix}.layers.{layer}"):
            x = layers.cross_decoder_layer(net, layer, x)
    if c.norm_first:
        x = layers.layer_norm(net, f"{prefix}.layer_norm", x)
    return layers.lm_head(net, x, embedding_name=embedding, head_name=head)


def _positions(net: Decoder) -> ir.Value:
    """Return what is added to the embeddings for the places of tokens, [batch, sequence, hidden]."""
    c = net.config
    first = OFFSET if c.sinusoid_start is None else 0
    if c.sinusoid_start is None:
        table = net.weight("weight", c.max_position_embeddings + first, c.hidden_size)
    else:
        places = np.arange(c.sinusoid_start, c.sinusoid_start + c.max_position_embeddings)
        table = net.constant(_sinusoids(places, c.hidden_size), np.float32, "sinusoids")
    rows = net.op("Add", net.position_ids, net.constant(first, np.int64, "offset")) if first else None
    return net.op("Gather", table, net.position_ids if rows is None else rows)


def _sinusoids(places: npt.NDArray[np.int64], width: int) -> npt.NDArray[np.float32]:
    """Return sines and behind them cosines of places, [places, width].

    As in https://github.com/tensorflow/tensor2tensor, and rounded to float32 after each step.
    """
    half = width // 2
    step = np.float32(-math.log(10_000) / (half - 1))
    angles = places.astype(np.float32)[:, None] * np.exp(np.arange(half, dtype=np.float32) * step)
    table = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
    return np.pad(table, ((0, 0), (0, width % 2)))


def _first_sinusoid(decoder: RawConfig) -> int:
    """Return the place of the first token: those of transformers begin behind the number of padding.

    Raises:
        UnsupportedModelError: a text would begin with padding, which has no place; or states are too narrow.
    """
    padding = integer(decoder, "pad_token_id")
    if padding == decoder["decoder_start_token_id"] or integer(decoder, "d_model") < 4:
        raise UnsupportedModelError(
            "TrOCR with sinusoidal positions needs a 'd_model' of at least 4, and a 'decoder_start_token_id' "
            "that is not its 'pad_token_id'"
        )
    return padding + 1


def _num_rows(encoder: RawConfig) -> int:
    """Return the number of rows that an encoder makes of a picture."""
    if encoder["model_type"] not in TOKENS:
        last = stages(encoder)[-1]
        return last.height * last.width
    side = integer(encoder, "image_size") // max(1, integer(encoder, "patch_size"))
    return side**2 + len(TOKENS[encoder["model_type"]])


def _part(
    raw: RawConfig, name: str, defaults: Mapping[str, RawConfig], always: Mapping[str, RawConfig]
) -> RawConfig:
    part = mapping(raw, name)
    kind = str(part.get("model_type"))
    if kind not in defaults:
        raise UnsupportedModelError(
            f"a 'vision-encoder-decoder' with the {name} '{kind}' is not supported; "
            f"supported: {', '.join(defaults)}"
        )
    return {**with_defaults(part, defaults[kind]), **always.get(kind, {})}

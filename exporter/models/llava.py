"""LLaVA 1.5 (https://arxiv.org/abs/2310.03744): its text decoder, see ``vision/llava.py``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import onnx_ir as ir

from ...errors import UnsupportedModelError
from .. import layers
from ..config import DecoderConfig, RawConfig, text_config, with_defaults
from ..decoder import Decoder
from . import llama, mistral, qwen2, qwen3


class _Family(NamedTuple):
    config: Callable[[RawConfig], DecoderConfig]
    attention: Callable[[Decoder, int, ir.Value], ir.Value]
    defaults: RawConfig  # transformers' own: published files leave out the sizes that equal them


_LLAMA: RawConfig = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
}
_FAMILIES: Mapping[str, _Family] = {
    "llama": _Family(llama.config, llama.attention, _LLAMA),
    "mistral": _Family(
        mistral.config,
        llama.attention,
        {**_LLAMA, "intermediate_size": 14_336, "max_position_embeddings": 131_072},
    ),
    "qwen2": _Family(qwen2.config, qwen2.attention, {}),
    "qwen3": _Family(qwen3.config, qwen3.attention, {}),
}
_OLD = "language_model.model"  # the prefix of the decoder in published checkpoints


def config(raw: RawConfig) -> DecoderConfig:
    """Normalise config.json, whose ``text_config`` describes a decoder of one of several families."""
    text = decoder_part(raw)
    return _FAMILIES[text["model_type"]].config(text)


def decoder_part(raw: RawConfig) -> RawConfig:
    """Return the decoder's part of config.json, with the sizes that published files leave out.

    Raises:
        UnsupportedModelError: the decoder's family is not supported.
    """
    text = text_config(raw, "llama")
    kind = text["model_type"]
    if kind not in _FAMILIES:
        raise UnsupportedModelError(
            f"'{raw['model_type']}' with the decoder '{kind}' is not supported; supported: "
            f"{', '.join(_FAMILIES)}"
        )
    inner = raw["text_config"].get("tie_word_embeddings")
    tied = bool(raw.get("tie_word_embeddings")) or bool(inner)
    return {**with_defaults(text, _FAMILIES[kind].defaults), "tie_word_embeddings": tied}


def build(net: Decoder) -> ir.Value:
    """Write the decoder and return its logits."""
    net.checkpoint.ignore("vision_tower.", "multi_modal_projector.", "image_newline")
    # transformers 4 wrote the first prefix, transformers 5 writes the second.
    old = f"{_OLD}.embed_tokens.weight" in net.checkpoint
    return layers.pre_norm_decoder(
        net,
        attention=_FAMILIES[net.config.model_type].attention,
        mlp=layers.gated_mlp,
        prefix=_OLD if old else "model.language_model",
        head_name="language_model.lm_head" if old else "lm_head",
    )

"""Export the heads of a checkpoint that predict further tokens, as a graph beside the decoder's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx_ir as ir

from ..contract import CONTEXT_LENGTH
from ..storage.stored_tensor import StoredTensor
from .config import DecoderConfig, RawConfig, context_lengths
from .decoder import Decoder
from .family import family, normalised_config
from .layers.draft_heads import drafted_tokens
from .safetensors_files import safetensors_of
from .weights import Checkpoint


def draft_head_model(
    source: Path,
    raw: RawConfig,
    tensors: Mapping[str, StoredTensor] | None = None,
    folder: Path | None = None,
) -> ir.Model | None:
    """Build the graph of a checkpoint's head, with lazily read weights; None if it has none.

    Args:
        source: the checkpoint folder.
        raw: the content of its config.json.
        tensors: the tensors by name, if they are not in the folder's safetensors files.
        folder: a folder with the head's tensors, if they are not among these.

    Raises:
        UnsupportedModelError: see ``export_model``.
        CheckpointError: a weight is missing or does not match the configuration.
    """
    tensors = safetensors_of(source) if tensors is None else tensors
    if folder is not None:
        tensors = {**tensors, **safetensors_of(folder)}
    module: Any = family(raw["model_type"])
    config, checkpoint = normalised_config(raw), Checkpoint(source, tensors)
    count = _layers(checkpoint, config)
    if not count or not hasattr(module, "draft_head"):
        return None
    net = Decoder(_head_config(config, count), checkpoint)
    model = net.finish(module.draft_head(net), drafted_tokens(config.vocab_size))
    model.metadata_props[CONTEXT_LENGTH] = str(context_lengths(raw)[1])
    return model


def _layers(checkpoint: Checkpoint, config: DecoderConfig) -> int:
    """Return how many layers the head has; 0 if there is none. Of several heads only the first is used.

    Its layers are like the decoder's last one with attention, so a decoder without any has no head.
    """
    if not any(config.has_attention(layer) for layer in range(config.num_layers)):
        return 0
    if config.unused_layers and f"model.layers.{config.num_layers}.eh_proj.weight" in checkpoint:
        return 1
    return checkpoint.layer_counts().get("mtp.layers", 0)


def _head_config(config: DecoderConfig, count: int) -> DecoderConfig:
    """Return the configuration of layers like the decoder's last one with attention, without others."""
    last = max(layer for layer in range(config.num_layers) if config.has_attention(layer))
    return replace(
        config,
        num_layers=count,
        unused_layers=config.num_layers,
        windows=(config.windows[last],) * count,
        ropes=(config.ropes[last],) * count,
        experts=(config.experts[last],) * count,
        key_values=tuple(
            replace(config.key_values[last], owner=layer)
            for layer in range(count if config.key_values else 0)
        ),
        mlp_widths=(config.mlp_widths[last],) * count if config.mlp_widths else (),
        states=(),
        attends=(),
        rope_axes=(),
        deep_states=0,
    )

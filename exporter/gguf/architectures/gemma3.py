"""Gemma 3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ....errors import UnsupportedModelError
from ..architecture import Architecture, Tensors, stated
from . import gemma2


def _adapt(config: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    """Return the scale of attention; without a window every layer sees the whole context by the same rope.

    Raises:
        UnsupportedModelError: scores of attention have a cap: llama.cpp has none for this architecture.
    """
    if cap := config.get("attn_logit_softcapping"):
        raise UnsupportedModelError(
            f"the GGUF file has gemma3.attn_logit_softcapping = {cap}, and Gemma 3's scores have no cap"
        )
    scale = gemma2.scale(config, tensors)
    if config.get("sliding_window"):
        return scale
    count = stated(config, "num_hidden_layers")
    return {**scale, "sliding_window": None, "layer_types": ["full_attention"] * count}


NAME = "gemma3"
ARCHITECTURE = Architecture(
    model_type="gemma3_text",
    inner=gemma2.NAMES,
    norm_offset=1.0,
    keys={"rope.freq_base_swa": "rope_local_base_freq"},
    adapt=_adapt,
)

"""Qwen2-VL: a tower for pictures of any size with a 2-D rope, and a merger of squares of patches.

Pixels that files do not limit are those of the published checkpoints.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ....errors import CheckpointError
from ..architecture import Join, Tensors
from ..tower import Projector, count

_TOWER, _FRAMES = "visual", 2
_LEAST_PIXELS, _MOST_PIXELS = 56 * 56, 14 * 14 * 4 * 16384
OUTER = {
    "v.patch_embd.weight": f"{_TOWER}.patch_embed.proj.weight",
    "v.patch_embd.weight.1": f"{_TOWER}.patch_embed.proj.weight.1",
    "v.post_ln": f"{_TOWER}.merger.ln_q",
    "mm.0": f"{_TOWER}.merger.mlp.0",
    "mm.2": f"{_TOWER}.merger.mlp.2",
}
LAYERS = f"{_TOWER}.blocks"
ATTENTION = {
    "ln1": "norm1",
    "ln2": "norm2",
    "attn_q": "attn.q",
    "attn_k": "attn.k",
    "attn_v": "attn.v",
    "attn_out": "attn.proj",
}
TOKENS = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"}
UNUSED = ("v.position_embd.weight",)
KEYS = ("spatial_merge_size", "image_min_pixels", "image_max_pixels")
JOINED = {
    # A convolution over two frames is stored as one for each.
    "patch_embed.proj.weight": Join(
        parts=("patch_embed.proj.weight", "patch_embed.proj.weight.1"),
        shape=lambda *shapes: (*shapes[0][:2], len(shapes), *shapes[0][2:]),
        make=lambda *frames: np.stack(frames, axis=2),
    ),
    **{
        f"attn.qkv.{kind}": Join(
            parts=(f"attn.q.{kind}", f"attn.k.{kind}", f"attn.v.{kind}"),
            shape=lambda *shapes: (sum(shape[0] for shape in shapes), *shapes[0][1:]),
            make=lambda *parts: np.concatenate(parts),
        )
        for kind in ("weight", "bias")
    },
}


def sizes(vision: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of ``vision_config`` that both families have."""
    return {
        "depth": vision["block_count"],
        "num_heads": vision["attention.head_count"],
        "patch_size": vision["patch_size"],
        "spatial_merge_size": count(vision, "spatial_merge_size", 2),
        "temporal_patch_size": _FRAMES,
    }


def text_config(text: dict[str, Any]) -> dict[str, Any]:
    """Return the decoder's part of config.json, with the axes of its rope.

    Raises:
        CheckpointError: the decoder's file does not state them.
    """
    sections = text.get("mrope_section")
    if not isinstance(sections, list) or len(sections) < 3:
        raise CheckpointError("the GGUF file does not state 'qwen2vl.rope.dimension_sections', three numbers")
    return {**text, "rope_scaling": {**text.get("rope_scaling", {}), "mrope_section": sections[:3]}}


def _config(vision: dict[str, Any], tensors: Tensors, text: dict[str, Any]) -> dict[str, Any]:
    # ``feed_forward_length`` holds the width of the decoder.
    width, inner = vision["embedding_length"], tensors[f"{LAYERS}.0.mlp.fc1.weight"].shape[0]
    tower = {
        "embed_dim": width,
        "hidden_size": vision["projection_dim"],
        "mlp_ratio": inner / width,
        "hidden_act": "quick_gelu",
    }
    return {"text_config": text_config(text), "vision_config": {**sizes(vision), **tower}}


def preprocessor(vision: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of preprocessor_config.json but mean and deviation."""
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        "min_pixels": count(vision, "image_min_pixels", _LEAST_PIXELS),
        "max_pixels": count(vision, "image_max_pixels", _MOST_PIXELS),
        "patch_size": vision["patch_size"],
        "merge_size": count(vision, "spatial_merge_size", 2),
        "temporal_patch_size": _FRAMES,
    }


NAME = "qwen2vl_merger"
PROJECTOR = Projector(
    model_type="qwen2_vl",
    decoders=("qwen2vl",),
    layers=LAYERS,
    inner={**ATTENTION, "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
    outer=OUTER,
    unused=UNUSED,
    joined=JOINED,
    keys=KEYS,
    tokens=TOKENS,
    config=_config,
    preprocessor=preprocessor,
)

"""``vision.onnx`` of SigLIP (https://arxiv.org/abs/2303.15343): the vector of a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx_ir as ir

from ...contract import IMAGE_STATES
from ...errors import UnsupportedModelError
from ..config import RawConfig, integer, mapping, with_defaults
from ..encoders.pre_norm import mlp
from ..encoders.tower import Tower, tower_config
from ..image_processor import HALF, TileProcessor, check_processor, levels
from ..weights import Checkpoint
from .llava import tower_states

VISION: RawConfig = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 224,
    "patch_size": 16,
    "layer_norm_eps": 1e-6,
    "hidden_act": "gelu_pytorch_tanh",
    "vision_use_head": True,
}

Processor = TileProcessor


def image_processor(content: Mapping[str, Any], folder: Path, raw: RawConfig) -> Processor:
    """Return the processor of a checkpoint; see ``exporter.image_processor.image_processor``."""
    check_processor(content, ("SiglipImageProcessor",))
    vision = with_defaults(mapping(raw, "vision_config"), VISION)
    edge, size = integer(vision, "image_size"), content.get("size", {"height": 224, "width": 224})
    if size != {"height": edge, "width": edge}:
        raise UnsupportedModelError(
            f"'size' {size!r} is not supported; supported: the tower's {edge} x {edge}"
        )
    return Processor(
        family="siglip",
        tile=edge,
        patch=integer(vision, "patch_size"),
        merge=1,
        **levels(content, 3, HALF, HALF),
    )


def vision_model(raw: RawConfig, checkpoint: Checkpoint) -> ir.Model:
    """Build the graph, with lazily read weights; see ``encoders/tower.py``.

    Its output is the vectors of pictures, float32 [pictures, hidden]; ``merged_patches`` holds all patches of
    each.

    Raises:
        CheckpointError: the configuration or a weight is damaged or missing.
        UnsupportedModelError: an option is not supported.
    """
    vision = with_defaults(mapping(raw, "vision_config"), VISION)
    net = Tower(tower_config(raw, vision), checkpoint, (3, *[integer(vision, "patch_size")] * 2))
    with net.scope("vision_model"):
        return pooled(net, vision, tower_states(net, vision, class_token=False))


def pooled(net: Tower, vision: RawConfig, x: ir.Value) -> ir.Model:
    """Write the norm and the head, in which a learned query attends to all patches of a picture.

    Args:
        net: the graph, in the scope of the tower.
        vision: ``vision_config``, complete.
        x: the states of all patches.

    Raises:
        UnsupportedModelError: the tower has no head.
    """
    if vision["vision_use_head"] is not True:
        raise UnsupportedModelError("a tower without a head ('vision_use_head': false) is not supported")
    size, heads = net.config.hidden_size, net.config.num_heads
    x = net.layer_norm("post_layernorm", x)
    with net.scope("head"):
        probe = net.checkpoint.tensor(
            net.qualified("probe"), (1, 1, size), view=lambda array: array.reshape(1, size)
        )
        with net.scope("attention"):
            parts = {name: _part(net, place, size) for place, name in enumerate("qkv")}
            query = _projected(net, net.initializer(probe), parts["q"])
            patches = net.patches_of_tokens("patches_of_picture")
            of_picture = [
                net.op("Gather", _projected(net, x, parts[name]), patches, axis=0) for name in ("k", "v")
            ]
            pictures = net.op("Shape", of_picture[0], start=0, end=1)
            query = net.op(
                "Expand",
                net.op("Unsqueeze", query, net.ints(0)),
                net.op("Concat", pictures, net.ints(1, 1), axis=0),
            )
            attended = net.op("Attention", query, *of_picture, q_num_heads=heads, kv_num_heads=heads)
            flat = net.op("Squeeze", attended, net.ints(1))
            y = net.linear("out_proj", flat, size, size)
        y = net.op("Add", y, mlp(net, net.layer_norm("layernorm", y)))
    net.output(y, IMAGE_STATES, ir.DataType.FLOAT, ("tokens", size))
    return net.model()


def _part(net: Tower, place: int, size: int) -> tuple[ir.Value, ir.Value]:
    """Return the weight and the bias of queries, keys or values of ``torch.nn.MultiheadAttention``."""
    rows, values = slice(place * size, (place + 1) * size), []
    for kind, shape in (("weight", (3 * size, size)), ("bias", (3 * size,))):
        stored = net.qualified(f"in_proj_{kind}")
        tensor = net.checkpoint.tensor(
            stored, shape, view=lambda array: array[rows].T, new_name=f"{stored}.{'qkv'[place]}"
        )
        values.append(net.initializer(tensor))
    return values[0], values[1]


def _projected(net: Tower, x: ir.Value, part: tuple[ir.Value, ir.Value]) -> ir.Value:
    return net.op("Add", net.op("MatMul", x, part[0]), part[1])

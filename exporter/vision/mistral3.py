"""``vision.onnx`` of Mistral Small 3.1 and later: Pixtral's tower, a merger of squares, and two layers.

Source: https://arxiv.org/abs/2410.07073.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from ...contract import GROUP_ROWS, GROUPS, IMAGE_STATES
from ...errors import UnsupportedModelError
from ...records import dataclass
from ..config import RawConfig, integer, mapping, number
from ..encoders.tower import Groups, Tower, tower_config
from ..image_processor import (
    CLIP_MEAN,
    CLIP_STD,
    LOW_EDGE,
    ImageProcessor,
    check_processor,
    levels,
    token_text,
)
from ..weights import Array, Checkpoint

_EPSILON = 1e-5
_TOWER_SIZES: RawConfig = {  # defaults of transformers
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "hidden_act": "gelu",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Processor(ImageProcessor):
    """Pictures of any size up to a longest edge, in whole tokens.

    Args:
        longest_edge: pixels of the longest edge of a resized picture.
        rotary: elements of a head, which turn with the row and the column in turns.
        theta: base of the frequencies.
        ends: whether a token of text ends each row of tokens.
    """

    longest_edge: int
    rotary: int
    theta: float
    ends: bool

    def at_low_detail(self) -> Processor:
        return replace(self, longest_edge=min(self.longest_edge, LOW_EDGE))

    def check(self) -> None:
        ImageProcessor.check(self)
        self.check_sizes("longest_edge", "rotary")
        if self.rotary % 4 or not self.theta > 0:
            raise ValueError(f"'rotary' {self.rotary} must be a multiple of 4, and 'theta' positive")
        if self.ends:
            self.check_texts("break", "end")


def image_processor(content: Mapping[str, Any], folder: Path, raw: RawConfig) -> Processor:
    """Return the processor of a checkpoint; see ``exporter.image_processor.image_processor``."""
    check_processor(content, ("PixtralImageProcessor",))
    vision = mapping(raw, "vision_config")
    size = content.get("size", {"longest_edge": 1024})
    if not isinstance(size, dict) or size.keys() != {"longest_edge"}:
        raise UnsupportedModelError(f"'size' {size!r} is not supported; supported: 'longest_edge'")
    if content.get("do_center_crop"):
        raise UnsupportedModelError("'do_center_crop': true is not supported; supported: false")
    # transformers' processor takes patch and merge of its own file in place of those of this one.
    token = integer(raw, "image_token_id", integer(raw, "image_token_index", 10))
    heads = max(1, integer(vision, "num_attention_heads", 16))
    return Processor(
        family="mistral3",
        longest_edge=int(size["longest_edge"]),
        patch=integer(vision, "patch_size", 16),
        merge=integer(raw, "spatial_merge_size", 2),
        rotary=integer(vision, "head_dim", integer(vision, "hidden_size", 1024) // heads),
        theta=number(
            mapping(vision, "rope_parameters"), "rope_theta", number(vision, "rope_theta", 10_000.0)
        ),
        ends=True,
        image_token_id=token,
        texts={"image": token_text(folder, token), "break": "[IMG_BREAK]", "end": "[IMG_END]"},
        **levels(content, 3, CLIP_MEAN, CLIP_STD),
    )


def vision_model(raw: RawConfig, checkpoint: Checkpoint) -> ir.Model:
    """Build the graph, with lazily read weights; see ``encoders/tower.py``.

    Raises:
        CheckpointError: the configuration or a weight is damaged or missing.
        UnsupportedModelError: an option is not supported.
    """
    first = "" if checkpoint.has_prefix("vision_tower.") else "model."
    return tower_model(raw, checkpoint, (f"{first}vision_tower", f"{first}multi_modal_projector"))


def tower_model(
    raw: RawConfig, checkpoint: Checkpoint, names: tuple[str, str], *, merges: bool = True
) -> ir.Model:
    """Build the graph; see ``vision_model``.

    Args:
        raw: the content of config.json.
        checkpoint: the weights.
        names: of the tower and of its projector in the checkpoint.
        merges: whether squares of patches join into a token.

    Raises:
        CheckpointError: see ``vision_model``.
        UnsupportedModelError: see ``vision_model``.
    """
    vision, text = mapping(raw, "vision_config"), mapping(raw, "text_config")
    if (kind := vision.get("model_type", "pixtral")) != "pixtral":
        raise UnsupportedModelError(f"the tower '{kind}' is not supported; supported: pixtral")
    if (layer := raw.get("vision_feature_layer", -1)) != -1:
        raise UnsupportedModelError(f"'vision_feature_layer' {layer!r} is not supported; supported: -1")
    config = tower_config(raw, {**_TOWER_SIZES, **vision}, norm_eps=_EPSILON)
    patch, size = integer(vision, "patch_size", 16), config.hidden_size
    net = Tower(config, checkpoint, (3, patch, patch))
    groups = net.groups(GROUPS, GROUP_ROWS)
    with net.scope(names[0]):
        x = net.rms_norm("ln_pre", net.patch_embedding("patch_conv", bias=False))
        for layer in range(config.num_layers):
            with net.scope(f"transformer.layers.{layer}"):
                x = _layer(net, x, groups)
    width, bias = integer(text, "hidden_size"), bool(raw.get("multimodal_projector_bias", False))
    with net.scope(names[1]):
        if merges:
            x = net.rms_norm("norm", x, epsilon=number(text, "rms_norm_eps", 1e-6))
            x = _merged(net, x, integer(raw, "spatial_merge_size", 2) ** 2)
        else:
            x = net.merged(x, 1)
        x = net.activation(
            net.linear("linear_1", x, size, width, bias=bias), str(raw.get("projector_hidden_act", "gelu"))
        )
        states = net.linear("linear_2", x, width, width, bias=bias)
    net.output(states, IMAGE_STATES, ir.DataType.FLOAT, ("tokens", width))
    return net.model()


def _layer(net: Tower, x: ir.Value, groups: Groups) -> ir.Value:
    """Write one layer: x += attention(norm(x)); x += mlp(norm(x)); no layer has a bias."""
    size, inner = net.config.hidden_size, net.config.intermediate_size
    normed = net.rms_norm("attention_norm", x)
    with net.scope("attention"):
        q, k, v = (net.linear(f"{name}_proj", normed, size, size, bias=False) for name in "qkv")
        attended = net.attention(net.rotate(q), net.rotate(k), v, groups)
        x = net.op("Add", x, net.linear("o_proj", attended, size, size, bias=False))
    normed = net.rms_norm("ffn_norm", x)
    with net.scope("feed_forward"):
        gate = net.activation(net.linear("gate_proj", normed, size, inner, bias=False))
        inside = net.op("Mul", gate, net.linear("up_proj", normed, size, inner, bias=False))
        return net.op("Add", x, net.linear("down_proj", inside, inner, size, bias=False))


def _merged(net: Tower, x: ir.Value, k: int) -> ir.Value:
    """Write the merger [tokens, hidden]; the stored weight has the patches of each channel side by side."""
    size = net.config.hidden_size

    def view(array: Array) -> Array:
        return np.ascontiguousarray(array.reshape(size, size, k).transpose(2, 1, 0).reshape(k * size, size))

    with net.scope("patch_merger.merging_layer"):
        weight = net.checkpoint.tensor(net.qualified("weight"), (size, size * k), view=view)
        return net.op("MatMul", net.merged(x, k), net.initializer(weight))

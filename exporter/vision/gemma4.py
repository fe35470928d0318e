"""``vision.onnx`` of Gemma 4: a tower for pictures of any aspect ratio, and the means of squares of patches.

Its layers have norms before and behind each part and of each head, an axial rope, and linear layers that may
clip what goes in and out. Source: transformers 5.24, models/gemma4.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from ...contract import GROUP_ROWS, GROUPS, IMAGE_STATES, TABLE_ROWS
from ...errors import UnsupportedModelError
from ...records import dataclass
from ..config import RawConfig, integer, mapping, number, text_config, with_defaults
from ..encoders.tower import Groups, Tower, tower_config
from ..image_processor import ImageProcessor, check_processor, levels, token_text
from ..models import gemma4_text
from ..weights import Array, Checkpoint

_VISION: RawConfig = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 16,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "head_dim": 64,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "pooling_kernel_size": 3,
    "patch_size": 16,
    "position_embedding_size": 10_240,
    "use_clipped_linears": False,
    "standardize": False,
}
_THETA = 100.0
_TOKENS = {
    "image": ("image_token_id", 258_880),
    "start": ("boi_token_id", 255_999),
    "end": ("eoi_token_id", 258_882),
}
_BUDGETS = (70, 140, 280, 560, 1120)  # that transformers takes
_NOTHING, _ALL = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Processor(ImageProcessor):
    """Pictures of any aspect ratio in whole tokens, as large as a budget of tokens allows.

    Args:
        max_tokens: the most tokens of a picture.
        rotary: elements of a head, half of which turn with the column and half with the row.
        theta: base of the frequencies.
        positions: entries of each table of positions: of columns, then of rows.
    """

    max_tokens: int
    rotary: int
    theta: float
    positions: int

    def at_low_detail(self) -> Processor:
        return replace(self, max_tokens=min(self.max_tokens, _BUDGETS[0]))

    def check(self) -> None:
        ImageProcessor.check(self)
        self.check_sizes("max_tokens", "rotary", "positions")
        if self.rotary % 4 or not self.theta > 0:
            raise ValueError(f"'rotary' {self.rotary} must be a multiple of 4, and 'theta' positive")
        if self.max_tokens * self.merge > self.positions:
            raise ValueError(
                f"'max_tokens' {self.max_tokens} exceeds the table of {self.positions} positions"
            )
        self.check_texts("start", "end")


def image_processor(content: Mapping[str, Any], folder: Path, raw: RawConfig) -> Processor:
    """Return the processor of a checkpoint; see ``exporter.image_processor.image_processor``."""
    check_processor(content, ("Gemma4ImageProcessor",), ("do_resize", "do_rescale", "do_convert_rgb"))
    vision = _vision(raw)
    if content.get("do_normalize"):
        raise UnsupportedModelError("'do_normalize': true is not supported; supported: false")
    budget = int(content.get("max_soft_tokens", 280))
    if budget not in _BUDGETS:
        raise UnsupportedModelError(
            f"'max_soft_tokens' {budget} is not supported; supported: {', '.join(map(str, _BUDGETS))}"
        )
    ids = {name: integer(raw, key, default) for name, (key, default) in _TOKENS.items()}
    processor = Processor(
        family="gemma4",
        max_tokens=budget,
        patch=int(content.get("patch_size", 16)),
        merge=int(content.get("pooling_kernel_size", 3)),
        rotary=integer(vision, "head_dim"),
        theta=number(mapping(vision, "rope_parameters"), "rope_theta", _THETA),
        positions=integer(vision, "position_embedding_size"),
        image_token_id=ids["image"],
        texts={name: token_text(folder, token) for name, token in ids.items()},
        **{**levels(content, 3, _NOTHING, _ALL), "mean": _NOTHING, "std": _ALL},
    )
    wanted = [integer(vision, "patch_size"), integer(vision, "pooling_kernel_size")]
    if [processor.patch, processor.merge] != wanted:
        raise ValueError(f"its patches are not those of the tower: {wanted}")
    return processor


def vision_model(raw: RawConfig, checkpoint: Checkpoint) -> ir.Model:
    """Build the graph, with lazily read weights; see ``encoders/tower.py``.

    Patches are [height, width, channels].

    Raises:
        CheckpointError: the configuration or a weight is damaged or missing.
        UnsupportedModelError: an option is not supported.
    """
    vision = _vision(raw)
    config = tower_config(
        raw,
        vision,
        hidden_act=str(vision["hidden_activation"]),
        norm_eps=number(vision, "rms_norm_eps"),
        scale=1.0,
    )
    if (config.num_heads, config.head_dim) != (vision["num_key_value_heads"], vision["head_dim"]):
        raise UnsupportedModelError("a tower with shared keys, or wider heads, is not supported")
    patch, size = integer(vision, "patch_size"), config.hidden_size
    net = Tower(config, checkpoint, (patch, patch, 3))
    groups = net.groups(GROUPS, GROUP_ROWS)
    with net.scope("model.vision_tower"):
        x = _embeddings(net, vision)
        for layer in range(config.num_layers):
            with net.scope(f"encoder.layers.{layer}"):
                x = _layer(net, x, groups, vision)
        k = integer(vision, "pooling_kernel_size") ** 2
        squares = net.op("Reshape", net.merged(x, k), net.ints(-1, k, size))
        x = net.op("ReduceMean", squares, net.ints(1), keepdims=0)
        x = net.op("Mul", x, net.constant(math.sqrt(size), np.float32, "root_of_size"))
        if vision["standardize"]:
            x = net.op("Mul", net.op("Sub", x, net.weight("std_bias", size)), net.weight("std_scale", size))
    text = with_defaults(text_config(raw, "gemma4_text"), gemma4_text.DEFAULTS)
    width = integer(text, "hidden_size")
    with net.scope("model.embed_vision"):
        normed = _plain_norm(net, x, size)
        states = net.linear("embedding_projection", normed, size, width, bias=False)
    net.output(states, IMAGE_STATES, ir.DataType.FLOAT, ("tokens", width))
    return net.model()


def _vision(raw: RawConfig) -> RawConfig:
    """Return the tower's part of config.json, complete."""
    vision = mapping(raw, "vision_config")
    if (kind := vision.get("model_type", "gemma4_vision")) != "gemma4_vision":
        raise UnsupportedModelError(f"the tower '{kind}' is not supported; supported: gemma4_vision")
    rope = mapping(vision, "rope_parameters").get("rope_type", "axial")
    if rope not in ("axial", "default"):
        raise UnsupportedModelError(f"the tower's rope '{rope}' is not supported; supported: axial")
    return with_defaults(vision, _VISION)


def _embeddings(net: Tower, vision: RawConfig) -> ir.Value:
    """Write the states of patches, with the positions of their column and row."""
    size, count = net.config.hidden_size, integer(vision, "position_embedding_size")
    with net.scope("patch_embedder"):
        half, two = (net.constant(n, np.float32, name) for n, name in ((0.5, "half"), (2, "two")))
        pixels = net.op("Mul", net.op("Sub", net.pixels, half), two)
        x = net.linear("input_proj", pixels, math.prod(net.patch), size, bias=False)
        table = net.checkpoint.tensor(
            net.qualified("position_embedding_table"),
            (2, count, size),
            view=lambda array: array.reshape(-1, size),
        )
        rows = net.input(TABLE_ROWS, ir.DataType.INT64, ("patches", 2))
        places = net.op("Gather", net.initializer(table), rows, axis=0)
        return net.op("Add", x, net.op("ReduceSum", places, net.ints(1), keepdims=0))


def _layer(net: Tower, x: ir.Value, groups: Groups, vision: RawConfig) -> ir.Value:
    """Write one layer: x += norm(attention(norm(x))); x += norm(mlp(norm(x)))."""
    size, inner = net.config.hidden_size, net.config.intermediate_size
    clips = bool(vision["use_clipped_linears"])
    normed = net.rms_norm("input_layernorm", x)
    with net.scope("self_attn"):
        q, k = (_turned(net, name, normed, clips=clips) for name in ("q", "k"))
        v = _heads(net, _linear(net, "v_proj", normed, size, size, clips=clips), None)
        attended = net.attention(q, k, v, groups)
        attended = _linear(net, "o_proj", attended, size, size, clips=clips)
    x = net.op("Add", x, net.rms_norm("post_attention_layernorm", attended))
    normed = net.rms_norm("pre_feedforward_layernorm", x)
    with net.scope("mlp"):
        gate = net.activation(_linear(net, "gate_proj", normed, size, inner, clips=clips))
        inside = net.op("Mul", gate, _linear(net, "up_proj", normed, size, inner, clips=clips))
        y = _linear(net, "down_proj", inside, inner, size, clips=clips)
    return net.op("Add", x, net.rms_norm("post_feedforward_layernorm", y))


def _turned(net: Tower, name: str, x: ir.Value, *, clips: bool) -> ir.Value:
    """Write queries or keys: each head normed, then rotated.

    The rope turns elements i and i + size / 4 of each half of a head. Those of both halves are put side by
    side, so that it turns i and i + size / 2: an equal order of queries and keys changes no score.
    """
    c = net.config
    order = np.arange(c.head_dim).reshape(2, 2, -1).transpose(1, 0, 2).reshape(-1)
    rows = (np.arange(c.num_heads)[:, None] * c.head_dim + order).reshape(-1)
    y = _linear(net, f"{name}_proj", x, c.hidden_size, c.hidden_size, clips=clips, rows=rows)
    with net.scope(f"{name}_norm"):
        stored = net.checkpoint.tensor(
            net.qualified("weight"), (c.head_dim,), view=lambda array: array[order]
        )
        return net.rotate(_heads(net, y, net.initializer(stored)))


def _heads(net: Tower, x: ir.Value, weight: ir.Value | None) -> ir.Value:
    """Write the norm of each head of x [patches, heads * head_dim]; None for a norm without weights."""
    c = net.config
    heads = net.op("Reshape", x, net.ints(0, c.num_heads, c.head_dim))
    if weight is None:
        normed = _plain_norm(net, heads, c.head_dim)
    else:
        normed = net.op("RMSNormalization", heads, weight, axis=-1, epsilon=c.norm_eps)
    return net.op("Reshape", normed, net.ints(0, c.hidden_size))


def _plain_norm(net: Tower, x: ir.Value, size: int) -> ir.Value:
    ones = net.constant(np.ones(size), np.float32, f"ones_{size}")
    return net.op("RMSNormalization", x, ones, axis=-1, epsilon=net.config.norm_eps)


def _linear(
    net: Tower, name: str, x: ir.Value, size: int, out: int, *, clips: bool, rows: Array | None = None
) -> ir.Value:
    """Write a linear layer, whose input and output may be clipped; ``rows`` orders the output."""

    def view(array: Array) -> Array:
        return (array if rows is None else array[rows]).T

    with net.scope(name):
        if clips:
            x = net.op("Clip", x, net.weight("input_min"), net.weight("input_max"))
        stored = net.checkpoint.tensor(net.qualified("linear.weight"), (out, size), view=view)
        y = net.op("MatMul", x, net.initializer(stored))
        return net.op("Clip", y, net.weight("output_min"), net.weight("output_max")) if clips else y

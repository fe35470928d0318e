"""``vision.onnx`` and ``text_encoder.onnx`` of Florence-2 (https://arxiv.org/abs/2311.06242).

The tower is a DaViT. The encoder of a BART reads its states and behind them a text, and a decoder attends to
its rows. DaViT, https://arxiv.org/abs/2204.03645, attends within windows, and between channels. A picture has
one size and is one patch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnx_ir as ir

from ...contract import ENCODER_STATES, IMAGE_STATES, INPUT_IDS
from ...errors import CheckpointError, UnsupportedModelError
from ...records import dataclass
from ..config import RawConfig, integer, mapping, number, read_json, with_defaults
from ..encoders.encoder import EncoderConfig, EncoderLayers
from ..encoders.tower import Tower, tower_config
from ..encoders.windows import Windows
from ..image_processor import (
    CLIP_MEAN,
    CLIP_STD,
    PROCESSOR_FILE,
    ImageProcessor,
    TextUse,
    check_processor,
    levels,
    named_tokens,
)
from ..image_processor import image_processor as read_checkpoint_processor
from ..models.florence2 import LANGUAGE, embedding_scale, text_part
from ..models.opt import OFFSET
from ..weights import Checkpoint

_VISION: RawConfig = {
    "depths": [1, 1, 9, 1],
    "patch_size": [7, 3, 3, 3],
    "patch_stride": [4, 2, 2, 2],
    "patch_padding": [3, 1, 1, 1],
    "patch_prenorm": [False, True, True, True],
    "embed_dim": [128, 256, 512, 1024],
    "num_heads": [4, 8, 16, 32],
    "num_groups": [4, 8, 16, 32],
    "window_size": 12,
    "mlp_ratio": 4.0,
    "qkv_bias": True,
    "activation_function": "gelu",
    "projection_dim": 1024,
    "max_position_embeddings": 50,
}
_LISTS = ("depths", "patch_size", "patch_stride", "patch_padding", "embed_dim", "num_heads", "num_groups")
_EPSILON = 1e-5


@dataclass(frozen=True, slots=True)
class DavitStage:
    """A stage of a DaViT: a convolution, and layers on its results.

    Args:
        kernel: states of an edge that the convolution joins.
        stride: states between two results of it.
        padding: zeros around the states in front of it.
        norm_first: whether a norm is in front of it, not behind it.
        before: states of an edge of the square in front of it.
        size: rows of states behind it, and states of a row.
        seen: elements of a state in front of it.
        hidden: behind it.
        heads: of attention within windows.
        groups: of channels that attend to each other.
        depth: number of layers.
    """

    kernel: int
    stride: int
    padding: int
    norm_first: bool
    before: int
    size: tuple[int, int]
    seen: int
    hidden: int
    heads: int
    groups: int
    depth: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Processor(ImageProcessor):
    """The whole picture in one square, which is one patch.

    Args:
        rows: states of a picture, which are in front of those of the text.
        positions: of the encoder, for a picture and a text.
        banned: phrases that are left out of what a picture is searched for.
        least_area: the smallest part of the picture that a text with its place in it covers.
    """

    rows: int
    positions: int
    banned: tuple[str, ...] = ()
    least_area: float = 0.0

    text_use: ClassVar[TextUse] = "asks"

    @property
    def longest(self) -> int:
        """Most tokens of a text."""
        return self.positions - self.rows

    def check(self) -> None:
        ImageProcessor.check(self)
        self.check_sizes("patch", "rows", "longest", "positions")
        self.check_texts("begin", "end")


def image_processor(content: Mapping[str, Any], folder: Path, raw: RawConfig) -> Processor:
    """Return the processor of a checkpoint; see ``exporter.image_processor.image_processor``."""
    check_processor(
        content, ("CLIPImageProcessor", "CLIPFeatureExtractor"), ("do_resize", "do_rescale", "do_normalize")
    )
    size = content.get("size", {"shortest_edge": 224})
    edge = size.get("height") if isinstance(size, dict) else size
    cut = content.get("do_center_crop", True) is not False and content.get("crop_size") not in (size, edge)
    if type(edge) is not int or (isinstance(size, dict) and size != {"height": edge, "width": edge}) or cut:
        raise UnsupportedModelError(
            f"'size' {size!r} is not supported; supported: a height and equal width, without 'do_center_crop'"
        )
    last = stages(raw, edge)[-1]
    rows = 1 + last.size[0] * last.size[1]
    stated = content.get("image_seq_length", rows)
    positions = integer(text_part(raw), "max_position_embeddings")
    if stated != rows or positions <= rows:
        raise UnsupportedModelError(
            f"'image_seq_length' {stated} and a context of {positions} tokens are not supported; a picture "
            f"of {edge} x {edge} pixels has {rows} rows here, in front of a text"
        )
    rules = (
        mapping(read_json(folder / PROCESSOR_FILE), "post_processor_config")
        if (folder / PROCESSOR_FILE).is_file()
        else {}
    )
    return Processor(
        family="florence2",
        rows=rows,
        positions=positions,
        banned=tuple(map(str, mapping(rules, "phrase_grounding").get("banned_grounding_tokens", ()))),
        least_area=float(mapping(rules, "ocr").get("AREA_THRESHOLD", 0.0)),
        patch=edge,
        merge=1,
        texts=named_tokens(folder, {"begin": ("bos_token", "<s>"), "end": ("eos_token", "</s>")}),
        **levels(content, 3, CLIP_MEAN, CLIP_STD),
    )


def stages(raw: RawConfig, edge: int) -> list[DavitStage]:
    """Return the stages of the DaViT for pictures of ``edge`` x ``edge`` pixels.

    Raises:
        CheckpointError: a size is missing or wrong.
    """
    vision = _vision(raw)
    lists = [vision[name] for name in _LISTS]
    side, seen, every = edge, 3, list[DavitStage]()
    for values, norm_first in zip(zip(*lists, strict=True), vision["patch_prenorm"], strict=True):
        depth, kernel, stride, padding, hidden, heads, groups = values
        before, side = side, (side + 2 * padding - kernel) // stride + 1
        if side < 1 or hidden % heads or hidden % groups:
            raise CheckpointError(
                f"config.json: stages of {hidden} elements, {heads} heads and {groups} groups do not fit "
                f"pictures of {edge} pixels"
            )
        every.append(
            DavitStage(
                kernel,
                stride,
                padding,
                bool(norm_first),
                before,
                (side, side),
                seen,
                hidden,
                heads,
                groups,
                depth,
            )
        )
        seen = hidden
    return every


def _vision(raw: RawConfig) -> RawConfig:
    """Return the part of config.json on pictures, complete.

    Raises:
        UnsupportedModelError: it is of a checkpoint with code of its own.
    """
    vision = mapping(raw, "vision_config")
    if "dim_embed" in vision or vision.get("model_type", "florence_vision") != "florence_vision":
        raise UnsupportedModelError(
            f"'vision_config' of the kind '{vision.get('model_type')}' is not supported; take a checkpoint "
            "that transformers reads without code of its own, such as florence-community/Florence-2-base"
        )
    return with_defaults(vision, _VISION)


def vision_model(raw: RawConfig, checkpoint: Checkpoint) -> ir.Model:
    """Build the graph of the tower, with lazily read weights; see ``encoders/tower.py``.

    Raises:
        CheckpointError: the configuration, a weight or the processor is damaged or missing.
        UnsupportedModelError: an option is not supported.
    """
    vision = _vision(raw)
    edge = read_checkpoint_processor(checkpoint.source, raw).patch  # config.json does not state it
    every, config = stages(raw, edge), _config(raw)
    net = Tower(config, checkpoint, (3, edge, edge))
    x = net.op("Reshape", net.pixels, net.ints(-1, 3, edge, edge))
    with net.scope("model.vision_tower"):
        for number_, stage in enumerate(every):
            davit = _DaVit(net, stage, vision)
            with net.scope(f"convs.{number_}"):
                x = davit.convolution(x, is_first=number_ == 0)
            for layer in range(stage.depth):
                with net.scope(f"blocks.{number_}.{layer}"):
                    x = davit.layer(x)
    with net.scope("model.multi_modal_projector"):
        x = net.merged(_projected(net, x, every[-1], vision), 1)
    net.output(x, IMAGE_STATES, ir.DataType.FLOAT, ("tokens", config.hidden_size))
    return net.model()


def text_encoder_model(raw: RawConfig, checkpoint: Checkpoint) -> ir.Model:
    """Build ``text_encoder.onnx``, with lazily read weights.

    It maps the states of a picture, ``image_states`` float32 [tokens, width], and the tokens behind them,
    ``input_ids`` int64 [text], to the rows that the decoder attends to, ``encoder_hidden_states`` [tokens +
    text, width].

    Raises:
        CheckpointError: the configuration or a weight is damaged or missing.
        UnsupportedModelError: an option is not supported.
    """
    config = _config(raw)
    net = EncoderLayers(config, checkpoint)
    x = net.input(IMAGE_STATES, ir.DataType.FLOAT, ("tokens", config.hidden_size))
    states = _text_encoder(net, x, text_part(raw))
    net.output(states, ENCODER_STATES, ir.DataType.FLOAT, ("rows", config.hidden_size))
    return net.model()


def _config(raw: RawConfig) -> EncoderConfig:
    vision, text = _vision(raw), text_part(raw)
    return tower_config(
        raw,
        vision,
        hidden_size=integer(text, "d_model"),
        intermediate_size=integer(text, "encoder_ffn_dim"),
        num_layers=integer(text, "encoder_layers"),
        num_heads=integer(text, "encoder_attention_heads"),
        hidden_act=str(text["activation_function"]),
        norm_eps=_EPSILON,
        attention_bias=bool(vision["qkv_bias"]),
    )


class _DaVit:
    """The layers of a stage. States are [pictures * height * width, hidden]."""

    def __init__(self, net: Tower, stage: DavitStage, vision: RawConfig) -> None:
        self.net, self.stage, self.vision = net, stage, vision
        self.windows = Windows(net, stage.size, stage.hidden, integer(vision, "window_size"))

    def convolution(self, x: ir.Value, *, is_first: bool) -> ir.Value:
        """Join the states of the stage before, of the first one the pixels [pictures, 3, height, width]."""
        net, c = self.net, self.stage
        if c.norm_first:
            x = net.layer_norm("norm", x, c.seen)
        if not is_first:
            x = net.op("Reshape", x, net.ints(-1, c.before, c.before, c.seen))
            x = net.op("Transpose", x, perm=[0, 3, 1, 2])
        with net.scope("conv"):
            weights = net.weight("weight", c.hidden, c.seen, c.kernel, c.kernel), net.weight("bias", c.hidden)
            pads = {"kernel_shape": [c.kernel] * 2, "pads": [c.padding] * 4, "strides": [c.stride] * 2}
            x = net.op("Conv", x, *weights, **pads)
        x = self._flat(x)
        return x if c.norm_first else net.layer_norm("norm", x, c.hidden)

    def layer(self, x: ir.Value) -> ir.Value:
        """Write a layer: attention within windows, then between channels, each with a feed-forward layer."""
        with self.net.scope("spatial_block"):
            x = self._block(x, self._window_attention)
        with self.net.scope("channel_block"):
            return self._block(x, self._channel_attention)

    def _block(self, x: ir.Value, attention: Any) -> ir.Value:
        net, hidden = self.net, self.stage.hidden
        inner = int(hidden * number(self.vision, "mlp_ratio"))
        x = net.op("Add", self._depthwise("conv1", x), x)
        x = net.op("Add", x, attention(net.layer_norm("norm1", x, hidden)))
        x = net.op("Add", self._depthwise("conv2", x), x)
        normed = net.layer_norm("norm2", x, hidden)
        act = str(self.vision["activation_function"])
        inside = net.activation(net.linear("ffn.fc1", normed, hidden, inner), act)
        return net.op("Add", x, net.linear("ffn.fc2", inside, inner, hidden))

    def _depthwise(self, name: str, x: ir.Value) -> ir.Value:
        """Return a convolution of 3 x 3 states, of each channel alone."""
        net, hidden = self.net, self.stage.hidden
        with net.scope(name):
            x = net.op("Transpose", self.windows.grid(x), perm=[0, 3, 1, 2])
            weights = net.weight("weight", hidden, 1, 3, 3), net.weight("bias", hidden)
            return self._flat(net.op("Conv", x, *weights, kernel_shape=[3, 3], pads=[1] * 4, group=hidden))

    def _window_attention(self, x: ir.Value) -> ir.Value:
        net, hidden, heads = self.net, self.stage.hidden, self.stage.heads
        windows = self.windows.cut(x)
        with net.scope("window_attn"):
            q, k, v = self._qkv(windows)
            count = {"q_num_heads": heads, "kv_num_heads": heads}
            attended = net.op("Attention", q, k, v, **count, scale=(hidden // heads) ** -0.5)
            attended = net.linear("proj", attended, hidden, hidden)
        return self.windows.put_back(attended)

    def _channel_attention(self, x: ir.Value) -> ir.Value:
        """Attend between the channels of a group, whose vectors are all states of a picture."""
        net, hidden, groups = self.net, self.stage.hidden, self.stage.groups
        count = self.stage.size[0] * self.stage.size[1]
        with net.scope("channel_attn"):
            split = [
                net.op("Reshape", part, net.ints(-1, count, groups, hidden // groups))
                for part in self._qkv(x)
            ]
            scale = net.constant(count**-0.5, np.float32, "scale")
            q = net.op("Mul", net.op("Transpose", split[0], perm=[0, 2, 3, 1]), scale)
            scores = net.op("MatMul", q, net.op("Transpose", split[1], perm=[0, 2, 1, 3]))
            values = net.op("Transpose", split[2], perm=[0, 2, 3, 1])
            attended = net.op("MatMul", net.op("Softmax", scores, axis=-1), values)
            attended = net.op("Transpose", attended, perm=[0, 3, 1, 2])
            attended = net.op("Reshape", attended, net.ints(-1, hidden))
            return net.linear("proj", attended, hidden, hidden)

    def _qkv(self, x: ir.Value) -> list[ir.Value]:
        hidden, bias = self.stage.hidden, self.net.config.attention_bias
        return self.net.split_linear("qkv", ("q", "k", "v"), x, hidden, hidden, bias=bias)

    def _flat(self, x: ir.Value) -> ir.Value:
        """Return x [pictures, hidden, height, width] as states."""
        x = self.net.op("Transpose", x, perm=[0, 2, 3, 1])
        return self.net.op("Reshape", x, self.net.ints(-1, self.stage.hidden))


def _projected(net: Tower, x: ir.Value, last: DavitStage, vision: RawConfig) -> ir.Value:
    """Return the states of a picture for the text encoder: their mean, and all of them."""
    hidden, (height, width) = last.hidden, last.size
    most, half = integer(vision, "max_position_embeddings"), last.hidden // 2
    with net.scope("image_position_embed"):
        row = net.op("Slice", net.table("row_embeddings", most, half), net.ints(0), net.ints(height))
        column = net.op(
            "Slice", net.table("column_embeddings", most, hidden - half), net.ints(0), net.ints(width)
        )
        row = net.op("Expand", net.op("Unsqueeze", row, net.ints(1)), net.ints(height, width, half))
        column = net.op(
            "Expand", net.op("Unsqueeze", column, net.ints(0)), net.ints(height, width, hidden - half)
        )
        places = net.op("Reshape", net.op("Concat", column, row, axis=-1), net.ints(-1, hidden))
    # The first of the sines and cosines of frames of a video.
    first = net.constant(np.arange(hidden) % 2, np.float32, "first_frame")
    x = net.op("Add", net.op("Add", x, places), first)
    x = net.op("Concat", net.op("ReduceMean", x, net.ints(0), keepdims=1), x, axis=0)
    x = net.linear("image_projection", x, hidden, net.config.hidden_size, bias=False)
    return net.layer_norm("image_proj_norm", x)


def _text_encoder(net: EncoderLayers, x: ir.Value, text: RawConfig) -> ir.Value:
    """Return the rows of a picture's states x [rows, hidden] and of the text behind them."""
    hidden = net.config.hidden_size
    ids = net.input(INPUT_IDS, ir.DataType.INT64, ("text",))
    with net.scope(f"{LANGUAGE}"):
        table = net.table("shared", integer(text, "vocab_size"))
        words = net.op("Gather", table, ids, axis=0)
        if (scale := embedding_scale(text)) != 1.0:
            words = net.op("Mul", words, net.constant(scale, np.float32, "scale"))
        with net.scope("encoder"):
            x = net.op("Concat", x, words, axis=0)
            positions = net.table("embed_positions", integer(text, "max_position_embeddings") + OFFSET)
            last = net.op("Add", net.op("Shape", x, start=0, end=1), net.ints(OFFSET))
            x = net.op("Add", x, net.op("Slice", positions, net.ints(OFFSET), last))
            x = net.op("Unsqueeze", net.layer_norm("layernorm_embedding", x), net.ints(0))
            for layer in range(net.config.num_layers):
                with net.scope(f"layers.{layer}"):
                    x = _text_layer(net, x)
    return net.op("Reshape", x, net.ints(-1, hidden))


def _text_layer(net: EncoderLayers, x: ir.Value) -> ir.Value:
    c, hidden, inner = net.config, net.config.hidden_size, net.config.intermediate_size
    with net.scope("self_attn"):
        q, k, v = (net.linear(name, x, hidden, hidden) for name in ("q_proj", "k_proj", "v_proj"))
        heads = {"q_num_heads": c.num_heads, "kv_num_heads": c.num_heads}
        attended = net.linear(
            "out_proj", net.op("Attention", q, k, v, **heads, scale=c.head_dim**-0.5), hidden, hidden
        )
    x = net.layer_norm("self_attn_layer_norm", net.op("Add", x, attended))
    inside = net.activation(net.linear("fc1", x, hidden, inner))
    return net.layer_norm("final_layer_norm", net.op("Add", x, net.linear("fc2", inside, inner, hidden)))

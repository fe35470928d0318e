"""``vision.onnx`` of Donut (https://arxiv.org/abs/2111.15664): a Swin Transformer, read by a decoder.

Source: Liu et al., https://arxiv.org/abs/2103.14030. Pictures have one size, so that all windows are known
when the graph is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ...contract import IMAGE_STATES
from ...errors import UnsupportedModelError
from ...records import dataclass
from ..config import RawConfig, integer, number
from ..encoders.tower import Tower, tower_config
from ..encoders.windows import Windows, padded
from ..image_processor import HALF, ImageProcessor, TextUse, check_processor, levels
from ..models.vision_encoder_decoder import SwinStage, encoder_part, pair, rows_width, stages
from ..weights import Checkpoint

_NAMES = ("DonutImageProcessor", "DonutFeatureExtractor")
_STEPS = ("do_resize", "do_thumbnail", "do_pad", "do_rescale", "do_normalize")  # pictures are RGB already
_EPSILON = 1e-5
_HIDDEN = -100.0  # added to scores of states that were no neighbours before the shift
_SIZE = (2560, 1920)
_MOST_PIXELS = 2**24  # of a page; those of published models have 4.9 million

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Processor(ImageProcessor):
    """A picture that keeps its aspect ratio, in the middle of a page of one size.

    Args:
        height: pixels of the page.
        width: likewise.
        turns: whether a picture is turned by 90 degrees if its longer side is not that of the page.
        rows: states that the encoder makes of a page.
    """

    height: int
    width: int
    turns: bool
    rows: int

    text_use: ClassVar[TextUse] = "begins"
    whole_units: ClassVar[bool] = False

    def check(self) -> None:
        ImageProcessor.check(self)
        self.check_sizes("height", "width")
        if self.height * self.width > _MOST_PIXELS:
            raise ValueError(f"a page of {self.width} x {self.height} pixels; the limit is {_MOST_PIXELS}")
        self.check_sizes("rows", most=self.height * self.width)


def image_processor(content: Mapping[str, Any], folder: Path, raw: RawConfig) -> Processor:
    """Return the processor of a checkpoint; see ``exporter.image_processor.image_processor``."""
    check_processor(content, _NAMES, _STEPS)
    encoder = encoder_part(raw)
    size, wanted, last = _size(content), pair(encoder, "image_size"), stages(encoder)[-1]
    patch, *others = set(pair(encoder, "patch_size"))
    if size != wanted or others or any(edge % patch for edge in size):
        raise UnsupportedModelError(
            f"pages of {size[1]} x {size[0]} pixels are not supported; supported: the encoder's "
            f"{wanted[1]} x {wanted[0]}, of whole square patches"
        )
    return Processor(
        family="donut_swin",
        height=size[0],
        width=size[1],
        turns=bool(content.get("do_align_long_axis", False)),
        rows=last.height * last.width,
        patch=patch,
        merge=1,
        **levels(content, 2, HALF, HALF),
    )


def vision_model(raw: RawConfig, checkpoint: Checkpoint) -> ir.Model:
    """Build the graph, with lazily read weights; see ``encoders/tower.py``.

    All patches of a picture are one behind the other, row by row.

    Raises:
        CheckpointError: the configuration or a weight is damaged or missing.
        UnsupportedModelError: an option is not supported.
    """
    encoder = encoder_part(raw)
    every, patch, window = stages(encoder), pair(encoder, "patch_size")[0], integer(encoder, "window_size")
    _check(encoder, every, window)
    config = tower_config(
        raw,
        encoder,
        hidden_size=every[0].hidden,
        intermediate_size=0,
        num_layers=sum(stage.depth for stage in every),
        num_heads=every[0].heads,
        attention_bias=bool(encoder["qkv_bias"]),
    )
    net = Tower(config, checkpoint, (3, patch, patch))
    with net.scope("encoder"):
        with net.scope("embeddings"):
            x = net.layer_norm("norm", net.patch_embedding("patch_embeddings.projection"))
        for number_, stage in enumerate(every):
            inner = int(stage.hidden * number(encoder, "mlp_ratio"))
            swin = Swin(net, stage, window, inner, every[0].height * every[0].width)
            with net.scope(f"encoder.layers.{number_}"):
                for layer in range(stage.depth):
                    with net.scope(f"blocks.{layer}"):
                        x = swin.layer(x, shifted=layer % 2 == 1)
                if stage is not every[-1]:
                    with net.scope("downsample"):
                        x = swin.joined(x)
    x, width = net.merged(x, 1, every[-1].hidden), rows_width(raw)
    if width != every[-1].hidden:
        x = net.linear("enc_to_dec_proj", x, every[-1].hidden, width)
    net.output(x, IMAGE_STATES, ir.DataType.FLOAT, ("tokens", width))
    return net.model()


class Swin:
    """The layers of a stage. States are [pictures * height * width, hidden].

    Args:
        net: the graph to write into.
        stage: its sizes.
        window: states of an edge of a window.
        inner: elements inside the feed-forward layer.
        patches: of a picture.
    """

    def __init__(self, net: Tower, stage: SwinStage, window: int, inner: int, patches: int) -> None:
        self.net, self.stage, self.inner, self.patches = net, stage, inner, patches
        self.windows = Windows(net, (stage.height, stage.width), stage.hidden, window)
        # A single window has nothing to be shifted to.
        self.shift = 0 if min(stage.height, stage.width) <= window else window // 2

    def layer(self, x: ir.Value, *, shifted: bool) -> ir.Value:
        """Write a layer: attention within windows, which every second layer shifts, and feed-forward."""
        net, hidden, shift = self.net, self.stage.hidden, self.shift if shifted else 0
        windows = self.windows.cut(net.layer_norm("layernorm_before", x, hidden), shift)
        with net.scope("attention"):
            bias = net.config.attention_bias
            names = ("query", "key", "value")
            q, k, v = (net.linear(f"self.{name}", windows, hidden, hidden, bias=bias) for name in names)
            with net.scope("self"):
                mask = self._scores(shift)
            heads = {"q_num_heads": self.stage.heads, "kv_num_heads": self.stage.heads}
            scale = (hidden // self.stage.heads) ** -0.5
            attended = net.op("Attention", q, k, v, mask, **heads, scale=scale)
            attended = net.linear("output.dense", attended, hidden, hidden)
        x = net.op("Add", x, self.windows.put_back(attended, shift))
        normed = net.layer_norm("layernorm_after", x, hidden)
        inside = net.activation(net.linear("intermediate.dense", normed, hidden, self.inner))
        return net.op("Add", x, net.linear("output.dense", inside, self.inner, hidden))

    def joined(self, x: ir.Value) -> ir.Value:
        """Join squares of four states, column by column, into states of twice the width."""
        net, stage, size = self.net, self.stage, 4 * self.stage.hidden
        height, width = stage.height + stage.height % 2, stage.width + stage.width % 2
        x = padded(net, self.windows.grid(x), (height, width), self.windows.size)
        x = net.op("Reshape", x, net.ints(-1, height // 2, 2, width // 2, 2, stage.hidden))
        x = net.op("Reshape", net.op("Transpose", x, perm=[0, 1, 3, 4, 2, 5]), net.ints(-1, size))
        return net.linear("reduction", net.layer_norm("norm", x, size), size, 2 * stage.hidden, bias=False)

    def _scores(self, shift: int) -> ir.Value:
        """Return what is added to the scores of attention.

        It is [1, heads, states, states] by the distance of two states of a window. With a shift it is
        [pictures * windows, ...], since states that were no neighbours hardly see each other.
        """
        net, edge = self.net, self.windows.edge
        table = net.weight("relative_position_bias_table", (2 * edge - 1) ** 2, self.stage.heads)
        distances = net.constant(_distances(edge), np.int64, f"distances_{edge}")
        bias = net.op("Transpose", net.op("Gather", table, distances, axis=0), perm=[2, 0, 1])
        bias = net.op("Unsqueeze", bias, net.ints(0))
        if not shift:
            return bias
        hidden = np.where(_apart(edge, shift)[:, None], np.float32(_HIDDEN), np.float32(0))
        bias = net.op("Add", bias, net.constant(hidden, np.float32, "apart"))
        # Only windows of the last row and of the last column hold states of opposite sides.
        rows, columns = self.windows.rows, self.windows.columns
        kinds = 2 * (np.arange(rows) == rows - 1)[:, None] + (np.arange(columns) == columns - 1)
        of_picture = net.constant(kinds.reshape(-1), np.int64, "kinds_of_windows")
        patches = net.op("Shape", net.pixels, start=0, end=1)
        pictures = net.op("Div", patches, net.ints(self.patches))
        return net.op("Gather", bias, net.op("Tile", of_picture, pictures), axis=0)


def _distances(edge: int) -> npt.NDArray[np.int64]:
    """Return the row of the table of scores for each two states of a window, [states, states]."""
    row, column = np.divmod(np.arange(edge**2, dtype=np.int64), edge)
    down, right = (axis[:, None] - axis + edge - 1 for axis in (row, column))
    return np.asarray(down * (2 * edge - 1) + right, np.int64)


def _apart(edge: int, shift: int) -> Bools:
    """Return which states of a shifted window come from opposite sides of the picture, [4, states, states].

    Of an inner window, one of the last column, one of the last row, and that of both.
    """
    far = np.arange(2 * edge) >= 2 * edge - shift
    side = 2 * far[:, None] + far
    cut = side.reshape(2, edge, 2, edge).transpose(0, 2, 1, 3).reshape(4, edge**2)
    return np.asarray(cut[:, :, None] != cut[:, None, :])


def _check(encoder: RawConfig, every: list[SwinStage], window: int) -> None:
    """Raise UnsupportedModelError for options that change the form of the graph."""
    if encoder.get("use_absolute_embeddings"):
        raise UnsupportedModelError("'use_absolute_embeddings': true of Swin is not supported")
    if number(encoder, "layer_norm_eps") != _EPSILON:
        raise UnsupportedModelError(
            f"'layer_norm_eps' {encoder['layer_norm_eps']} of Swin is not supported; supported: {_EPSILON}"
        )
    smallest = min(min(stage.height, stage.width) for stage in every)
    if not 1 <= window <= smallest:
        raise UnsupportedModelError(
            f"'window_size' {window} of Swin is not supported; supported: 1 to {smallest}, the shorter side "
            "of its last stage"
        )


def _size(content: Mapping[str, Any]) -> tuple[int, int]:
    """Return height and width of a page, which old files give as a list [width, height].

    Raises:
        UnsupportedModelError: it is neither that nor an object.
    """
    size = content.get("size", {"height": _SIZE[0], "width": _SIZE[1]})
    if isinstance(size, list) and len(size) == 2:
        size = {"height": size[1], "width": size[0]}
    if (
        not isinstance(size, dict)
        or set(size) != {"height", "width"}
        or any(type(edge) is not int for edge in size.values())
    ):
        raise UnsupportedModelError(f"'size' {size!r} is not supported; supported: a height and a width")
    return size["height"], size["width"]

"""``vision.onnx`` of a ViT or DeiT whose rows a decoder reads, as in TrOCR (https://arxiv.org/abs/2109.10282).

Sources: ViT, https://arxiv.org/abs/2010.11929; DeiT, https://arxiv.org/abs/2012.12877.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from ...contract import GROUP_ROWS, GROUPS, IMAGE_STATES, PATCH_POSITIONS
from ...errors import UnsupportedModelError
from ...records import dataclass
from ..config import RawConfig, integer
from ..encoders.tower import Groups, Tower, tower_config
from ..image_processor import HALF, TileProcessor, check_processor, levels, processor_name
from ..models.vision_encoder_decoder import TOKENS, encoder_part, rows_width
from ..weights import Checkpoint

_VIT = ("ViTImageProcessor", "ViTFeatureExtractor")
_DEIT = ("DeiTImageProcessor", "DeiTFeatureExtractor")
_STEPS = ("do_resize", "do_rescale", "do_normalize")  # pictures are RGB already


@dataclass(frozen=True, slots=True, kw_only=True)
class Processor(TileProcessor):
    """A whole picture in one square tile, or the middle of it.

    Args:
        resized: pixels of an edge of the square that the picture becomes; the tile is its middle.
        extra: tokens in front of those of the patches.
    """

    resized: int
    extra: int

    def check(self) -> None:
        TileProcessor.check(self)
        self.check_sizes("resized", "extra")
        if self.resized < self.tile:
            raise ValueError(f"a tile of {self.tile} pixels is larger than its picture of {self.resized}")


def image_processor(content: Mapping[str, Any], folder: Path, raw: RawConfig) -> Processor:
    """Return the processor of a checkpoint; see ``exporter.image_processor.image_processor``."""
    check_processor(content, (*_VIT, *_DEIT), _STEPS)
    encoder = encoder_part(raw)
    edge = integer(encoder, "image_size")
    crops = _is_deit(content) and content.get("do_center_crop", True) is not False
    resized = _edge(content, "size", 256 if _is_deit(content) else 224)
    tile = _edge(content, "crop_size", 224) if crops else resized
    if tile != edge:
        raise UnsupportedModelError(
            f"tiles of {tile} pixels are not supported; supported: the encoder's {edge}"
        )
    return Processor(
        family="vit",
        tile=tile,
        resized=resized,
        extra=len(TOKENS[encoder["model_type"]]),
        patch=integer(encoder, "patch_size"),
        merge=1,
        **levels(content, 3 if _is_deit(content) else 2, HALF, HALF),
    )


def vision_model(raw: RawConfig, checkpoint: Checkpoint) -> ir.Model:
    """Build the graph, with lazily read weights; see ``encoders/tower.py``.

    The first patches, of zeros, stand for the tokens that come in front. The rows of a picture are those of
    all its patches, float32 [tokens, width].

    Raises:
        CheckpointError: the configuration or a weight is damaged or missing.
        UnsupportedModelError: an option is not supported.
    """
    encoder = encoder_part(raw)
    kind, patch = encoder["model_type"], integer(encoder, "patch_size")
    config = tower_config(raw, encoder, attention_bias=bool(encoder["qkv_bias"]))
    net = Tower(config, checkpoint, (3, patch, patch))
    groups = net.groups(GROUPS, GROUP_ROWS)
    count = (integer(encoder, "image_size") // max(1, patch)) ** 2
    with net.scope("encoder"):
        with net.scope("embeddings"):
            x = _embeddings(net, TOKENS[kind], count)
        for layer in range(config.num_layers):
            with net.scope(f"encoder.layer.{layer}"):
                x = _layer(net, x, groups)
        x = net.layer_norm("layernorm", net.merged(x, 1))
    width = rows_width(raw)
    if width != config.hidden_size:
        x = net.linear("enc_to_dec_proj", x, config.hidden_size, width)
    net.output(x, IMAGE_STATES, ir.DataType.FLOAT, ("tokens", width))
    return net.model()


def _embeddings(net: Tower, tokens: tuple[str, ...], count: int) -> ir.Value:
    """Return the states of tokens and ``count`` patches in front of the layers."""
    extra = len(tokens)
    places = net.input(PATCH_POSITIONS, ir.DataType.INT64, ("patches",))
    patches = net.patch_embedding("patch_embeddings.projection")
    rows = [net.initializer(_flat(net, name, 1)) for name in tokens]
    table = rows[0] if extra == 1 else net.op("Concat", *rows, axis=0)
    last = net.constant(extra - 1, np.int64, "last_token")
    token = net.op("Gather", table, net.op("Min", places, last), axis=0)
    is_token = net.op("Unsqueeze", net.op("LessOrEqual", places, last), net.ints(1))
    positions = net.initializer(_flat(net, "position_embeddings", count + extra))
    x = net.op("Where", is_token, token, patches)
    return net.op("Add", x, net.op("Gather", positions, places, axis=0))


def _flat(net: Tower, name: str, rows: int) -> ir.LazyTensor:
    """Return a table [rows, hidden] that is stored as [1, rows, hidden]."""
    shape = (1, rows, net.config.hidden_size)
    return net.checkpoint.tensor(net.qualified(name), shape, view=lambda array: array[0])


def _layer(net: Tower, x: ir.Value, groups: Groups) -> ir.Value:
    c = net.config
    hidden, inner = c.hidden_size, c.intermediate_size
    normed = net.layer_norm("layernorm_before", x)
    with net.scope("attention"):
        names = ("query", "key", "value")
        q, k, v = (
            net.linear(f"attention.{name}", normed, hidden, hidden, bias=c.attention_bias) for name in names
        )
        attended = net.linear("output.dense", net.attention(q, k, v, groups), hidden, hidden)
    x = net.op("Add", x, attended)
    normed = net.layer_norm("layernorm_after", x)
    inside = net.activation(net.linear("intermediate.dense", normed, hidden, inner))
    return net.op("Add", x, net.linear("output.dense", inside, inner, hidden))


def _is_deit(content: Mapping[str, Any]) -> bool:
    return processor_name(content) in _DEIT


def _edge(content: Mapping[str, Any], name: str, default: int) -> int:
    """Return the edge of a square size of preprocessor_config.json, a number in old files.

    Raises:
        UnsupportedModelError: it is no square.
    """
    size = content.get(name, default)
    edge = size.get("height") if isinstance(size, dict) else size
    if type(edge) is not int or (isinstance(size, dict) and size != {"height": edge, "width": edge}):
        raise UnsupportedModelError(
            f"'{name}' {size!r} is not supported; supported: a height and equal width"
        )
    return edge

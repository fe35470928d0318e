"""``vision.onnx`` of SigLIP 2 (https://arxiv.org/abs/2502.14786): pictures of any aspect ratio (NaFlex).

Models of SigLIP 2 with a fixed resolution are those of SigLIP.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx_ir as ir

from ...contract import GROUP_ROWS, GROUPS, POSITION_WEIGHTS
from ...errors import CheckpointError
from ...records import dataclass
from ..config import RawConfig, integer, mapping, with_defaults
from ..encoders.tower import Tower, tower_config
from ..image_processor import HALF, MOST_PIXELS, ImageProcessor, check_processor, levels
from ..weights import Checkpoint
from .idefics3 import siglip_layer
from .siglip import VISION, pooled


@dataclass(frozen=True, slots=True, kw_only=True)
class Processor(ImageProcessor):
    """A picture of its own aspect ratio, as large as a number of patches allows.

    Args:
        most_patches: the most patches of a picture.
        positions: entries along an edge of the tower's table of positions.
    """

    most_patches: int
    positions: int

    def check(self) -> None:
        ImageProcessor.check(self)
        self.check_sizes("most_patches", "positions")


def image_processor(content: Mapping[str, Any], folder: Path, raw: RawConfig) -> Processor:
    """Return the processor of a checkpoint; see ``exporter.image_processor.image_processor``."""
    check_processor(content, ("Siglip2ImageProcessor",))
    vision = tower_part(raw)
    patch = int(content.get("patch_size", 16))
    if patch != integer(vision, "patch_size"):
        raise ValueError(f"'patch_size' {patch} is not that of the tower: {vision['patch_size']}")
    return Processor(
        family="siglip2",
        most_patches=int(content.get("max_num_patches", 256)),
        positions=position_edge(vision),
        patch=patch,
        merge=1,
        **levels(content, 2, HALF, HALF),
    )


def vision_model(raw: RawConfig, checkpoint: Checkpoint) -> ir.Model:
    """Build the graph, with lazily read weights; see ``vision_model`` of SigLIP.

    Patches are [height, width, channels]. ``position_weights`` float32 [patches, entries] are the parts of
    the entries of the table of positions in the position of each patch.

    Raises:
        CheckpointError: the configuration or a weight is damaged or missing.
        UnsupportedModelError: an option is not supported.
    """
    vision = tower_part(raw)
    patch = integer(vision, "patch_size")
    net = Tower(tower_config(raw, vision), checkpoint, (patch, patch, 3))
    with net.scope("vision_model"):
        return pooled(net, vision, tower_states(net, position_edge(vision)))


def tower_states(net: Tower, positions: int) -> ir.Value:
    """Write the embeddings and the layers, and return the states of all patches.

    Args:
        net: the graph, in the scope of the tower.
        positions: entries along an edge of the table of positions.
    """
    groups = net.groups(GROUPS, GROUP_ROWS)
    entries = positions**2
    weights = net.input(POSITION_WEIGHTS, ir.DataType.FLOAT, ("patches", entries))
    with net.scope("embeddings"):
        x = net.linear("patch_embedding", net.pixels, math.prod(net.patch), net.config.hidden_size)
        x = net.op("Add", x, net.op("MatMul", weights, net.table("position_embedding", entries)))
    for layer in range(net.config.num_layers):
        with net.scope(f"encoder.layers.{layer}"):
            x = siglip_layer(net, x, groups)
    return x


def tower_part(raw: RawConfig) -> RawConfig:
    """Return the tower's part of config.json, complete."""
    return with_defaults(mapping(raw, "vision_config"), {**VISION, "num_patches": 256})


def position_edge(vision: RawConfig) -> int:
    """Return the entries along an edge of the table of positions.

    Raises:
        CheckpointError: the table is no square.
    """
    count = integer(vision, "num_patches")
    edge = math.isqrt(count)
    if edge * edge != count or not 1 <= edge <= MOST_PIXELS:
        raise CheckpointError(f"config.json: 'num_patches' {count} is no square")
    return edge

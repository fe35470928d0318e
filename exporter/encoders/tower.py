"""The graph of a tower under construction, which turns patches of pictures into rows of a decoder's input.

The graph has no logic of shapes: which patches attend to each other, where they are and which of them join
into a token are inputs, computed on the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir

from ...contract import MERGED_PATCHES, PATCH_COS, PATCH_SIN, PIXELS
from ...errors import CheckpointError
from ...records import dataclass
from ..config import RawConfig, integer, number
from ..weights import Checkpoint
from .encoder import EncoderConfig, EncoderLayers


@dataclass(frozen=True, slots=True)
class Groups:
    """Which patches attend to each other.

    Args:
        members: int64 [groups, longest], patches; 0 where a group is shorter.
        mask: bool [groups, 1, longest, longest], the keys that exist.
        rows: int64 [patches], the place of each patch among all members.
    """

    members: ir.Value
    mask: ir.Value
    rows: ir.Value


def tower_config(
    raw: RawConfig,
    vision: RawConfig,
    *,
    layers: str = "num_hidden_layers",
    heads: str = "num_attention_heads",
    **others: Any,
) -> EncoderConfig:
    """Return the configuration of a tower of pictures.

    Args:
        raw: the content of config.json.
        vision: its ``vision_config``, with the defaults of its family.
        layers: the name there of the number of layers.
        heads: the name there of the number of heads.
        others: fields of ``EncoderConfig`` that are not read from there under their usual names.

    Raises:
        CheckpointError: a size is missing or wrong, or the heads do not divide the hidden size.
    """
    usual: dict[str, Callable[[], Any]] = {
        "hidden_size": partial(integer, vision, "hidden_size"),
        "intermediate_size": partial(integer, vision, "intermediate_size"),
        "num_layers": partial(integer, vision, layers),
        "num_heads": partial(integer, vision, heads),
        "hidden_act": lambda: str(vision["hidden_act"]),
        "norm_eps": partial(number, vision, "layer_norm_eps"),
    }
    fields = others | {name: read() for name, read in usual.items() if name not in others}
    config = EncoderConfig(model_type=f"{raw['model_type']}_vision", vocab_size=0, max_tokens=0, **fields)
    if not config.num_heads or config.hidden_size % config.num_heads:
        raise CheckpointError(
            f"config.json: hidden_size {config.hidden_size} of 'vision_config' must be a multiple of the "
            f"number of heads {config.num_heads}"
        )
    return config


class Tower(EncoderLayers):
    """The layers of towers. States are [patches, hidden].

    Args:
        config: sizes.
        checkpoint: the weights.
        patch: the shape of a patch, channels first: [channels, (frames,) height, width].
    """

    def __init__(self, config: EncoderConfig, checkpoint: Checkpoint, patch: tuple[int, ...]) -> None:
        super().__init__(config, checkpoint)
        self.patch = patch
        self.pixels = self.input(PIXELS, ir.DataType.FLOAT, ("patches", math.prod(patch)))
        self._rope: tuple[ir.Value, ir.Value] | None = None

    def patch_embedding(self, name: str, *, bias: bool = True) -> ir.Value:
        """Return the states of patches: a convolution whose stride is its kernel is a product."""
        hidden = self.config.hidden_size
        with self.scope(name):
            stored = self.checkpoint.tensor(
                self.qualified("weight"),
                (hidden, *self.patch),
                view=lambda array: array.reshape(hidden, -1).T,
            )
            x = self.op("MatMul", self.pixels, self.initializer(stored))
            return self.op("Add", x, self.weight("bias", hidden)) if bias else x

    def groups(self, name: str, rows: str) -> Groups:
        """Add the inputs ``name`` [groups, longest], -1 where a group is shorter, and ``rows`` [patches]."""
        members = self.input(name, ir.DataType.INT64, (name, f"longest_of_{name}"))
        places = self.input(rows, ir.DataType.INT64, ("patches",))
        with self.unscoped(name):
            zero = self.constant(0, np.int64, "0")
            there = self.op("Unsqueeze", self.op("GreaterOrEqual", members, zero), self.ints(1, 2))
            count = self.op("Shape", members, start=0, end=1)
            longest = self.op("Shape", members, start=1, end=2)
            # onnxruntime 1.32 does not broadcast one row to all queries.
            shape = self.op("Concat", count, self.ints(1), longest, longest, axis=0)
            return Groups(self.op("Max", members, zero), self.op("Expand", there, shape), places)

    def rotate(self, x: ir.Value) -> ir.Value:
        """Rotate heads by the inputs ``patch_cos`` and ``patch_sin`` [patches, head_dim / 2] (2-D rope)."""
        if self._rope is None:
            angles = ("patches", self.config.head_dim // 2)
            inputs = [self.input(name, ir.DataType.FLOAT, angles) for name in (PATCH_COS, PATCH_SIN)]
            with self.unscoped("rope"):
                cos, sin = (self.op("Unsqueeze", value, self.ints(0)) for value in inputs)
            self._rope = (cos, sin)
        alone = self.op("Unsqueeze", x, self.ints(0))
        turned = self.op("RotaryEmbedding", alone, *self._rope, num_heads=self.config.num_heads)
        return self.op("Squeeze", turned, self.ints(0))

    def attention(self, q: ir.Value, k: ir.Value, v: ir.Value, groups: Groups) -> ir.Value:
        """Attend within each group; all are [patches, hidden]."""
        c = self.config
        parts = (self.op("Gather", x, groups.members, axis=0) for x in (q, k, v))
        heads = {"q_num_heads": c.num_heads, "kv_num_heads": c.num_heads}
        scale = c.head_dim**-0.5 if c.scale is None else c.scale
        attended = self.op("Attention", *parts, groups.mask, **heads, scale=scale)
        flat = self.op("Reshape", attended, self.ints(-1, c.hidden_size))
        return self.op("Gather", flat, groups.rows, axis=0)

    def merged(self, x: ir.Value, k: int, size: int | None = None) -> ir.Value:
        """Return the states of each token one behind the other, [tokens, k * size].

        The input ``merged_patches`` int64 [tokens, k] says which; their size is by default the hidden size.
        """
        joined = self.op("Gather", x, self.patches_of_tokens(k), axis=0)
        return self.op("Reshape", joined, self.ints(-1, k * (size or self.config.hidden_size)))

    def mean_of(self, x: ir.Value, k: int) -> ir.Value:
        """Return the mean of the states of each token, [tokens, hidden]; see ``merged``."""
        if k == 1:
            return self.merged(x, 1)
        parts = self.op("Gather", x, self.patches_of_tokens(k), axis=0)
        return self.op("ReduceMean", parts, self.ints(1), keepdims=0)

    def patches_of_tokens(self, k: int | str) -> ir.Value:
        """Return the input ``merged_patches`` int64 [tokens, k]; a name says that k is not known."""
        for value in self.graph.inputs:
            if value.name == MERGED_PATCHES:
                return value
        return self.input(MERGED_PATCHES, ir.DataType.INT64, ("tokens", k))

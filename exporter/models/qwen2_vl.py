"""Qwen2-VL (https://arxiv.org/abs/2409.12191): its text decoder, a Qwen 2, see ``vision/qwen2_vl.py``.

Positions of pictures have three axes (M-RoPE); those of text are equal in all three.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import onnx_ir as ir

from ...errors import CheckpointError, UnsupportedModelError
from .. import layers
from ..config import DecoderConfig, RawConfig, mapping, text_config, with_defaults
from ..decoder import Decoder
from ..weights import Checkpoint
from . import qwen2

# Rope types whose frequencies do not depend on the length of the text.
_FIXED = ("default", "linear", "yarn", "llama3")


def config(raw: RawConfig) -> DecoderConfig:
    """Normalise config.json. The decoder's fields are beside ``vision_config``, or in ``text_config``."""
    return seeing_config(raw, qwen2.config, sections=(16, 24, 24))


def build(net: Decoder) -> ir.Value:
    """Write the decoder and return its logits."""
    net.checkpoint.ignore("visual.", "model.visual.")
    return layers.pre_norm_decoder(
        net, attention=qwen2.attention, mlp=layers.gated_mlp, prefix=text_prefix(net.checkpoint)
    )


def text_prefix(checkpoint: Checkpoint) -> str:
    """Return the prefix of the decoder's weights: that of published checkpoints or of transformers 5."""
    return "model" if "model.embed_tokens.weight" in checkpoint else "model.language_model"


def seeing_config(
    raw: RawConfig,
    family: Callable[[RawConfig], DecoderConfig],
    *,
    sections: tuple[int, int, int],
    interleaved: bool = False,
    theta: float = 1_000_000.0,
) -> DecoderConfig:
    """Return the configuration of a decoder whose positions have axes in time, height and width.

    Args:
        raw: the content of config.json.
        family: normalises the decoder's part.
        sections: number of frequencies of each axis where the file states none.
        interleaved: whether frequencies turn with the axes in turns, not in sections.
        theta: base of the frequencies where the file states none.

    Raises:
        CheckpointError: the sections do not fit the heads.
        UnsupportedModelError: the frequencies depend on the length of the text.
    """
    model_type = raw["model_type"]
    text = text_config(raw, model_type) if raw.get("text_config") else raw
    rope = with_defaults(mapping(text, "rope_parameters", "rope_scaling"))
    kind = rope.get("rope_type", rope.get("type", "default"))
    kind = "default" if kind == "mrope" else kind
    if kind not in _FIXED:
        raise UnsupportedModelError(
            f"rope type '{kind}' is not supported in '{model_type}'; supported: {', '.join(_FIXED)}"
        )
    rope = {"rope_theta": text.get("rope_theta") or theta, **rope, "rope_type": kind}
    result = family({**text, "model_type": model_type, "rope_parameters": rope, "rope_scaling": None})
    return with_axes(result, rope, sections, interleaved=interleaved)


def with_axes(
    config: DecoderConfig, rope: RawConfig, sections: tuple[int, int, int], *, interleaved: bool
) -> DecoderConfig:
    """Return a configuration with the axis of each frequency.

    Args:
        config: the configuration; its layers have one rope, or none.
        rope: the parameters of the rope in config.json.
        sections: number of frequencies of each axis where the file states none.
        interleaved: whether frequencies turn with the axes in turns, not in sections.

    Raises:
        CheckpointError: the sections do not fit the heads.
    """
    counts = rope.get("mrope_section", sections)
    rotated = [each.rotary_dim for each in config.ropes if each is not None]
    if not rotated:  # such as a hybrid whose layers all have states
        return config
    half = rotated[0] // 2
    if (
        not isinstance(counts, list | tuple)
        or len(counts) != 3
        or not all(type(count) is int and count >= 0 for count in counts)
        or (sum(counts) != half and not interleaved)
    ):
        raise CheckpointError(
            f"config.json: 'mrope_section' must hold 3 numbers with the sum {half}, found {counts!r}"
        )
    return replace(config, rope_axes=_axes(counts, half, interleaved=interleaved))


def _axes(counts: list[int] | tuple[int, ...], half: int, *, interleaved: bool) -> tuple[int, ...]:
    """Return the axis of each frequency."""
    if not interleaved:
        return tuple(axis for axis, count in enumerate(counts) for _ in range(count))
    axes = [0] * half
    for axis in (1, 2):
        for place in range(axis, min(3 * counts[axis], half), 3):
            axes[place] = axis
    return tuple(axes)

"""Rotary position embeddings of every rope type, computed from positions in standard operators.

RoPE: Su et al., RoFormer, https://arxiv.org/abs/2104.09864. Extensions are cited at their functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ..errors import CheckpointError, UnsupportedModelError
from .config import RopeConfig
from .graph import GraphWriter

Floats = npt.NDArray[np.float64]


def rope_tables(graph: GraphWriter, config: RopeConfig, position_ids: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Return cosines and sines [batch, sequence, rotary_dim / 2] of ``position_ids`` [batch, sequence].

    Raises:
        UnsupportedModelError: the rope type is not supported.
        CheckpointError: a parameter of the rope type is missing or has the wrong length.
    """
    if config.rope_type not in _FREQUENCIES:
        known = ", ".join(sorted(_FREQUENCIES))
        raise UnsupportedModelError(f"rope type '{config.rope_type}' is not supported; supported: {known}")
    frequencies = _FREQUENCIES[config.rope_type](graph, config, position_ids)
    positions = graph.op("Unsqueeze", graph.op("Cast", position_ids, to=ir.DataType.FLOAT), graph.ints(-1))
    angles = graph.op("Mul", positions, frequencies)
    cos, sin = graph.op("Cos", angles), graph.op("Sin", angles)
    scaling = attention_scaling(config)
    if scaling != 1.0:
        factor = graph.constant(scaling, np.float32, "attention_scaling")
        cos, sin = graph.op("Mul", cos, factor), graph.op("Mul", sin, factor)
    return cos, sin


def turned_by_one(graph: GraphWriter, config: RopeConfig, x: ir.Value, num_heads: int) -> ir.Value:
    """Rotate x [batch, sequence, num_heads * rotary_dim] as the next position would be, relative to its own.

    Raises:
        UnsupportedModelError: the frequencies depend on the positions, or pairs are neighbours.
    """
    known = {"default": default_frequencies, "proportional": proportional_frequencies}
    if config.rope_type not in known or config.interleaved:
        raise UnsupportedModelError(
            f"queries that are one position ahead are not supported with rope type '{config.rope_type}'"
        )
    angles, half = known[config.rope_type](config), config.rotary_dim // 2
    cos, sin = (
        graph.constant(np.cos(angles), np.float32, "cos"),
        graph.constant(np.sin(angles), np.float32, "sin"),
    )
    heads = graph.op("Reshape", x, graph.ints(0, 0, num_heads, config.rotary_dim))
    first, second = graph.ops("Split", heads, graph.ints(half, half), num_outputs=2, axis=-1)
    turned = (
        graph.op("Sub", graph.op("Mul", first, cos), graph.op("Mul", second, sin)),
        graph.op("Add", graph.op("Mul", second, cos), graph.op("Mul", first, sin)),
    )
    joined = graph.op("Concat", *turned, axis=-1)
    return graph.op("Reshape", joined, graph.ints(0, 0, num_heads * config.rotary_dim))


def attention_scaling(config: RopeConfig) -> float:
    """Return the factor of cosines and sines: that of YaRN and LongRoPE, else 1."""
    if config.rope_type not in ("yarn", "longrope"):
        return 1.0
    if config.attention_factor is not None:
        return config.attention_factor
    factor = _extension(config)
    if factor <= 1.0:
        return 1.0
    if config.rope_type == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(config.original_max_position_embeddings))
    if config.mscale and config.mscale_all_dim:
        return _yarn_mscale(factor, config.mscale) / _yarn_mscale(factor, config.mscale_all_dim)
    return _yarn_mscale(factor, 1.0)


def default_frequencies(config: RopeConfig) -> Floats:
    """Return theta^(-2i/d) for i in [0, d/2)."""
    return config.theta ** -_exponents(config)


def linear_frequencies(config: RopeConfig) -> Floats:
    """Divide the default frequencies by ``factor`` (position interpolation, https://arxiv.org/abs/2306.15595)."""
    return default_frequencies(config) / _factor(config)


def proportional_frequencies(config: RopeConfig) -> Floats:
    """Return the linear frequencies of the first ``turning_dim`` elements, and 0 for the others (Gemma 4)."""
    turns = np.arange(config.rotary_dim // 2) < config.turning_dim // 2
    return default_frequencies(config) * turns / (1.0 if config.factor is None else config.factor)


def llama3_frequencies(config: RopeConfig) -> Floats:
    """Return the frequencies of Llama 3.1 (https://arxiv.org/abs/2407.21783).

    Low frequencies are divided by ``factor``, high ones are kept, and those between are interpolated.
    """
    frequencies = default_frequencies(config)
    # Turns of each frequency within the original context.
    turns = config.original_max_position_embeddings * frequencies / (2 * math.pi)
    low, high = config.low_freq_factor, config.high_freq_factor
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return frequencies * (kept + (1 - kept) / _factor(config))


def yarn_frequencies(config: RopeConfig) -> Floats:
    """Return the frequencies of YaRN (Peng et al., https://arxiv.org/abs/2309.00071, section 3.2)."""
    half = config.rotary_dim // 2
    low, high = (_yarn_dimension(config, turns) for turns in (config.beta_fast, config.beta_slow))
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.rotary_dim - 1)
    if low == high:
        high += 0.001
    interpolated: Floats = np.clip((np.arange(half) - low) / (high - low), 0.0, 1.0)
    return default_frequencies(config) * (1 - interpolated + interpolated / _extension(config))


def _static(
    frequencies: Callable[[RopeConfig], Floats],
) -> Callable[[GraphWriter, RopeConfig, ir.Value], ir.Value]:
    def write(graph: GraphWriter, config: RopeConfig, position_ids: ir.Value) -> ir.Value:
        return graph.constant(frequencies(config), np.float32, "inv_freq")

    return write


def _dynamic(graph: GraphWriter, config: RopeConfig, position_ids: ir.Value) -> ir.Value:
    """Write dynamic NTK-aware scaling (https://arxiv.org/abs/2309.00071, sections 3.1 and 3.3).

    For a sequence of n tokens beyond the trained length, theta is multiplied by
    (factor * n / trained - (factor - 1)) ** (d / (d - 2)).
    """
    factor, dim = _factor(config), config.rotary_dim
    length = graph.op("Cast", _sequence_length(graph, position_ids), to=ir.DataType.FLOAT)
    ratio = graph.op(
        "Div", length, graph.constant(config.max_position_embeddings, np.float32, "max_positions")
    )
    ratio = graph.op("Max", ratio, graph.constant(1, np.float32, "one"))
    growth = graph.op("Mul", ratio, graph.constant(factor, np.float32, "rope_factor"))
    growth = graph.op("Sub", growth, graph.constant(factor - 1, np.float32, "rope_factor_less_one"))
    exponents = graph.constant(-_exponents(config) * dim / (dim - 2), np.float32, "rope_exponents")
    frequencies = graph.constant(default_frequencies(config), np.float32, "inv_freq")
    return graph.op("Mul", frequencies, graph.op("Pow", growth, exponents))


def _longrope(graph: GraphWriter, config: RopeConfig, position_ids: ir.Value) -> ir.Value:
    """Write LongRoPE (Ding et al., https://arxiv.org/abs/2402.13753).

    Each frequency has one factor of ``short_factor``, or of ``long_factor`` beyond the original context.
    """
    original = graph.constant(config.original_max_position_embeddings, np.int64, "original_max_positions")
    is_long = graph.op("Greater", _sequence_length(graph, position_ids), original)
    sets = []
    for name, factors in (("long", config.long_factor), ("short", config.short_factor)):
        if len(factors) != config.rotary_dim // 2:
            raise CheckpointError(
                f"config.json: rope '{name}_factor' must hold {config.rotary_dim // 2} numbers, "
                f"found {len(factors)}"
            )
        values = default_frequencies(config) / np.asarray(factors)
        sets.append(graph.constant(values, np.float32, f"{name}_inv_freq"))
    return graph.op("Where", is_long, *sets)


_FREQUENCIES: dict[str, Callable[[GraphWriter, RopeConfig, ir.Value], ir.Value]] = {
    "default": _static(default_frequencies),
    "linear": _static(linear_frequencies),
    "dynamic": _dynamic,
    "proportional": _static(proportional_frequencies),
    "llama3": _static(llama3_frequencies),
    "yarn": _static(yarn_frequencies),
    "longrope": _longrope,
}


def _sequence_length(graph: GraphWriter, position_ids: ir.Value) -> ir.Value:
    largest = graph.op("ReduceMax", position_ids, keepdims=0)
    return graph.op("Add", largest, graph.constant(1, np.int64, "one"))


def _exponents(config: RopeConfig) -> Floats:
    return np.arange(0, config.rotary_dim, 2, dtype=np.float64) / config.rotary_dim


def _factor(config: RopeConfig) -> float:
    if config.factor is None:
        raise CheckpointError(f"config.json: rope type '{config.rope_type}' needs a 'factor'")
    return config.factor


def _extension(config: RopeConfig) -> float:
    """Return ``factor``, by default the ratio of the context to the original context."""
    if config.factor is not None:
        return config.factor
    return config.max_position_embeddings / config.original_max_position_embeddings


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0


def _yarn_dimension(config: RopeConfig, turns: float) -> float:
    """Return the fractional index of the frequency that makes ``turns`` turns in the original context."""
    length = config.original_max_position_embeddings
    return config.rotary_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(config.theta))

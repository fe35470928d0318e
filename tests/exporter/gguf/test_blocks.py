"""Levels, scales and minima give back the floats of the gguf package, bit by bit."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from hypothesis import given, settings
from hypothesis import strategies as st

from carryall.exporter.gguf import blocks
from carryall.exporter.gguf.blocks import LAYOUTS, take_apart

# Offsets of float16 numbers in a block, and of MXFP4's exponent.
FLOATS = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS", "IQ3_XXS", "IQ3_S"), (0,)),
    **dict.fromkeys(("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ1_S"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
}


def random_blocks(type_name: str, count: int, seed: int) -> np.ndarray:
    """Return blocks of random bytes with finite scales."""
    rng = np.random.default_rng(seed)
    size = GGML_QUANT_SIZES[GGMLQuantizationType[type_name]][1]
    blocks = rng.integers(0, 256, (count, size), np.uint8)
    for offset in FLOATS.get(type_name, ()):
        scales = (rng.standard_normal((count, 1)) * 10.0 ** rng.integers(-4, 3)).astype(np.float16)
        blocks[:, offset : offset + 2] = scales.view(np.uint8)
    if type_name == "MXFP4":
        blocks[:, 0] = rng.integers(0, 250, count)
    if type_name == "NVFP4":
        blocks[:, :4] = rng.integers(0, 126, (count, 4))
    if type_name == "IQ1_M":
        blocks[:, 55] &= 0xBF  # the upper bits of a float16
    return blocks


@pytest.mark.parametrize("type_name", LAYOUTS)
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_the_parts_give_the_same_floats(type_name: str, seed: int) -> None:
    rows, blocks_per_row = 6, 3
    data = random_blocks(type_name, rows * blocks_per_row, seed).reshape(rows, -1)
    parts, size = take_apart(data, type_name), LAYOUTS[type_name].block_size

    stored = LAYOUTS[type_name].scale_dtype
    scales = parts.scales.astype(stored).astype(np.float32)
    rebuilt = parts.levels.astype(np.float32) * np.repeat(scales, size, axis=1)
    if parts.minima is not None:
        rebuilt += np.repeat(parts.minima.astype(stored).astype(np.float32), size, axis=1)

    expected = dequantize(data, GGMLQuantizationType[type_name])
    np.testing.assert_array_equal(rebuilt, expected)


@pytest.mark.parametrize("type_name", LAYOUTS)
def test_levels_fit_the_stored_type(type_name: str) -> None:
    layout = LAYOUTS[type_name]
    levels = take_apart(random_blocks(type_name, 2000, 0), type_name).levels.astype(int)
    low = 0 if layout.zero_levels is not None else -(1 << (layout.bits - 1))
    assert low <= levels.min()
    assert levels.max() < low + (1 << layout.bits)
    assert len(np.unique(levels)) >= 3


@pytest.mark.parametrize("type_name", LAYOUTS)
def test_a_matrix_in_pieces_has_the_same_parts(type_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = random_blocks(type_name, 7 * 2, 1).reshape(7, -1)
    whole = take_apart(data, type_name)
    monkeypatch.setattr(blocks, "_PIECE", 3 * 2 * 256)
    for found, expected in zip(take_apart(data, type_name), whole, strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.long
def test_memory_is_that_of_the_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "_PIECE", 1 << 14)
    data = random_blocks("Q4_1", 1024 * 64, 0).reshape(1024, -1)
    take_apart(data[:1], "Q4_1")  # imports
    tracemalloc.start()
    parts = take_apart(data, "Q4_1")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert parts.minima is not None
    held = parts.levels.nbytes + parts.scales.nbytes + parts.minima.nbytes
    assert peak < 2 * held + 12 * 4 * blocks._PIECE

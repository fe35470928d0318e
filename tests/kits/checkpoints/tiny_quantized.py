"""Tiny checkpoints quantized by AWQ, GPTQ, compressed-tensors and bitsandbytes, and their float twins.

Words are packed one number at a time, from the formats' definitions, so that the readers are tested against
other code.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnxruntime as ort
from safetensors.numpy import load_file, save_file
from tiny_models import write_tiny

Array = npt.NDArray[Any]
Parts = tuple[dict[str, Array], Array]  # tensors by suffix, and the float matrix [out, in]
Quantize = Callable[[np.random.Generator, int, int], Parts]

WIDE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "head_dim": None}
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def pack_rows(numbers: Array, bits: int, order: tuple[int, ...] | None = None) -> Array:
    """Pack each row of ``numbers`` [n, m] into 32-bit words [n, ceil(m * bits / 32)]."""
    per_word = 32 // bits
    rows = []
    for row in numbers.tolist():
        words = [0] * -(-len(row) // per_word)
        for place in range(len(words) * per_word):
            column = place - place % per_word + (order[place % per_word] if order else place % per_word)
            if column < len(row):
                words[place // per_word] |= (row[column] & (2**bits - 1)) << (bits * (place % per_word))
        rows.append(words)
    return np.array(rows, np.uint32).view(np.int32)


def drawn(
    rng: np.random.Generator, outputs: int, inputs: int, bits: int, group: int
) -> tuple[Array, Array, Array]:
    """Return levels [out, in], zero points and fp16 scales [out, groups]."""
    groups = 1 if group < 0 else -(-inputs // group)
    levels = rng.integers(0, 2**bits, (outputs, inputs))
    zeros = rng.integers(1, 2**bits, (outputs, groups))
    scales = rng.uniform(0.5, 1.5, (outputs, groups)) * 0.4 / 2**bits
    return levels, zeros, scales.astype(np.float16)


def floats(levels: Array, zeros: Array | int, scales: Array, groups: Array) -> Array:
    """Return the float matrix; ``groups`` is the group of each input."""
    points = zeros[:, groups] if isinstance(zeros, np.ndarray) else zeros
    return ((levels - points) * scales.astype(np.float32)[:, groups]).astype(np.float32)


def group_index(inputs: int, group: int) -> Array:
    """Return the group of each input of consecutive groups; one group if ``group`` is -1."""
    return np.arange(inputs) // (inputs if group < 0 else group)


def gptq(
    bits: int, group: int, *, desc_act: bool = False, v2: bool = False, symmetric: bool = False
) -> Quantize:
    """GPTQ's tensors."""

    def quantize(rng: np.random.Generator, outputs: int, inputs: int) -> Parts:
        levels, zeros, scales = drawn(rng, outputs, inputs, bits, group)
        zeros = np.full_like(zeros, 2 ** (bits - 1)) if symmetric else zeros
        groups = group_index(inputs, group)
        if desc_act:
            groups = rng.permutation(groups)
        tensors = {
            "qweight": pack_rows(levels, bits).T.copy(),
            "qzeros": pack_rows((zeros if v2 else zeros - 1).T, bits),
            "scales": scales.T.copy(),
            "g_idx": groups.astype(np.int32),
        }
        return tensors, floats(levels, zeros, scales, groups)

    return quantize


def awq(group: int) -> Quantize:
    """AWQ's tensors of version "gemm"."""

    def quantize(rng: np.random.Generator, outputs: int, inputs: int) -> Parts:
        levels, zeros, scales = drawn(rng, outputs, inputs, 4, group)
        tensors = {
            "qweight": pack_rows(levels.T, 4, _AWQ_ORDER),
            "qzeros": pack_rows(zeros.T, 4, _AWQ_ORDER),
            "scales": scales.T.copy(),
        }
        return tensors, floats(levels, zeros, scales, group_index(inputs, group))

    return quantize


def packed(bits: int, group: int, *, symmetric: bool = True, desc_act: bool = False) -> Quantize:
    """Tensors of compressed-tensors in format "pack-quantized"."""

    def quantize(rng: np.random.Generator, outputs: int, inputs: int) -> Parts:
        levels, zeros, scales = drawn(rng, outputs, inputs, bits, group)
        groups = group_index(inputs, group)
        if desc_act:
            groups = rng.permutation(groups)
        tensors = {
            "weight_packed": pack_rows(levels, bits),
            "weight_scale": scales,
            "weight_shape": np.array([outputs, inputs], np.int64),
        }
        if desc_act:
            tensors["weight_g_idx"] = groups.astype(np.int32)
        if symmetric:
            return tensors, floats(levels, 2 ** (bits - 1), scales, groups)
        tensors["weight_zero_point"] = pack_rows(zeros.T, bits).T.copy()
        return tensors, floats(levels, zeros, scales, groups)

    return quantize


def int8(*, symmetric: bool = True) -> Quantize:
    """Tensors of compressed-tensors in format "int-quantized", a scale per output."""

    def quantize(rng: np.random.Generator, outputs: int, inputs: int) -> Parts:
        levels, zeros, scales = drawn(rng, outputs, inputs, 8, -1)
        tensors = {"weight": (levels - 128).astype(np.int8), "weight_scale": scales}
        if symmetric:
            return tensors, floats(levels, 128, scales, group_index(inputs, -1))
        tensors["weight_zero_point"] = (zeros - 128).astype(np.int8)
        return tensors, floats(levels, zeros, scales, group_index(inputs, -1))

    return quantize


def llm_int8() -> Quantize:
    """bitsandbytes' tensors of LLM.int8()."""

    def quantize(rng: np.random.Generator, outputs: int, inputs: int) -> Parts:
        levels = rng.integers(-127, 128, (outputs, inputs)).astype(np.int8)
        largest = rng.uniform(0.1, 0.3, outputs).astype(np.float32)
        scales = (largest / np.float32(127)).reshape(-1, 1)
        found = floats(levels.astype(np.int64), 0, scales, group_index(inputs, -1))
        return {"weight": levels, "SCB": largest, "weight_format": np.array(0, np.uint8)}, found

    return quantize


def bitnet(*, divides: bool = False, online: bool = False) -> Quantize:
    """Ternary weights, four outputs in a number; or the floats that are rounded to them."""

    def quantize(rng: np.random.Generator, outputs: int, inputs: int) -> Parts:
        if online:
            weight = rng.normal(0, 0.1, (outputs, inputs)).astype(np.float32)
            mean = np.float32(1) / (np.float32(1) / np.abs(weight).mean(dtype=np.float32))
            signs = np.where(np.abs(weight) / mean > 0.5, np.sign(weight), 0)
            return {"weight": weight}, (signs * mean).astype(np.float32)
        levels = rng.integers(-1, 2, (outputs, inputs))
        packed = np.zeros((outputs // 4, inputs), np.uint8)
        for output, row in enumerate(levels):
            part, place = divmod(output, outputs // 4)
            packed[place] += (4**part * (row + 1)).astype(np.uint8)
        number = np.float32(8.0 if divides else 0.125)
        return {"weight": packed, "weight_scale": np.array([number])}, (levels * 0.125).astype(np.float32)

    return quantize


def nf4(codes: Array, *, block: int = 32, nested: bool = True) -> Quantize:
    """bitsandbytes' tensors of 4 bits; ``codes`` are the 16 values of a level."""

    def quantize(rng: np.random.Generator, outputs: int, inputs: int) -> Parts:
        index = rng.integers(0, 16, outputs * inputs)
        count = len(index) // block
        tensors: dict[str, Array] = {
            "weight": (index[::2] << 4 | index[1::2]).astype(np.uint8).reshape(-1, 1),
            "weight.quant_map": codes.astype(np.float32),
        }
        state: dict[str, Any] = {"shape": [outputs, inputs], "blocksize": block, "dtype": "float32"}
        if nested:
            table = np.linspace(-1, 1, 256).astype(np.float32)
            numbers = rng.integers(0, 256, count).astype(np.uint8)
            scales = rng.uniform(0.05, 0.1, -(-count // 16)).astype(np.float32)
            tensors |= {"weight.absmax": numbers, "weight.nested_absmax": scales}
            tensors["weight.nested_quant_map"] = table
            state |= {"nested_blocksize": 16, "nested_offset": 0.15}
            largest = table[numbers] * np.repeat(scales, 16)[:count] + np.float32(0.15)
        else:
            largest = tensors["weight.absmax"] = rng.uniform(0.1, 0.3, count).astype(np.float32)
        content = np.frombuffer(json.dumps(state).encode(), np.uint8)
        tensors["weight.quant_state.bitsandbytes__nf4"] = content
        matrix = codes.astype(np.float32)[index].reshape(-1, block) * largest[:, None]
        return tensors, matrix.reshape(outputs, inputs).astype(np.float32)

    return quantize


def write_quantized(
    folder: Path, settings: Mapping[str, Any], quantize: Quantize, model_type: str = "llama"
) -> tuple[Path, Path]:
    """Write a quantized checkpoint and its float twin; return their folders."""
    twin = write_tiny(model_type, folder / "float", dtype=np.float32, **WIDE)
    tensors, rng = load_file(twin / "model.safetensors"), np.random.default_rng(3)
    stored: dict[str, Array] = {}
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        if tensor.ndim == 2 and ".layers." in name:
            parts, tensors[name] = quantize(rng, *tensor.shape)
            stored |= {f"{module}.{suffix}": np.ascontiguousarray(part) for suffix, part in parts.items()}
        else:
            stored[name] = tensor
    save_file({name: np.ascontiguousarray(t) for name, t in tensors.items()}, twin / "model.safetensors")
    target = write_tiny(model_type, folder / "quantized", dtype=np.float32, **WIDE)
    save_file(stored, target / "model.safetensors")
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "quantization_config": dict(settings)}))
    return target, twin


def fp8(sizes: tuple[int, int] | None, *, scale: str = "weight_scale_inv") -> Quantize:
    """Tensors of 8-bit floats with a scale for each block of ``sizes``; for each output if None."""

    def quantize(rng: np.random.Generator, outputs: int, inputs: int) -> Parts:
        rows, columns = sizes or (1, inputs)
        weight = rng.normal(0, 100, (outputs, inputs)).astype(ml_dtypes.float8_e4m3fn)
        scales = rng.uniform(5e-4, 2e-3, (-(-outputs // rows), -(-inputs // columns))).astype(np.float32)
        wide = np.repeat(np.repeat(scales, rows, 0)[:outputs], columns, 1)[:, :inputs]
        return {"weight": weight, scale: scales}, weight.astype(np.float32) * wide

    return quantize


def fp4(block: int) -> Quantize:
    """compressed-tensors' tensors of NVFP4 (blocks of 16) or MXFP4 (32)."""

    def quantize(rng: np.random.Generator, outputs: int, inputs: int) -> Parts:
        codes = rng.integers(0, 16, (outputs, inputs)).astype(np.uint8)
        shape = (outputs, inputs // block)
        tensors: dict[str, Array] = {"weight_packed": codes[:, ::2] | codes[:, 1::2] << 4}
        if block == 16:
            stored = rng.uniform(50, 400, shape).astype(ml_dtypes.float8_e4m3fn)
            tensors |= {"weight_scale": stored, "weight_global_scale": np.array([3000], np.float32)}
            scales = stored.astype(np.float32) / np.float32(3000)
        else:
            tensors["weight_scale"] = rng.integers(122, 126, shape).astype(np.uint8)
            scales = (2.0 ** (tensors["weight_scale"].astype(int) - 127)).astype(np.float32)
        return tensors, e2m1(codes) * np.repeat(scales, block, axis=1)

    return quantize


def e2m1(codes: Array) -> Array:
    """Return the floats of 4-bit codes: a sign, 2 bits of exponent and 1 of mantissa."""
    exponent, mantissa = (codes >> 1 & 3).astype(int), (codes & 1).astype(np.float32)
    sizes = np.where(exponent == 0, mantissa / 2, (1 + mantissa / 2) * 2.0 ** (exponent - 1))
    return np.where(codes & 8, -sizes, sizes).astype(np.float32)


def logits(package: Path) -> Array:
    """Return the logits of a package for two sequences of seven tokens, its products in float32."""
    options = ort.SessionOptions()
    # Optimized, onnxruntime multiplies int4 weights with activations of 8 bits.
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(package / "model.onnx", options, providers=["CPUExecutionProvider"])
    feeds = {
        "input_ids": np.random.default_rng(1).integers(0, 256, (2, 7)),
        "attention_mask": np.ones((2, 7), np.int64),
        "position_ids": np.tile(np.arange(7), (2, 1)),
    }
    for entry in session.get_inputs():
        if entry.name not in feeds:
            feeds[entry.name] = np.zeros((2, entry.shape[1], 0, entry.shape[3]), np.float32)
    result: Array = session.run(["logits"], feeds)[0]
    return result

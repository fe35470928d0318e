"""Checkpoints of compressed-tensors (llm-compressor): integers, packed in words or as int8, and floats.

``pack-quantized``: weight_packed [out, in * bits / 32] holds consecutive inputs in a word, the lowest bits
first, each level plus 2^(bits - 1); weight_zero_point [out * bits / 32, groups] the same of consecutive
outputs; weight_g_idx [in] is the group of each input. ``int-quantized``: weight int8 [out, in] and
weight_zero_point int8. weight_scale is [out, groups]; one group is a scale per output. (compressed_tensors:
compressors/pack_quantized, compressors/naive_quantized.) Floats: ``float8.py``, ``float4.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import CheckpointError, UnsupportedModelError
from ...records import dataclass
from ...storage.stored_tensor import Array, Packed, RawTensor
from . import float4, float8
from .levels import (
    Levels,
    QuantizedTensor,
    Tensors,
    floats,
    input_order,
    matrix_shape,
    needed,
    repeated,
    scale_dtype,
    smaller_blocks,
    unpack,
    with_shape,
)

_SUPPORTED = (
    *("pack-quantized", "int-quantized", "naive-quantized", "float-quantized"),
    *("nvfp4-pack-quantized", "mxfp4-pack-quantized"),
)


def read(settings: Mapping[str, Any], tensors: Tensors) -> dict[str, QuantizedTensor]:
    """Return the quantized weights by name.

    Raises:
        CheckpointError: a tensor is missing, or its shape does not fit the others.
        UnsupportedModelError: the weights are stored in a form other than integers.
    """
    _check_transforms(settings)
    sizes, blocks = _group_sizes(settings), _block_structure(settings)
    quantized: dict[str, QuantizedTensor] = {}
    for name in tensors:
        module = name.removesuffix(".weight_scale")
        if module != name:
            quantized[f"{module}.weight"] = _any_weight(module, tensors, sizes, blocks, settings)
        elif name.endswith(".weight_packed"):
            needed(tensors, f"{name.removesuffix('.weight_packed')}.weight_scale")
    return quantized


def _check_transforms(settings: Mapping[str, Any]) -> None:
    """Refuse rotations of activations (QuIP, SpinQuant); those of weights are part of the stored weights."""
    places = _locations(settings.get("transform_config"))
    online = [place for place in places if place not in ("weight_input", "weight_output")]
    if online:
        raise UnsupportedModelError(
            f"config.json: 'transform_config' of compressed-tensors transforms activations ({online[0]}), "
            "which is not supported; use a checkpoint without it"
        )


def _locations(value: Any) -> Iterator[str]:
    """Yield every ``location`` in nested settings."""
    if isinstance(value, dict) and "location" in value:
        yield str(value["location"])
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for one in inner:
        yield from _locations(one)


def _any_weight(
    module: str,
    tensors: Tensors,
    sizes: set[int],
    blocks: tuple[int, int] | None,
    settings: Mapping[str, Any],
) -> QuantizedTensor:
    plain, pairs = tensors.get(f"{module}.weight"), tensors.get(f"{module}.weight_packed")
    if pairs is not None and pairs.dtype_name == "U8":
        return float4.weight(module, tensors)
    if plain is not None and plain.dtype_name.startswith("F8"):
        return float8.weight(module, tensors, f"{module}.weight_scale", blocks)
    return _weight(module, tensors, sizes, settings)


def _block_structure(settings: Mapping[str, Any]) -> tuple[int, int] | None:
    structures = {
        float8.block_sizes(weights.get("block_structure"), "block_structure")
        for group in settings["config_groups"].values()
        if isinstance(weights := group.get("weights"), dict)
    } - {None}
    if len(structures) > 1:
        raise UnsupportedModelError("compressed-tensors with several values of block_structure")
    return next(iter(structures), None)


def _group_sizes(settings: Mapping[str, Any]) -> set[int]:
    groups = settings.get("config_groups")
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        raise CheckpointError(
            "config.json: 'config_groups' of quantization_config must be an object of objects"
        )
    weights = [group.get("weights") or {} for group in groups.values()]
    sizes = [group.get("group_size") for group in weights if isinstance(group, dict)]
    return {size for size in sizes if isinstance(size, int) and size > 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Matrix:
    """A stored matrix of integers [outputs, inputs].

    Args:
        words: its levels, packed in words or int8.
        is_packed: which of both; zero points have the same form.
        bits: the bits of a level.
        outputs: the number of outputs.
        inputs: the number of inputs.
        scale: the scales.
        groups: the number of scales of an output.
        group: the number of inputs that share a scale.
        zeros: the zero points; None if the levels are signed.
        order: the inputs sorted by group; None if they already are.
    """

    words: RawTensor
    is_packed: bool
    bits: int
    outputs: int
    inputs: int
    scale: RawTensor
    groups: int
    group: int
    zeros: RawTensor | None
    order: npt.NDArray[np.intp] | None

    def tensor(self) -> QuantizedTensor:
        """Return the matrix, which is read when it is written."""
        packed = Packed(
            bits=self.bits,
            block_size=smaller_blocks(self.group, self.inputs),
            has_zero_points=self.zeros is not None,
            scale_dtype=scale_dtype(self.scale),
            order=self.order,
            read=self._read,
        )
        return QuantizedTensor(self.words.path, (self.outputs, self.inputs), packed)

    def _read(self) -> Levels:
        stored = self._unsigned(self.words.array(), axis=1)[:, : self.inputs]
        stored = stored if self.order is None else stored[:, self.order]
        scales = np.broadcast_to(floats(self.scale).reshape(-1, self.groups), (self.outputs, self.groups))
        if self.zeros is None:
            signed = (stored.astype(np.int16) - 2 ** (self.bits - 1)).astype(np.int8)
            return Levels(levels=signed, scales=self._by_block(scales))
        points = self._unsigned(self.zeros.array().reshape(-1, self.groups), axis=0)[: self.outputs]
        return Levels(levels=stored, scales=self._by_block(scales), zero_points=self._by_block(points))

    def _unsigned(self, stored: Array, axis: int) -> npt.NDArray[np.uint8]:
        """Return stored numbers as uint8; packed ones follow each other along ``axis``."""
        return unpack(stored, self.bits, axis) if self.is_packed else _shifted(stored)

    def _by_block(self, per_group: Array) -> Array:
        return repeated(per_group, self.group, smaller_blocks(self.group, self.inputs), self.inputs)


def _weight(module: str, tensors: Tensors, sizes: set[int], settings: Mapping[str, Any]) -> QuantizedTensor:
    is_packed = f"{module}.weight_packed" in tensors
    name = f"{module}.weight_packed" if is_packed else f"{module}.weight"
    words = needed(tensors, name)
    if words.dtype_name != ("I32" if is_packed else "I8"):
        raise UnsupportedModelError(
            f"tensor '{name}' of compressed-tensors format '{settings.get('format')}' has dtype "
            f"{words.dtype_name}; supported formats: {', '.join(_SUPPORTED)}"
        )
    outputs, columns = matrix_shape(tensors, name)
    bits, inputs = _packing(module, tensors, outputs, columns) if is_packed else (8, columns)
    scale, groups = _scale(module, tensors, outputs)
    group = _group_size(module, inputs, groups, sizes)
    zero_rows = -(-outputs * bits // 32) if is_packed else outputs
    return _Matrix(
        words=words,
        is_packed=is_packed,
        bits=bits,
        outputs=outputs,
        inputs=inputs,
        scale=scale,
        groups=groups,
        group=group,
        zeros=_zero_points(module, tensors, zero_rows, groups),
        order=_input_order(module, tensors, inputs, group),
    ).tensor()


def _scale(module: str, tensors: Tensors, outputs: int) -> tuple[RawTensor, int]:
    """Return the scales and the number of groups of an output."""
    name = f"{module}.weight_scale"
    shape = needed(tensors, name).shape
    groups = shape[1] if len(shape) == 2 else 1
    shapes = ((outputs, groups), (outputs,), (1,)) if groups == 1 else ((outputs, groups),)
    return with_shape(tensors, name, *shapes), groups


def _zero_points(module: str, tensors: Tensors, rows: int, groups: int) -> RawTensor | None:
    """Return the zero points; None if there are none, which means that the levels are signed."""
    name = f"{module}.weight_zero_point"
    if name not in tensors:
        return None
    return with_shape(tensors, name, *(((rows, groups), (rows,)) if groups == 1 else ((rows, groups),)))


def _input_order(module: str, tensors: Tensors, inputs: int, group: int) -> npt.NDArray[np.intp] | None:
    """Return the inputs sorted by group; None if they already are."""
    name = f"{module}.weight_g_idx"
    if name not in tensors:
        return None
    index = with_shape(tensors, name, (inputs,)).array()
    return None if (index < 0).all() else input_order(name, index, group)


def _packing(module: str, tensors: Tensors, outputs: int, columns: int) -> tuple[int, int]:
    """Return the bits of a level and the number of inputs, which weight_shape states."""
    name = f"{module}.weight_shape"
    shape = with_shape(tensors, name, (2,)).array().tolist()
    for bits in (4, 8):
        if shape[0] == outputs and shape[1] > 0 and -(-shape[1] * bits // 32) == columns:
            return bits, shape[1]
    raise CheckpointError(
        f"tensor '{name}' states the shape {shape}, which weight_packed [{outputs}, {columns}] does not have "
        "with 4 or 8 bits"
    )


def _group_size(module: str, inputs: int, groups: int, sizes: set[int]) -> int:
    if groups == 1:
        return inputs
    fitting = sorted(size for size in sizes if -(-inputs // size) == groups)
    if fitting:
        return fitting[0]
    raise CheckpointError(
        f"tensor '{module}.weight_scale' has {groups} groups for {inputs} inputs, which no group_size of "
        f"quantization_config gives ({', '.join(map(str, sorted(sizes))) or 'none'})"
    )


def _shifted(signed: Array) -> npt.NDArray[np.uint8]:
    """Return int8 as uint8, 128 higher."""
    return (signed.astype(np.int16) + 128).astype(np.uint8)

"""Convert between tensors of the protocol and NumPy arrays.

Raw data is little-endian in row-major order. A 4-byte length precedes each element of BYTES
(https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_binary_data.md).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from ....errors import RequestError
from ....records import dataclass

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class DataType:
    """An element type.

    Args:
        name: the name in the protocol.
        onnx: onnxruntime's name of a tensor of this type.
        dtype: the NumPy type; object arrays hold ``bytes``.
        contents: the field of ``InferTensorContents`` for this type; None if only raw data is possible.
    """

    name: str
    onnx: str
    dtype: np.dtype[Any]
    contents: str | None


def _type(name: str, onnx: str, dtype: Any, contents: str | None) -> DataType:
    return DataType(name, f"tensor({onnx})", np.dtype(dtype).newbyteorder("<"), contents)


TYPES = {
    one.name: one
    for one in (
        _type("BOOL", "bool", np.bool_, "bool_contents"),
        _type("UINT8", "uint8", np.uint8, "uint_contents"),
        _type("UINT16", "uint16", np.uint16, "uint_contents"),
        _type("UINT32", "uint32", np.uint32, "uint_contents"),
        _type("UINT64", "uint64", np.uint64, "uint64_contents"),
        _type("INT8", "int8", np.int8, "int_contents"),
        _type("INT16", "int16", np.int16, "int_contents"),
        _type("INT32", "int32", np.int32, "int_contents"),
        _type("INT64", "int64", np.int64, "int64_contents"),
        _type("FP16", "float16", np.float16, None),
        _type("FP32", "float", np.float32, "fp32_contents"),
        _type("FP64", "double", np.float64, "fp64_contents"),
        _type("BF16", "bfloat16", ml_dtypes.bfloat16, None),
        _type("BYTES", "string", np.object_, "bytes_contents"),
    )
}
_BY_ONNX = {one.onnx: one for one in TYPES.values()}
_BY_DTYPE = {one.dtype: one for one in TYPES.values()}
_LENGTH = struct.Struct("<I")


def type_named(name: str, datatype: str) -> DataType:
    """Return the element type named ``datatype`` for the input ``name``.

    Raises:
        RequestError: the datatype is unknown.
    """
    if datatype not in TYPES:
        raise RequestError(
            f"input '{name}': unknown datatype '{datatype}'; the datatypes are: {', '.join(TYPES)}"
        )
    return TYPES[datatype]


def type_of_onnx(onnx: str) -> DataType | None:
    """Return the element type for onnxruntime's name of it, or None if the protocol has no such type."""
    return _BY_ONNX.get(onnx)


def type_of(array: Array) -> DataType:
    """Return the element type of an array. Strings are BYTES."""
    return TYPES["BYTES"] if array.dtype.kind in "OSU" else _BY_DTYPE[array.dtype.newbyteorder("<")]


def from_raw(name: str, datatype: str, shape: Sequence[int], data: bytes | memoryview) -> Array:
    """Return the array for the raw data of the input ``name``.

    Raises:
        RequestError: the data does not match the type and shape.
    """
    kind, count = type_named(name, datatype), _count(name, shape)
    if kind.name == "BYTES":
        return _shaped(_split(name, count, bytes(data)), shape)
    wanted = count * kind.dtype.itemsize
    if len(data) != wanted:
        raise RequestError(f"input '{name}': {datatype} {list(shape)} has {wanted} bytes, not {len(data)}")
    return np.frombuffer(data, kind.dtype).reshape(shape)


def to_raw(array: Array) -> bytes:
    """Return the raw data of an array."""
    kind = type_of(array)
    if kind.name != "BYTES":
        return array.astype(kind.dtype, order="C", copy=False).tobytes()
    return b"".join(_LENGTH.pack(len(element)) + element for element in byte_elements(array))


def from_values(name: str, datatype: str, shape: Sequence[int], values: Sequence[Any]) -> Array:
    """Return the array for a list of elements in row-major order.

    Raises:
        RequestError: the number or the type of the elements does not match.
    """
    kind, count = type_named(name, datatype), _count(name, shape)
    if len(values) != count:
        raise RequestError(f"input '{name}': shape {list(shape)} has {count} elements, not {len(values)}")
    if kind.name == "BYTES":
        texts = [one.encode() if isinstance(one, str) else one for one in values]
        if not all(isinstance(one, bytes) for one in texts):
            raise RequestError(f"input '{name}': the elements of BYTES must be strings")
        return _shaped(texts, shape)
    try:
        return _numbers(values, kind.dtype).reshape(shape)
    except (TypeError, ValueError, OverflowError) as error:
        raise RequestError(f"input '{name}': the elements are not {datatype}: {error}") from error


_ALLOWED: dict[str, set[type]] = {"b": {bool}, "i": {int}, "u": {int}}


def _numbers(values: Sequence[Any], dtype: np.dtype[Any]) -> Array:
    """Return numbers or booleans as an array. Raise an error instead of rounding or overflow."""
    allowed: set[type] = _ALLOWED.get(dtype.kind, {int, float})
    wrong = set(map(type, values)) - allowed
    if wrong:
        raise TypeError(f"they include {', '.join(sorted(one.__name__ for one in wrong))}")
    if dtype.kind in "iu" and values:
        bounds, low, high = np.iinfo(dtype), min(values), max(values)
        if low < bounds.min or high > bounds.max:
            raise ValueError(f"{low} to {high} is outside {bounds.min} to {bounds.max}")
    return np.array(values, dtype)


def byte_elements(array: Array) -> list[bytes]:
    """Return the elements of an array of strings or bytes, in row-major order."""
    return [one.encode() if isinstance(one, str) else bytes(one) for one in array.ravel().tolist()]


def of_bytes(elements: Iterable[bytes]) -> Array:
    """Return a 1-dimensional array of BYTES."""
    listed = list(elements)
    return _shaped(listed, [len(listed)])


def _count(name: str, shape: Sequence[int]) -> int:
    if any(size < 0 for size in shape):
        raise RequestError(f"input '{name}': the shape {list(shape)} has a negative size")
    return math.prod(shape)


def _split(name: str, count: int, data: bytes) -> list[bytes]:
    elements: list[bytes] = []
    place = 0
    while place < len(data):
        end = place + _LENGTH.size
        if end > len(data):
            raise RequestError(
                f"input '{name}': the data ends within the 4-byte length of element {len(elements)}"
            )
        place = end + _LENGTH.unpack_from(data, place)[0]
        if place > len(data):
            raise RequestError(f"input '{name}': the data ends within element {len(elements)}")
        elements.append(data[end:place])
    if len(elements) != count:
        raise RequestError(
            f"input '{name}': the shape has {count} elements, but the data has {len(elements)}"
        )
    return elements


def _shaped(elements: Sequence[bytes], shape: Sequence[int]) -> Array:
    array = np.empty(len(elements), np.object_)
    array[:] = elements
    return array.reshape(shape)

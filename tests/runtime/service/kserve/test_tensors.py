"""Tensors of the protocol and arrays, both ways."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensor_models import SAMPLES

from carryall.errors import RequestError
from carryall.runtime.service.kserve.tensors import TYPES, from_raw, from_values, of_bytes, to_raw, type_of


def test_there_is_a_sample_of_every_type() -> None:
    assert SAMPLES.keys() == TYPES.keys()


@pytest.mark.parametrize("datatype", TYPES)
def test_raw_data_comes_back(datatype: str) -> None:
    array = SAMPLES[datatype]
    assert type_of(array).name == datatype
    again = from_raw("x", datatype, array.shape, to_raw(array))
    assert again.dtype == array.dtype
    np.testing.assert_array_equal(again, array)


def test_raw_data_is_little_endian_and_row_major() -> None:
    array = np.array([[1, 2], [3, 4]], ">i4").T
    assert to_raw(array) == struct.pack("<4i", 1, 3, 2, 4)
    assert to_raw(of_bytes([b"ab", b""])) == b"\x02\0\0\0ab\0\0\0\0"
    assert to_raw(np.array(["ä"])) == b"\x02\0\0\0" + "ä".encode()


@pytest.mark.parametrize("datatype", [name for name, kind in TYPES.items() if kind.contents])
def test_listed_elements_come_back(datatype: str) -> None:
    array = SAMPLES[datatype]
    again = from_values("x", datatype, array.shape, array.ravel().tolist())
    assert again.dtype == array.dtype
    np.testing.assert_array_equal(again, array)


@pytest.mark.parametrize(
    ("datatype", "shape", "values", "message"),
    [
        ("FP8", [1], [1.0], "unknown datatype 'FP8'"),
        ("INT8", [2], [1], "has 2 elements, not 1"),
        ("INT8", [-1], [1], "negative size"),
        ("INT8", [1], [128], "outside -128 to 127"),
        ("UINT8", [1], [-1], "outside 0 to 255"),
        ("INT32", [1], [1.5], "not INT32"),
        ("BOOL", [1], [1], "not BOOL"),
        ("FP32", [1], ["a"], "not FP32"),
        ("INT64", [1], [2**70], "not INT64"),
        ("FP64", [1], [10**400], "not FP64"),
        ("INT64", [2], [[1], [2, 3]], "not INT64"),
        ("BYTES", [1], [1], "must be strings"),
    ],
)
def test_elements_of_another_type_are_refused(
    datatype: str, shape: list[int], values: list[Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        from_values("x", datatype, shape, values)


@pytest.mark.parametrize(
    ("datatype", "shape", "data", "message"),
    [
        ("INT32", [2], b"1234", "has 8 bytes, not 4"),
        ("INT32", [2**62, 2**62], b"", "bytes, not 0"),
        ("INT32", [-1], b"", "negative size"),
        ("BYTES", [1], b"\1\0", "ends within the 4-byte length"),
        ("BYTES", [1], b"\xff\xff\xff\xff", "ends within element 0"),
        ("BYTES", [2], b"\0\0\0\0", "has 2 elements, but the data has 1"),
    ],
)
def test_raw_data_of_another_size_is_refused(
    datatype: str, shape: list[int], data: bytes, message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        from_raw("x", datatype, shape, data)


@given(st.lists(st.binary(max_size=9), max_size=5))
def test_elements_of_bytes_come_back(elements: list[bytes]) -> None:
    array = of_bytes(elements)
    assert from_raw("x", "BYTES", [len(elements)], to_raw(array)).tolist() == elements


@given(st.sampled_from(sorted(TYPES)), st.lists(st.integers(-2, 9), max_size=3), st.binary(max_size=64))
def test_random_data_is_a_tensor_or_refused(datatype: str, shape: list[int], data: bytes) -> None:
    try:
        array = from_raw("x", datatype, shape, data)
    except RequestError:
        return
    assert to_raw(array) == data or datatype == "BOOL"

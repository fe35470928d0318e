"""Reserved address space takes memory from the first write only."""

from __future__ import annotations

import itertools
import mmap
import re
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from carryall.errors import ProviderRuntimeError
from carryall.providers.kv.kv_memory import KVSpec, reserve

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
BIG = 2**30


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@linux
def test_reserving_is_free_and_a_page_takes_memory_when_it_is_written() -> None:
    before = resident_bytes()
    array = np.frombuffer(reserve("key", BIG), np.uint8)
    assert resident_bytes() - before < 2**24
    assert not array[:: 2**20].any()
    array[: 2**25] = 1
    assert 2**25 <= resident_bytes() - before < 2**26


@linux
@pytest.mark.parametrize(("piece", "flag"), [(1, "nh"), (2**18, "nh"), (2**20, "hg")])
def test_large_pieces_may_be_in_huge_pages(piece: int, flag: str) -> None:
    memory = np.frombuffer(reserve("state", 2**26, piece), np.uint8)
    address = memory.ctypes.data
    regions = Path("/proc/self/smaps").read_text().split("VmFlags:")
    for region, flags in itertools.pairwise(regions):
        span = re.search(r"^([0-9a-f]+)-([0-9a-f]+) ", region, re.MULTILINE)
        if span and int(span[1], 16) <= address < int(span[2], 16):
            assert flag in flags.splitlines()[0].split()
            return
    raise AssertionError("the memory is not mapped")


def test_too_much_is_refused_with_the_remedy() -> None:
    with pytest.raises(ProviderRuntimeError, match=r"cannot reserve .* 'key'.*Lower max_slots"):
        reserve("key", 2**60)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int8, ml_dtypes.bfloat16])
def test_bytes_of_a_token(dtype: type) -> None:
    assert KVSpec(2, 16, np.dtype(dtype)).bytes_per_token == 32 * np.dtype(dtype).itemsize

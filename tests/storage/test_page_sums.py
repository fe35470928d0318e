from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from carryall.storage.hashes import FolderHashes
from carryall.storage.page_sums import PageSums, ReadSums


@pytest.mark.parametrize("seed", range(4))
def test_sums_of_parts_are_those_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Parts of any size, in any order, with gaps between them."""
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path / "cache"))
    draw, sums, begin = random.Random(seed), PageSums(), 0
    parts = []
    for _ in range(40):
        begin += draw.choice([0, 0, 0, 3, 4096, 5000])
        size = draw.choice([0, 1, 8, 100, 4095, 4096, 4097, 8192, 20_000])
        parts.append((begin, draw.randbytes(size)))
        begin += size
    draw.shuffle(parts)
    with (tmp_path / "a").open("wb") as file:
        for first, content in parts:
            file.seek(first)
            file.write(content)
            sums.add(first, memoryview(content))
    size = (tmp_path / "a").stat().st_size
    with FolderHashes(tmp_path) as known:
        assert sums.digest(size) == known.sums("a")
    sums.add(0, memoryview(b"\1"))
    with FolderHashes(tmp_path) as known:
        assert sums.digest(size) != known.sums("a")
    sums.give_up()
    assert sums.digest(size) is None


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("size", [0, 1, 4096, 50_001])
def test_sums_of_what_is_read_are_those_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, size: int
) -> None:
    """Parts of any size, in any order, that overlap and leave some out."""
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path / "cache"))
    draw, sums = random.Random(seed), ReadSums(size)
    content = np.frombuffer(draw.randbytes(size), np.uint8)
    content.tofile(tmp_path / "a")
    for _ in range(draw.choice([0, 3, 12])):
        begin = draw.randrange(size + 1)
        sums.add(begin, content[begin : begin + draw.choice([0, 100, 4096, 4097, 9000])])
    missing = sums.missing
    assert sum(count for _, count in missing) <= size
    rest = [content[begin : begin + count] for begin, count in missing]
    with FolderHashes(tmp_path) as known:
        assert sums.digest(rest) == known.sums("a")
    assert sums.missing == []

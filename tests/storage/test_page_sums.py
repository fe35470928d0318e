from __future__ import annotations

import random
from pathlib import Path

import pytest

from carryall.storage.hashes import FolderHashes
from carryall.storage.page_sums import PageSums


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

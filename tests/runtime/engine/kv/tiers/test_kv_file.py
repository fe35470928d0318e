"""KV files: reading gives what was written, or nothing."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from carryall.runtime.engine.kv.tiers.kv_file import DamagedFileError, file_name, read_chunk, write_chunk

KEY = bytes(range(32))
SECRET = b"s" * 32


def parts() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [
        rng.standard_normal((2, 5, 4)).astype(dtype) for dtype in (np.float32, ml_dtypes.bfloat16, np.int8)
    ]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kv") / "chunk.kv"
    assert write_chunk(path, KEY, parts(), SECRET) == path.stat().st_size
    return path


def test_parts_come_back_with_type_and_shape(written: Path) -> None:
    for got, expected in zip(read_chunk(written, KEY, SECRET), parts(), strict=True):
        assert got.dtype == expected.dtype
        np.testing.assert_array_equal(got, expected)
    assert list(written.parent.iterdir()) == [written]


@given(data=st.data())
def test_any_flipped_bit_is_noticed(written: Path, data: st.DataObject) -> None:
    content = bytearray(written.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    damaged = written.with_name("damaged.kv")
    damaged.write_bytes(content)
    with pytest.raises(DamagedFileError):
        read_chunk(damaged, KEY, SECRET)


@given(data=st.data())
def test_any_truncation_is_noticed(written: Path, data: st.DataObject) -> None:
    content = written.read_bytes()
    damaged = written.with_name("damaged.kv")
    damaged.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    with pytest.raises(DamagedFileError):
        read_chunk(damaged, KEY, SECRET)


def test_a_file_of_another_version_or_of_other_tokens_is_refused(written: Path) -> None:
    with pytest.raises(DamagedFileError, match="other tokens"):
        read_chunk(written, KEY[::-1], SECRET)
    foreign = written.with_name("foreign.kv")
    foreign.write_bytes(written.read_bytes().replace(b"carryall-kv 3", b"carryall-kv 4"))
    with pytest.raises(DamagedFileError, match="version"):
        read_chunk(foreign, KEY, SECRET)


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "taken.kv").mkdir()
    with pytest.raises(OSError):  # noqa: PT011 -- which one depends on the system
        write_chunk(tmp_path / "taken.kv", KEY, parts(), SECRET)
    assert [path.name for path in tmp_path.iterdir()] == ["taken.kv"]


def test_without_the_key_chunks_cannot_be_forged_or_recognized(tmp_path: Path) -> None:
    stranger = b"t" * 32
    write_chunk(tmp_path / "chunk.kv", KEY, parts(), stranger)
    with pytest.raises(DamagedFileError, match="without this user's key"):
        read_chunk(tmp_path / "chunk.kv", KEY, SECRET)
    assert len({KEY.hex(), file_name(KEY, SECRET), file_name(KEY, stranger)}) == 3

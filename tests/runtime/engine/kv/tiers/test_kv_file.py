"""KV files: reading gives what was written, or nothing."""

from __future__ import annotations

import hmac
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from cryptography.hazmat.primitives import ciphers
from hypothesis import given
from hypothesis import strategies as st

from carryall.runtime.engine.kv.tiers import kv_file
from carryall.runtime.engine.kv.tiers.kv_file import DamagedFileError, file_name, read_chunk, write_chunk

KEY = bytes(range(32))
SECRET = b"s" * 32


def parts() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [
        rng.standard_normal((2, 5, 4)).astype(dtype) for dtype in (np.float32, ml_dtypes.bfloat16, np.int8)
    ]


@pytest.fixture(scope="module", params=["gmac", "hmac"])
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chunk with the proof of each algorithm."""
    path = tmp_path_factory.mktemp("kv") / "chunk.kv"
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "hmac":
            patch.setattr(kv_file, "_gmac", lambda: None)
        assert write_chunk(path, KEY, parts(), SECRET) == path.stat().st_size
    assert path.read_bytes().startswith(b"carryall-kv 4 " + request.param.encode())
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
    foreign.write_bytes(written.read_bytes().replace(b"carryall-kv 4", b"carryall-kv 3"))
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


def test_services_of_two_versions_do_not_meet_in_a_store(monkeypatch: pytest.MonkeyPatch) -> None:
    name = file_name(KEY, SECRET)
    monkeypatch.setattr(kv_file, "_VERSION", b"carryall-kv 5 ")
    assert file_name(KEY, SECRET) != name


def test_gmac_without_cryptography_is_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_chunk(tmp_path / "chunk.kv", KEY, parts(), SECRET)
    monkeypatch.setattr(kv_file, "_gmac", lambda: None)
    with pytest.raises(DamagedFileError, match=r"pip install 'carryall\[shared-cache\]'"):
        read_chunk(tmp_path / "chunk.kv", KEY, SECRET)


def test_the_proof_is_gmac_of_all_that_follows_with_a_key_from_secret_and_salt() -> None:
    """Against GHASH by its definition in NIST SP 800-38D, over AES in ECB."""
    content = bytes(kv_file.encode_chunk(KEY, parts(), SECRET))
    salt, tag, body = content[19:35], content[35:51], content[51:]
    derived = hmac.digest(SECRET, b"kv gmac" + salt, "sha256")
    aes = ciphers.Cipher(ciphers.algorithms.AES(derived), ciphers.modes.ECB()).encryptor()  # noqa: S305 -- a block of the definition
    subkey = int.from_bytes(aes.update(bytes(16)))
    total = 0
    padded = body + bytes(-len(body) % 16) + (8 * len(body)).to_bytes(8) + bytes(8)
    for begin in range(0, len(padded), 16):
        total = product(total ^ int.from_bytes(padded[begin : begin + 16]), subkey)
    mask = int.from_bytes(aes.update(bytes(15) + b"\x01"))
    assert tag == (total ^ mask).to_bytes(16)
    assert kv_file.encode_chunk(KEY, parts(), SECRET) != content  # another salt


def product(left: int, right: int) -> int:
    """Return the product in GF(2^128) of SP 800-38D, whose first bit is the lowest power."""
    result = 0
    for bit in range(127, -1, -1):
        if left >> bit & 1:
            result ^= right
        right = right >> 1 ^ (0xE1 << 120 if right & 1 else 0)
    return result
